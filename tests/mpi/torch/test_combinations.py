# SPDX-License-Identifier: Apache-2.0
"""Split layers with FSDP2, device meshes, styles, DTensors, torch.compile and torch.func, under both launchers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers.mpi import on_ranks, run_mpi, run_torch, starts_ranks
from tests.helpers.slow import only_long
from tests.helpers.torch_ranks import Mlp, compare, full, host, import_compiler, integers, own, raises, world

RUN = {"mpirun": run_mpi, "torchrun": run_torch}
pytestmark = starts_ranks
VOCABULARY, WIDTH, HIDDEN = 11, 6, 8


class Model(nn.Module):
    """A very small language model: words of a sequence, (tokens, batch), to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        x = self.labels(words)
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def split_model(whole: Model, mesh: DeviceMesh, sequence_parallel: bool) -> Model:
    """Return the model split over a device mesh by styles; the context of the mesh is found."""
    split = copy.deepcopy(whole)
    held = Shard(0) if sequence_parallel else Replicate()
    plan = {
        "labels": pt.RowwiseParallel(output_layouts=held),
        "up": pt.ColwiseParallel(input_layouts=held),
        "down": pt.RowwiseParallel(output_layouts=held),
        "head": pt.ColwiseParallel(input_layouts=held),
    }
    if sequence_parallel:
        plan["norm"] = pt.SequenceParallel()
    return parallelize_module(split, mesh, plan)


def batch(seed: int, tokens: int, width: int = 2) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(seed)
    words, target = (torch.randint(0, VOCABULARY, (tokens, width), generator=data) for _ in range(2))
    target[0, 0] = -100
    return words, target


