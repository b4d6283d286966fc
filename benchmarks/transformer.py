# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks against PyTorch's own tensor parallelism: ``mpirun -n 2 python -m benchmarks.transformer``.

The block of examples/torch_transformer.py, heads, MLP and tokens split: forward, loss, backward and optimizer step.
Every way trains a copy of the same model on the same ranks and tokens. Its losses are compared with those of one
process first; then the ways take turns. Runs on CPU ranks or GPUs, under mpirun or torchrun, without NVLink multicast.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, parallel

import pblasmp as pb
import pblasmp.torch as pt
from benchmarks import results as runs
from benchmarks.gpu_bench import together
from benchmarks.gpu_matmul import forbid_multicast
from benchmarks.ranks import on_ranks, paired
from examples.torch_transformer import Block
from pblasmp.tensor_parallel import shard
from pblasmp.tuning.timing import slowest

STUCK_SECONDS = 300
WARM_UP = {"cpu": 0, "cuda": 4}
"""Steps before each timed round: the other ways have used PyTorch's memory on the GPU meanwhile."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
PBLASMP, PYTORCH, ASYNC = "pblasmp", "PyTorch", "PyTorch async TP, compiled"


class Work:
    """The model as one process has it, and the tokens. The same on every rank."""

    def __init__(self, ctx: pb.Context, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
        self.ctx, self.mesh, self.arguments = ctx, mesh, arguments
        device, dtype = arguments.device, getattr(torch, arguments.dtype)
        torch.manual_seed(0)
        with torch.device(device):  # where large models are made faster
            blocks = (
                Block(arguments.width, arguments.heads, arguments.bias) for _ in range(arguments.layers)
            )
            self.whole = nn.Sequential(*blocks).to(dtype)
        self.x = torch.randn(arguments.tokens, arguments.batch, arguments.width).to(device, dtype)
        self.target = self.x.roll(1, 0)
        self.mine = shard(arguments.tokens, ctx.size, ctx.rank)

    def split(self, styles: Any) -> nn.Module:
        """Return a copy of the model, split by the styles of a module: pblasmp's or PyTorch's. Collective."""
        column = styles.ColwiseParallel(input_layouts=Shard(0))
        row = styles.RowwiseParallel(output_layouts=Shard(0))
        norm = styles.SequenceParallel(sequence_dim=0, use_local_output=True)
        plan = {"norms.*": norm, "qkv": column, "out": row, "up": column, "down": row}
        model = copy.deepcopy(self.whole)
        for block in model:
            parallel.parallelize_module(block, self.mesh, plan)
        return model

    def synchronize(self) -> None:
        """Wait until this rank's GPU is idle, if there is one."""
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()


class Training:
    """A model with its optimizer and these of its tokens; ``forward`` may be its compiled form."""

    def __init__(self, work: Work, model: nn.Module, mine: slice, forward: Any = None) -> None:
        self.forward, self.elements = forward or model, work.x.numel()
        self.x, self.target = work.x[mine], work.target[mine]
        rate = 1e-3 * min(1.0, 256 / work.arguments.width)  # wide models diverge with the rate of narrow ones
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def steps(self, count: int) -> list[Tensor]:
        """Train, and return these tokens' part of the loss before each step. Collective."""
        return [self.step() for _ in range(count)]

    def step(self) -> Tensor:
        """Train one step, and return the loss before it. Collective."""
        self.optimizer.zero_grad()
        loss = (self.forward(self.x) - self.target).float().square().sum() / self.elements
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Captured(Training):
    """Training whose whole step is a CUDA graph, after two steps that are not."""

    replay: Any = None

    def __init__(self, work: Work, model: nn.Module, mine: slice, forward: Any = None) -> None:
        super().__init__(work, model, mine, forward)
        self.eager_steps, self.stream = 2, torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        for group in self.optimizer.param_groups:
            group["capturable"] = True

    def step(self) -> Tensor:
        """Train one step, and return the loss before it. Collective."""
        if self.replay is None and self.eager_steps:
            self.eager_steps -= 1
            with torch.cuda.stream(self.stream):
                loss = super().step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.replay is None:
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad()
            with torch.cuda.graph(graph, stream=self.stream):
                self.loss = super().step()
            self.replay = graph.replay
        self.replay()
        return self.loss.clone()


# -- the ways


class Way(NamedTuple):
    """How to train. ``ready`` may fail on any rank; where it has not, ``make`` is collective.

    Attributes:
        make: returns a split model, and the form of it that is called.
        ready: prepares this rank. Local.
        training: how the model is trained.
    """

    make: Callable[[Work], tuple[nn.Module, Any]]
    ready: Callable[[Work], Any] = lambda work: None  # noqa: ARG005
    training: type[Training] = Training


def eager(styles: Any, work: Work) -> tuple[nn.Module, Any]:
    model = work.split(styles)
    return model, model


def compiled(styles: Any, work: Work) -> tuple[nn.Module, Any]:
    model = work.split(styles)
    return model, torch.compile(model)


