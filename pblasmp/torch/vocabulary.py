# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""The two ends of a language model, split over ranks by the vocabulary: embedding and cross entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..context import Context
from ..errors import ArgumentError, ArgumentTypeError
from ..layout.grid import integer, one_of
from ..tensor_parallel import shard
from ..tensor_parallel.plan import check_context
from .meshes import local, reduce
from .operators import Gradients, once, operator, own, refuse_transforms
from .parameters import ParallelModule

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["VocabParallelEmbedding", "vocab_parallel_cross_entropy"]


class VocabParallelEmbedding(ParallelModule):
    """An embedding with its rows split over the ranks. Making one is collective over the context.

    ``weight`` is a DTensor of (V, K); a rank's part, ``weight.to_local()``, is (V/P, K): its words, as
    ``pblasmp.tensor_parallel.shard`` splits them. The name is Megatron's.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        ctx: the ranks.
        sequence_parallel: the output is scattered: every rank gets its part of the first dimension.
        device: by default this rank's GPU on cublasmp, the CPU on the host engine.
        dtype: by default PyTorch's.
        embedding: a whole table whose values on rank 0 are taken; by default drawn as torch.nn.Embedding does.
        device_mesh: the one-dimensional mesh of the context's ranks that the weight is on; by default the one that the
            context was made from, or a new one.

    Raises:
        ArgumentError: a size is out of range, or ``embedding`` does not fit; raised on every rank.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ctx: Context,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
        embedding: torch.nn.Embedding | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        num_embeddings = integer(num_embeddings, "num_embeddings", 0, ArgumentError)
        embedding_dim = integer(embedding_dim, "embedding_dim", 0, ArgumentError)
        super().__init__(ctx, device, dtype, device_mesh, weight=((num_embeddings, embedding_dim), 0))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.shard = shard(num_embeddings, ctx.size, ctx.rank)
        if embedding is None:
            self.reset_parameters()
        else:
            self.load_embedding(embedding)

    @classmethod
    def from_embedding(
        cls,
        embedding: torch.nn.Embedding,
        ctx: Context,
        *,
        sequence_parallel: bool = False,
        device: Any = None,
        device_mesh: DeviceMesh | None = None,
    ) -> Self:
        """Return this rank's shard of rank 0's whole table. Collective over the context.

        Args:
            embedding: of the same sizes on every rank; only rank 0's values are used. It is not changed.
            ctx, sequence_parallel, device, device_mesh: as for the class.
        """
        _check_embedding(embedding)
        return cls(
            embedding.num_embeddings, embedding.embedding_dim, ctx=ctx, sequence_parallel=sequence_parallel,
            device=device, dtype=embedding.weight.dtype, embedding=embedding, device_mesh=device_mesh,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Draw new values, on the CPU and as torch.nn.Embedding does. Collective over the context."""
        self.load_embedding(
            torch.nn.Embedding(self.num_embeddings, self.embedding_dim, device="cpu", dtype=self.weight.dtype)
        )

    def load_embedding(self, embedding: torch.nn.Embedding) -> None:
        """Take this rank's shard of the values of rank 0's whole table. Collective over the context.

        Raises:
            ArgumentError: sizes or types differ; raised on every rank.
        """
        with self.ctx.agreement("load_embedding") as facts:
            facts.update(layer=repr(self), dtype=str(self.weight.dtype))
            _check_embedding(embedding)
            mine = (self.num_embeddings, self.embedding_dim), self.weight.dtype
            given = tuple(embedding.weight.shape), embedding.weight.dtype
            if given != mine:
                texts = [f"{n}x{k} {dtype}" for (n, k), dtype in (given, mine)]
                raise ArgumentError(f"embedding: {texts[0]}, expected {texts[1]}")
        self._take_of_root("weight", embedding.weight)

    def forward(self, words: Tensor) -> Tensor:
        """Return the rows of these words, summed over the ranks. Collective over the context.

        Args:
            words: integers from 0 to V - 1 of any shape, the same on every rank.

        Returns:
            ``(*words.shape, K)`` on every rank; with ``sequence_parallel`` this rank's part of the first dimension.

        Raises:
            ArgumentError: words are not integers or, on the CPU, out of range.
        """
        refuse_transforms("VocabParallelEmbedding")
        if not isinstance(words, Tensor) or words.is_floating_point() or words.is_complex():
            raise ArgumentError(
                f"words: expected a tensor of integers, got {getattr(words, 'dtype', type(words).__name__)}"
            )
        y: Tensor = vocab_embedding(
            words, local(self.weight), self.ctx.name, self.num_embeddings, self.sequence_parallel
        )
        return y

    def extra_repr(self) -> str:
        """Return the layer's options as text, for printing."""
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, ranks={self.ctx.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ctx: Context,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return torch.nn.functional.cross_entropy of logits that are split by the vocabulary. Collective over the context.

    No rank ever has all logits of a token: the ranks exchange three numbers per token.

    Args:
        logits: (..., V/P), this rank's words, as ``ColumnParallelLinear`` returns them; split by ``shard``. May be
            a DTensor that is split along its last dimension.
        target: (...), integers from 0 to V - 1 or ``ignore_index``, the same on every rank.
        ctx: the ranks.
        ignore_index: tokens with this target do not count.
        reduction: "mean" of the tokens that count, "sum" or "none".

    Returns:
        A scalar, or with "none" the loss of each token, (...); the same on every rank.

    Raises:
        ArgumentError: shapes or types do not fit.
    """
    check_context(ctx, "vocab_parallel_cross_entropy")
    refuse_transforms("vocab_parallel_cross_entropy")
    if not one_of(reduction, ("mean", "sum", "none")):
        raise ArgumentError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    logits = local(logits)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not isinstance(target, Tensor):
        raise ArgumentError(
            "vocab_parallel_cross_entropy: expected logits of a floating-point type and integer targets"
        )
    if target.shape != logits.shape[:-1] or target.is_floating_point():
        raise ArgumentError(
            f"target: {target.dtype} of shape {tuple(target.shape)}, expected integers of shape "
            f"{tuple(logits.shape[:-1])}, as logits have them but for the last dimension"
        )
    losses, *_ = vocab_losses(logits, target, ctx.name, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


# -- the operators


def _embedding(words: Tensor, weight: Tensor, name: str, total: int, scatter: bool) -> Tensor:
    ctx = Context.named(name)
    if words.device.type == "cpu":
        _check_range("words", words, total)
    mine = own(total, ctx)
    here = (words >= mine.start) & (words < mine.stop)
    if mine.stop > mine.start:
        rows = torch.nn.functional.embedding(torch.where(here, words - mine.start, 0), weight)
        rows = rows.masked_fill_(~here[..., None], 0)
    else:
        rows = weight.new_zeros((*words.shape, weight.shape[-1]))
    rows = reduce(rows, ctx)
    return rows[own(rows.shape[0], ctx)].clone() if scatter else rows


def _embedding_fake(words: Tensor, weight: Tensor, name: str, total: int, scatter: bool) -> Tensor:
    lead = list(words.shape)
    if scatter:
        mine = own(lead[0], Context.named(name))
        lead[0] = mine.stop - mine.start
    return weight.new_empty((*lead, weight.shape[-1]))


def _embedding_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    words, weight, ctx.context_name, ctx.total, ctx.scatter = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(words)


@once
def _embedding_back(node: Any, gy: Tensor) -> Gradients:
    (words,) = node.saved_tensors
    if node.scatter:
        gy = gather_rows(gy, node.context_name, words.shape[0])
    first = own(node.total, Context.named(node.context_name)).start
    here = ((words >= first) & (words < first + node.rows)).reshape(-1)
    index = torch.where(here, words.reshape(-1) - first, node.rows)  # an extra row for the others' words
    gw = gy.new_zeros(node.rows + 1, gy.shape[-1]).index_add(
        0, index, gy.reshape(index.shape[0], gy.shape[-1])
    )
    return None, gw[: node.rows], None, None, None


vocab_embedding = operator(
    "vocab_embedding",
    "(Tensor words, Tensor weight, str ctx, int total, bool scatter) -> Tensor",
    _embedding,
    _embedding_fake,
)
vocab_embedding.register_autograd(_embedding_back, setup_context=_embedding_saves)


def _gather_rows(x: Tensor, name: str, total: int) -> Tensor:
    ctx = Context.named(name)
    whole = x.new_zeros((total, *x.shape[1:]))
    whole[own(total, ctx)] = x
    return reduce(whole, ctx)


def _gather_rows_fake(x: Tensor, name: str, total: int) -> Tensor:
    return x.new_empty((total, *x.shape[1:]))


gather_rows = operator(
    "gather_rows", "(Tensor x, str ctx, SymInt total) -> Tensor", _gather_rows, _gather_rows_fake
)


# -- cross entropy: of each token, the largest logit, the sum of exponentials and the logit of its target


def _losses(logits: Tensor, target: Tensor, name: str, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, the logarithm of its sum of exponentials, and this rank's first word."""
    ctx = Context.named(name)
    width = logits.shape[-1]
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = values.amax(-1) if width else values.new_full(target.shape, -torch.inf)
    block = values.new_full((1,), width)
    *_, block = reduced = reduce(torch.cat([largest.reshape(-1), block]), ctx, dist.ReduceOp.MAX)
    largest, first = reduced[:-1].reshape(target.shape), block.long() * ctx.rank
    here = (target >= first) & (target < first + width)
    chosen = torch.zeros_like(largest)
    if width:
        chosen = values.gather(-1, torch.where(here, target - first, 0)[..., None])[..., 0]
    exponentials = (values - largest[..., None]).exp().sum(-1)
    words = values.new_full((1,), width)
    sums = [exponentials.reshape(-1), torch.where(here, chosen, 0).reshape(-1), words]
    exponentials, chosen, words = reduce(torch.cat(sums), ctx).split([target.numel(), target.numel(), 1])
    if target.device.type == "cpu":
        _check_range("target", torch.where(target == ignore, 0, target), int(words.item()))
    logarithm = exponentials.reshape(target.shape).log() + largest
    losses = torch.where(target == ignore, 0, logarithm - chosen.reshape(target.shape))
    return losses, logarithm, first.clone()


def _losses_fake(logits: Tensor, target: Tensor, name: str, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    losses = logits.new_empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    return losses, torch.empty_like(losses), target.new_empty((), dtype=torch.int64)


def _losses_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, _, ctx.ignore = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, *output[1:])


@once
def _losses_back(node: Any, g: Tensor | None, *_: None) -> Gradients:
    if g is None:
        return None, None, None, None
    logits, target, logarithm, first = node.saved_tensors
    words = torch.arange(logits.shape[-1], device=logits.device) + first
    hit = (target[..., None] == words).to(g.dtype)
    gradient = (logits.to(g.dtype) - logarithm[..., None]).exp() - hit
    counts = (target != node.ignore).to(g.dtype) * g
    return (gradient * counts[..., None]).to(logits.dtype), None, None, None


vocab_losses = operator(
    "vocab_losses",
    "(Tensor logits, Tensor target, str ctx, int ignore) -> (Tensor, Tensor, Tensor)",
    _losses,
    _losses_fake,
)
vocab_losses.register_autograd(_losses_back, setup_context=_losses_saves)


# -- checks


def _check_range(name: str, words: Tensor, total: int) -> None:
    """Raise ArgumentError unless all words are in the vocabulary; all ranks have the same words. Local."""
    if words.numel() and not 0 <= int(words.min()) <= int(words.max()) < total:
        raise ArgumentError(
            f"{name}: from {int(words.min())} to {int(words.max())}, expected 0 to {total - 1}"
        )


def _check_embedding(embedding: object) -> None:
    if not isinstance(embedding, torch.nn.Embedding):
        raise ArgumentTypeError(f"embedding: expected a torch.nn.Embedding, got {type(embedding).__name__}")
    for option in ("padding_idx", "max_norm"):
        if getattr(embedding, option) is not None:
            raise ArgumentError(
                f"embedding: {option} is {getattr(embedding, option)}, expected None: it is not supported"
            )