def trained_alike(
    whole: Model, split: Model, ctx: pb.Context, *, clip: bool = True, run: Callable[..., Any] | None = None
) -> None:
    """Three steps of AdamW with clipping: losses, norms and parameters as in one process."""
    run = run or split
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (whole, split)]
    for step in range(3):
        words, target = batch(step, 7)  # tokens that no number of ranks divides
        expected = nn.functional.cross_entropy(whole(words).flatten(0, 1), target.flatten())
        loss = pt.vocab_parallel_cross_entropy(run(words), target, ctx)
        compare(f"step {step}: loss", loss, expected, 1e-12)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.backward()
        loss.backward()
        if clip:
            norms = [full(nn.utils.clip_grad_norm_(m.parameters(), 0.1)).item() for m in (whole, split)]
            assert norms[1] == pytest.approx(norms[0], rel=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    for (name, got), expected in zip(split.named_parameters(), whole.parameters(), strict=True):
        compare(name, full(got), expected, 1e-10)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def everything(comm: Any) -> None:
    with world(comm) as size:
        mesh = init_device_mesh("cpu", (size,))
        with pb.Context(mesh, engine="host") as ctx:
            for sequence_parallel in (False, True):
                styles(ctx, mesh, sequence_parallel)
            for case in (dtensors, functional, refused):
                case(ctx)
        if size == 4:
            data_parallel()
            subgroups()


def styles(ctx: pb.Context, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    whole = new_model()
    split = split_model(whole, mesh, sequence_parallel)
    assert type(split.up) is pt.ColumnParallelLinear
    assert type(split.labels) is pt.VocabParallelEmbedding
    assert split.up.ctx is ctx
    mixed = not sequence_parallel  # the LayerNorm's parameters then are plain tensors, which no norm takes in
    trained_alike(whole, split, ctx, clip=not mixed)
    if sequence_parallel:
        assert split.norm.weight.grad.placements == (Replicate(),)
        for model in (whole, split):
            model.zero_grad()
        for step in range(2):  # whose gradients are added up
            words, target = batch(step, 7)
            nn.functional.cross_entropy(whole(words).flatten(0, 1), target.flatten()).backward()
            pt.vocab_parallel_cross_entropy(split(words), target, ctx).backward()
        compare("norm, accumulated", full(split.norm.weight.grad), whole.norm.weight.grad, 1e-9)


def dtensors(ctx: pb.Context) -> None:
    """Operands that are DTensors: the result is one, and gradients are."""
    mesh = ctx.made_of
    t, k, n = 7, 13, 10
    for function, x_at, w_at, b_at, y_at in (
        (pt.allgather_matmul, Shard(0), Shard(0), Shard(0), Shard(2)),
        (pt.matmul_reduce_scatter, Shard(2), Shard(1), Replicate(), Shard(0)),
        (pt.matmul_allreduce, Shard(2), Shard(1), Replicate(), Replicate()),
        (pt.matmul_allgather, Replicate(), Shard(0), Shard(0), Replicate()),
    ):
        whole = [integers(ctx, 1, t, 2, k), integers(ctx, 2, n, k), integers(ctx, 3, n)]
        x, w, b = (
            distribute_tensor(each, mesh, [at]).requires_grad_()
            for each, at in zip(whole, (x_at, w_at, b_at), strict=True)
        )
        for each in whole:
            each.requires_grad_()
        expected, y = nn.functional.linear(*whole), function(x, w, ctx, bias=b)
        assert y.placements == (y_at,), f"{function.__name__}: {y.placements}"
        assert y.shape == expected.shape
        compare(function.__name__, y.full_tensor(), expected)
        expected.square().sum().backward()
        y.square().sum().backward()
        for name, got, plain in zip("xwb", (x, w, b), whole, strict=True):
            compare(f"{function.__name__}: gradient of {name}", got.grad.full_tensor(), plain.grad)
        if ctx.size > 1:
            wrong = w.redistribute(placements=[Shard(1) if w_at == Shard(0) else Shard(0)])
            raises(r"w: a DTensor placed .*redistribute it first", function, x, wrong, ctx, bias=b)


def functional(ctx: pb.Context) -> None:
    """functional_call works; what does not says so: transforms of torch.func, second derivatives."""
    torch.manual_seed(0)
    layer = pt.ColumnParallelLinear(5, 8, ctx=ctx).double()
    x = integers(ctx, 1, 4, 5)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    compare("functional_call", torch.func.functional_call(layer, parameters, (x,)), layer(x))
    w, b = (each.to_local() if isinstance(each, DTensor) else each for each in parameters.values())

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return pt.matmul_allgather(x, w, ctx, bias=b).square().sum()

    asked = w.clone().requires_grad_()
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(
            pb.UnsupportedError, match=r"torch\.func\.grad, vjp, jvp and vmap do not go through"
        ):
            transform(lambda w: loss(w, x))(w)
    left: list[Tensor] = []  # a transform that is over leaves what it has wrapped
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(x)
    gradients = [torch.autograd.grad(loss(asked, each), asked)[0] for each in (x, x, *left, *left)]
    for each in gradients[1:]:
        compare("what a transform leaves", each, gradients[0])
    embedding = pt.VocabParallelEmbedding(8, 5, ctx=ctx).double()
    logits = integers(ctx, 2, 4, 3).requires_grad_()
    twice = (
        lambda: (loss(asked, x), asked),
        lambda: (embedding(torch.tensor([1, 7])).sum(), embedding.weight),
        lambda: (pt.vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), ctx), logits),
    )
    for make in twice:
        with pytest.raises(pb.UnsupportedError, match="no second derivative: do not pass create_graph=True"):
            torch.autograd.grad(*make(), create_graph=True)
    with pytest.raises(pb.UnsupportedError, match="no second derivative"):  # where PyTorch would give zeros
        torch.autograd.functional.hessian(lambda w: loss(w, x), w)