def ready_for_async_tp(work: Work) -> None:
    """Let PyTorch's group have symmetric memory. Local."""
    if work.arguments.device == "cpu" and not work.arguments.rehearse:
        raise NotImplementedError("it needs GPUs that reach each other's memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions need it no more
        symmetric_memory.enable_symm_mem_for_group(work.mesh.get_group().group_name)


def async_tp(work: Work) -> tuple[nn.Module, Any]:
    """PyTorch's compiler fuses collectives and products, and runs them in parts over symmetric memory."""
    fused: list[str] = []

    def look(graph: fx.Graph) -> None:
        fused.extend(name for node in graph.nodes if "symm_mem.fused_" in (name := str(node.target)))

    model = work.split(parallel)
    options = {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": look}
    if work.arguments.rehearse:  # what the fused products do not need takes a third of the time to compile
        options |= {"pattern_matcher": False, "cpp.simdlen": 0}
    forward = torch.compile(model, options=options)
    forward(work.x[work.mine])  # compiles
    if not fused:
        raise RuntimeError("the compiler fused no product: it would be the plain way")
    return model, forward


@contextmanager
def rehearsal() -> Iterator[None]:
    """Let PyTorch's compiler fuse products on the CPU, too, where they are computed plainly."""
    plain = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        plain.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    with symmetric_memory._test_mode(), patch.object(dist, "is_nccl_available", return_value=True):
        yield


def ways(arguments: argparse.Namespace) -> dict[str, Way]:
    """Return the ways to train by their names."""
    found = {PBLASMP: Way(partial(eager, pt)), PYTORCH: Way(partial(eager, parallel))}
    if arguments.compile:
        found[f"{PBLASMP}, compiled"] = Way(partial(compiled, pt))
        found[f"{PYTORCH}, compiled"] = Way(partial(compiled, parallel))
    if arguments.graph:
        found[f"{PBLASMP}, a step as a CUDA graph"] = Way(partial(eager, pt), training=Captured)
        found[f"{PYTORCH}, a step as a CUDA graph"] = Way(partial(eager, parallel), training=Captured)
    return found | {ASYNC: Way(async_tp, ready_for_async_tp)}


# -- checks and times


def prepared(work: Work, expected: Sequence[float], way: Way) -> Training:
    """Return a way that has trained its first steps, their losses checked. Collective.

    Raises:
        WrongLossError: they differ from those of one process, on every rank.
    """
    model, forward = way.make(work)
    training = way.training(work, model, work.mine, forward)
    mine = [float(each) for each in training.steps(len(expected))]
    losses = [sum(step) for step in zip(*work.ctx.comm.allgather(mine), strict=True)]
    tolerance = TOLERANCES[work.arguments.dtype]
    if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(losses, expected, strict=True)):
        texts = [", ".join(f"{each:.6g}" for each in row) for row in (losses, expected)]
        raise WrongLossError(f"the losses are {texts[0]}, in one process {texts[1]}")
    return training


class WrongLossError(Exception):
    """A way does not compute what one process does."""


def measured(work: Work, trainings: Mapping[str, Training]) -> dict[str, list[float]]:
    """Return the seconds of each round on the slowest rank; the ways take turns. Collective."""
    names, arguments = list(trainings), work.arguments
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        alive()
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            trainings[name].steps(WARM_UP[arguments.device])
            work.synchronize()
            work.ctx.comm.barrier()
            start = time.perf_counter()
            trainings[name].steps(arguments.steps)
            work.synchronize()
            seconds[name].append(time.perf_counter() - start)
    ranks = work.ctx.comm.allgather(seconds)
    return {name: slowest([each[name] for each in ranks]) for name in names}


def compare(work: Work) -> dict[str, Any]:
    """Check and time all ways; return the results. Collective."""
    arguments, comm = work.arguments, work.ctx.comm
    alone = Training(work, copy.deepcopy(work.whole), slice(None))
    expected = [float(each) for each in alone.steps(arguments.steps)]
    del alone
    trainings, faults = {}, {}
    for name, way in ways(arguments).items():
        alive()
        _, fault = together(comm, partial(way.ready, work))
        if not fault:
            training, fault = together(comm, partial(prepared, work, expected, way))
        if fault:
            faults[name] = fault
        else:
            trainings[name] = training
    seconds = measured(work, trainings)
    trainings.clear()
    gc.collect()  # NCCL destroys no communicator while a CUDA graph holds work on it
    return {
        "options": {name: str(each) for name, each in vars(arguments).items()},
        "ranks": work.ctx.size,
        "torch": torch.__version__,
        "losses": expected,
        "faults": faults,
        "seconds": seconds,
    }


def alive() -> None:
    """Start the time anew after which a stuck run ends."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)


# -- what is printed


def report(results: Mapping[str, Any], arguments: argparse.Namespace) -> str:
    """Return the results as Markdown."""
    seconds, device = results["seconds"], "CPU"
    if arguments.device == "cuda":
        device = torch.cuda.get_device_name()
    blocks = f"{arguments.layers} × width {arguments.width}, {arguments.heads} heads"
    tokens = f"{arguments.tokens} × {arguments.batch} tokens, {arguments.dtype}"
    lines = [
        f"{blocks}, {tokens}: {results['ranks']} ranks, {device}, PyTorch {results['torch']}",
        f"the losses of {arguments.steps} steps are those of one process: {', '.join(seconds) or 'none'}",
        *(f"left out: {name}: {fault}" for name, fault in results["faults"].items()),
        "",
        "| | tokens per second | min..max | pblasmp's rate / its |",
        "| --- | ---: | ---: | ---: |",
    ]
    count = arguments.steps * arguments.tokens * arguments.batch
    for name, each in seconds.items():
        rates = [count / one for one in each]
        ratio = f"{paired(seconds, name, PBLASMP):.2f}" if PBLASMP in seconds else ""
        lines.append(f"| {name} | {median(rates):.0f} | {min(rates):.0f}..{max(rates):.0f} | {ratio} |")
    return "\n".join(lines)


def run_of(ctx: pb.Context, results: Mapping[str, Any], arguments: argparse.Namespace) -> runs.Run:
    """Return the results as data: tokens per second of every round."""
    count = arguments.steps * arguments.tokens * arguments.batch
    launcher = "torchrun" if dist.is_torchelastic_launched() else "mpirun"
    names = ("layers", "width", "heads", "tokens", "batch", "dtype")
    row: dict[str, Any] = {
        "case": {name: getattr(arguments, name) for name in names},
        "rates": {name: [count / one for one in each] for name, each in results["seconds"].items()},
    }
    if results["faults"]:
        row["failed"] = results["faults"]
    facts, name = runs.facts(ctx), f"transformer-{launcher}-{arguments.width}-{arguments.tokens}"
    return runs.Run(
        benchmark=name, date=runs.today(), commit=runs.this_commit(),
        ranks=ctx.size, gpus=ctx.size if arguments.device == "cuda" else 0, machine=facts["machine"],
        versions=facts["versions"] | {"PyTorch": torch.__version__}, options=runs.options_of(arguments),
        reference="", sample="all", rows=[row],
    )  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=1, help="blocks (default: 1)")
    parser.add_argument("--width", type=int, default=512, help="of the model; the MLP's is 4 times as much")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence (default: 512)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: 2)")
    parser.add_argument("--bias", action="store_true", help="of linear layers; async TP cannot fuse them")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float32")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile pblasmp and PyTorch's plain way, too"
    )
    parser.add_argument("--graph", action="store_true", help="a whole step as a CUDA graph, too")
    parser.add_argument("--steps", type=int, default=5, help="that are checked, and in a round (default: 5)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every way (default: 9)")
    runs.add_option(parser)
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)  # async TP without GPUs
    return parser.parse_args(argv)


def check(arguments: argparse.Namespace, ranks: int) -> None:
    """Raise SystemExit unless the heads and the tokens can be split evenly, as PyTorch's styles need it."""
    if arguments.heads % ranks or arguments.tokens % ranks or arguments.width % arguments.heads:
        raise SystemExit(
            f"--heads {arguments.heads}, --tokens {arguments.tokens}, --width {arguments.width}: expected heads and "
            f"tokens that the {ranks} ranks divide, and a width that the heads divide"
        )


def start(device: str) -> DeviceMesh:
    """Make PyTorch's process group of the ranks, under torchrun or MPI. Collective."""
    torchrun = dist.is_torchelastic_launched()
    if not torchrun:
        if not on_ranks():
            raise SystemExit("start it under a launcher: mpirun -n 2 python -m benchmarks.transformer")
        pt.init_process_group()
    if device == "cuda":
        rank = os.environ.get("LOCAL_RANK") or 0 if torchrun else dist.get_rank()
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    if torchrun:
        dist.init_process_group()
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    forbid_multicast()
    alive()
    mesh = start(arguments.device)
    check(arguments, mesh.size())
    where: dict[str, Any] = {"engine": "host"}
    if arguments.device == "cuda":  # one of MPI's ranks would leave multiprocessors to PyTorch's group
        where = {"comm": mesh, "engine": "cublasmp"}
    with pb.Context(**where) as ctx, rehearsal() if arguments.rehearse else nullcontext():
        if arguments.device == "cpu":
            torch.set_num_threads(ctx.engine.threads)
        results = compare(Work(ctx, mesh, arguments))
        if ctx.rank == 0:
            print(report(results, arguments), flush=True)
            directory = runs.directory_of(arguments)
            if results["seconds"] and directory is not None:
                print(f"\n{runs.save(run_of(ctx, results, arguments), directory)}")
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if any(fault.startswith(WrongLossError.__name__) for fault in results["faults"].values()):
        raise SystemExit("a loss was wrong: see above")


if __name__ == "__main__":
    main()