def refused(ctx: pb.Context) -> None:
    mesh = ctx.made_of
    raises(r"input_layouts is Shard\(dim=-2\), expected", pt.ColwiseParallel, input_layouts=Shard(-2))
    raises(r"output_layouts is Shard\(dim=-1\), expected", pt.RowwiseParallel, output_layouts=Shard(-1))
    raises(
        "expected .* if the input is gathered",
        lambda: pt.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    )
    replicated = pt.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    raises(
        "RowwiseParallel: input_layouts: expected .* if the output is scattered",
        lambda: parallelize_module(nn.Linear(3, 4), mesh, replicated),
    )
    raises("ColwiseParallel: ctx: expected", pt.ColwiseParallel, ctx=mesh)
    raises(
        "expected a torch.nn.Linear, got LayerNorm",
        lambda: parallelize_module(nn.LayerNorm(3), mesh, pt.ColwiseParallel()),
    )
    raises(
        "expected a torch.nn.Linear or torch.nn.Embedding, got LayerNorm",
        lambda: parallelize_module(nn.LayerNorm(3), mesh, pt.RowwiseParallel()),
    )
    raises("device_mesh: expected a DeviceMesh, got int", pt.RowParallelLinear, 3, 4, ctx=ctx, device_mesh=1)
    square = DeviceMesh("cpu", torch.arange(ctx.size)[None], mesh_dim_names=("dp", "tp"))
    raises("a device mesh of 2 dimensions, expected 1, as device_mesh\\['tp'\\]", pb.Context, square)
    raises("device_mesh: .*, expected one dimension", pt.RowParallelLinear, 3, 4, ctx=ctx, device_mesh=square)
    raises("has a default process group already", pt.init_process_group, kind=pb.UnsupportedError)


def data_parallel() -> None:
    """Data parallel by FSDP2 or DDP on one axis of a mesh, tensor parallel on the other, against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pb.Context(mesh["tp"], engine="host") as ctx:
        for make in (
            partial(by_fsdp, sequence_parallel=False),
            partial(by_fsdp, sequence_parallel=True),
            by_ddp,
        ):
            trained_on_halves(ctx, mesh=mesh, make=make)


def by_fsdp(ctx: pb.Context, mesh: DeviceMesh, *, sequence_parallel: bool) -> tuple[Mlp, Any, bool]:
    whole = Mlp((8, 6, 8), None, ctx, dtype=torch.float64)
    split = Mlp((8, 6, 8), whole, ctx, sequence_parallel=sequence_parallel)
    for layer in (split.up, split.down, split):
        fully_shard(layer, mesh=mesh["dp"])
    return whole, split, sequence_parallel


def by_ddp(ctx: pb.Context, mesh: DeviceMesh) -> tuple[Mlp, Any, bool]:
    whole = Mlp((8, 6, 8), None, ctx, dtype=torch.float64, bias=False)
    return whole, DistributedDataParallel(Functions(whole, ctx), process_group=mesh["dp"].get_group()), True


class Functions(nn.Module):
    """Two products by functions, of this rank's parts of a whole model's weights, which are plain tensors."""

    def __init__(self, whole: Mlp, ctx: pb.Context) -> None:
        super().__init__()
        part, self.ctx = own(whole.up.out_features, ctx), ctx
        self.up = nn.Parameter(whole.up.weight.detach()[part].clone())
        self.down = nn.Parameter(whole.down.weight.detach()[:, part].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(pt.allgather_matmul(x, self.up, self.ctx))
        return pt.matmul_reduce_scatter(hidden, self.down, self.ctx)


def trained_on_halves(ctx: pb.Context, mesh: DeviceMesh, make: Any) -> None:
    torch.manual_seed(0)
    whole, split, sequence_parallel = make(ctx, mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (whole, split)]
    for step in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        (whole(x).square().sum() / 2).backward()
        # which takes the mean over its ranks
        split(mine[own(4, ctx)] if sequence_parallel else mine).square().sum().backward()
        if make is not by_ddp:
            norms = [full(nn.utils.clip_grad_norm_(m.parameters(), 0.1)).item() for m in (whole, split)]
            assert norms[1] == pytest.approx(norms[0], rel=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    like = Functions(whole, ctx) if make is by_ddp else whole
    for (name, got), expected in zip(split.named_parameters(), like.parameters(), strict=True):
        compare(name, full(got), expected, 1e-10)


def subgroups() -> None:
    """Two tensor-parallel groups of two ranks at once, next to a context of all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with (
        pb.Context(dist.group.WORLD, engine="host") as everyone,
        pb.Context(mesh["tp"], engine="host") as pair,
    ):
        for ctx in (pair, everyone, pair):
            whole = nn.Linear(6, 10, dtype=torch.float64)
            split = pt.ColumnParallelLinear.from_linear(whole, ctx=ctx, gather_output=True)
            whole.load_state_dict({name: full(value) for name, value in split.state_dict().items()})
            x = integers(ctx, ctx.size + (dist.get_rank() // 2 if ctx is pair else 0), 5, 6)
            compare("y", split(x), whole(x), 1e-12)
            split(x).sum().backward()
            norm = full(nn.utils.get_total_norm([p.grad for p in split.parameters()]))
            assert len(set(ctx.comm.allgather(norm.item()))) == 1, "norms"


@on_ranks(4, timeout=300)
def test_groups_of_mpi_without_a_process_group(comm: Any) -> None:
    """Contexts of MPI's sub-communicators, where nobody made a process group."""
    if isinstance(comm, dist.ProcessGroup):
        return
    part = comm.Split(comm.rank // 2, comm.rank)
    with host(part) as ctx:
        layer = pt.ColumnParallelLinear(4, 6, ctx=ctx)
        assert full(layer.weight).shape == (6, 4)
        with (
            pb.Context(comm, engine="host") as everyone,
            pytest.raises(
                pb.UnsupportedError, match=r"call pblasmp.torch.init_process_group\(\) on all ranks"
            ),
        ):
            pt.ColumnParallelLinear(4, 6, ctx=everyone)
    assert not dist.is_initialized()
    part.Free()


def compiled(comm: Any, backend: str, sequence_parallel: list[bool], tokens: list[int]) -> None:
    """torch.compile without a graph break or a warning, losses and gradients as without it."""
    import_compiler()
    with world(comm) as size:
        mesh = init_device_mesh("cpu", (size,))
        with pb.Context(mesh, engine="host") as ctx:
            for s in sequence_parallel:
                one_compiled(ctx, mesh, s, backend, tokens)
            compiled_uneven(ctx, backend=backend)


def one_compiled(ctx: pb.Context, mesh: DeviceMesh, s: bool, backend: str, tokens: list[int]) -> None:
    eager = split_model(new_model(), mesh, s)
    compiled = copy.deepcopy(eager)

    def loss(model: nn.Module, words: Tensor, target: Tensor) -> Tensor:
        return pt.vocab_parallel_cross_entropy(model(words), target, ctx)

    fast = torch.compile(loss, backend=backend, fullgraph=True)
    for n in tokens:
        words, target = batch(n, n)
        results = []
        for function, model in ((loss, eager), (fast, compiled)):
            model.zero_grad()
            value = function(model, words, target)
            value.backward()
            results.append((value, [full(p.grad) for p in model.parameters()]))
        compare("loss", results[1][0], results[0][0], 1e-12)
        for got, expected in zip(results[1][1], results[0][1], strict=True):
            compare("gradient", got, expected, 1e-12)


def compiled_uneven(ctx: pb.Context, backend: str) -> None:
    """Rows that differ between ranks: an error on every rank, or right of a DTensor, whose shape says how many."""
    whole, w = integers(ctx, 1, 7, 6), integers(ctx, 2, 8, 6)
    fast = torch.compile(pt.allgather_matmul, backend=backend, fullgraph=True)
    mine = whole[own(7, ctx)].clone()
    raises(r"x: the ranks hold 7 rows together, expected", fast, mine, w[own(8, ctx)].clone(), ctx)
    x, split = (distribute_tensor(each, ctx.made_of, [Shard(0)]) for each in (whole, w))
    compare("y", full(fast(x, split, ctx)), whole @ w.t())


# -- the tests


@pytest.mark.parametrize(("launcher", "nranks"), [("mpirun", 2), *only_long(("mpirun", 4)), ("torchrun", 4)])
def test_together_with_what_pytorch_has(launcher, nranks):
    RUN[launcher](everything, nranks, timeout=300)


@pytest.mark.parametrize(
    ("launcher", "backend", "sequence_parallel", "tokens"),
    [
        ("mpirun", "aot_eager", [False, *only_long(True)], [8, 4]),
        ("torchrun", "inductor", [*only_long(False), True], [8]),
    ],
)
def test_compiled(launcher, backend, sequence_parallel, tokens):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    how = {"backend": backend, "sequence_parallel": sequence_parallel, "tokens": tokens}
    RUN[launcher](compiled, 2, timeout=500, **how)
