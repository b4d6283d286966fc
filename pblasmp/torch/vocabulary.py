# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""The two ends of a language model, split over ranks by the vocabulary: embedding and cross entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..context import Context
from ..errors import ArgumentError, short_repr
from ..layout.grid import integer, one_of
from ..tensor_parallel import shard
from ..tensor_parallel.call import check_context
from .forms import count, own, refuse_transforms
from .meshes import local, reduce, reduce_scatter
from .parameters import ParallelModule, agreed
from .regions import region
from .registry import Gradients, once, operator

if TYPE_CHECKING:
    from typing_extensions import Self

_EMBEDDING, _LOSS = "VocabParallelEmbedding", "vocab_parallel_cross_entropy"


class VocabParallelEmbedding(ParallelModule):
    """An embedding with its rows split over the ranks. Making one is collective over the context.

    ``weight`` is a DTensor of (V, K); a rank's part, ``weight.to_local()``, is (V/P, K): its words, as
    ``pblasmp.tensor_parallel.shard`` splits them. The name is Megatron's.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        ctx: the ranks.
        padding_idx: a word whose row gets no gradient and starts as zeros, as in torch.nn.Embedding.
        sequence_parallel: the output is scattered: every rank gets its part of the first dimension.
        sequence_dim: with ``sequence_parallel`` the dimension that is split instead of the first one.
        device: by default this rank's GPU on cublasmp, the CPU on the host engine; "meta", also by
            ``with torch.device("meta")``, makes a layer without values.
        dtype: by default PyTorch's.
        embedding: a whole table whose values on rank 0 are taken; by default drawn as torch.nn.Embedding does.
        device_mesh: the one-dimensional mesh of the context's ranks that the weight is on; by default the one that the
            context was made from, or a new one.

    Raises:
        ArgumentError: a size is out of range, or ``embedding`` does not fit; raised on every rank.
    """

    _whole_kind = torch.nn.Embedding
    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ctx: Context,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: Any = None,
        dtype: Any = None,
        embedding: torch.nn.Embedding | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        with agreed(ctx, _EMBEDDING):
            num_embeddings = integer(num_embeddings, "num_embeddings", 0, ArgumentError)
            embedding_dim = integer(embedding_dim, "embedding_dim", 0, ArgumentError)
            if padding_idx is not None:
                padding_idx = integer(padding_idx, "padding_idx", -num_embeddings, ArgumentError)
                if padding_idx >= num_embeddings:
                    raise ArgumentError(
                        f"padding_idx: expected {-num_embeddings} to {num_embeddings - 1}, got {padding_idx}"
                    )
                padding_idx %= num_embeddings
            sequence_dim = integer(sequence_dim, "sequence_dim", 0, ArgumentError)
        super().__init__(ctx, device, dtype, device_mesh, weight=((num_embeddings, embedding_dim), 0))
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.shard = shard(num_embeddings, ctx.size, ctx.rank)
        if embedding is None:
            self.reset_parameters()
        else:
            self.load_embedding(embedding)

    @classmethod
    def from_embedding(cls, embedding: torch.nn.Embedding, ctx: Context, **options: Any) -> Self:
        """Return this rank's shard of rank 0's whole table. Collective over the context.

        Args:
            embedding: of the same sizes on every rank; only rank 0's values are used, the others' may be on the meta
                device. It is not changed. If rank 0's is on the meta device, so is the new one: see
                ``reset_parameters``. A frozen table stays frozen.
            ctx: the ranks.
            **options: as for the class, without ``dtype`` and ``padding_idx``, which are the table's.

        Raises:
            ArgumentError: as ``from_linear`` of ``ColumnParallelLinear`` does; or it has an option of
                torch.nn.Embedding that is not supported. Raised on every rank.
        """
        return cls._of_whole(embedding, ctx, options)

    @classmethod
    def _options_of_whole(cls, whole: torch.nn.Embedding) -> dict[str, Any]:
        return {name: getattr(whole, name) for name in ("num_embeddings", "embedding_dim", "padding_idx")}

    @classmethod
    def _check_whole(cls, whole: Any, *, anew: bool = False) -> None:
        super()._check_whole(whole, anew=anew)
        for option, value in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if (given := getattr(whole, option)) != value:
                raise ArgumentError(f"embedding: {option} is {given}, expected {value}: it is not supported")

    def reset_parameters(self) -> None:
        """Draw new values, on the CPU and as torch.nn.Embedding does. Collective over the context.

        As ``reset_parameters`` of ``ColumnParallelLinear``: the same values on any number of ranks; on the meta device
        nothing is drawn.
        """
        if not self._may_draw():
            return
        with self._generator_of_root() as generator:
            self._draw("weight", lambda whole: whole.normal_(generator=generator))
        if self.padding_idx is not None and self.shard.start <= self.padding_idx < self.shard.stop:
            with torch.no_grad():
                local(self.weight)[self.padding_idx - self.shard.start].zero_()

    def load_embedding(self, embedding: torch.nn.Embedding) -> None:
        """Take this rank's shard of the values of rank 0's whole table. Collective over the context.

        Raises:
            ArgumentError: sizes or types differ; raised on every rank.
        """
        self._load_whole(embedding)

    def forward(self, words: Tensor) -> Tensor:
        """Return the rows of these words, summed over the ranks. Collective over the context.

        Args:
            words: integers from 0 to V - 1 of any shape, the same on every rank.

        Returns:
            ``(*words.shape, K)`` on every rank; with ``sequence_parallel`` this rank's part of the sequence.

        Raises:
            ArgumentError: words are not integers or, on the CPU, out of range; raised on every rank.
        """
        refuse_transforms(_EMBEDDING)
        self._check_ties()
        dim = self.sequence_dim if self.sequence_parallel else 0
        fault = ""
        if not isinstance(words, Tensor) or words.is_floating_point() or words.is_complex():
            found = getattr(words, "dtype", type(words).__name__)
            fault = f"words: expected a tensor of integers, got {found}"
        elif isinstance(words, DTensor) or not _has_values(words):
            kind = "a DTensor" if isinstance(words, DTensor) else f"one {_described(words)}"
            fault = f"words: expected a plain tensor, got {kind}"
        elif self.sequence_parallel and words.ndim <= dim:
            fault = f"words: shape is {tuple(words.shape)}, expected a sequence along dimension {dim}"
        if fault:
            with self.ctx.agreement(_EMBEDDING):
                raise ArgumentError(fault)
        y: Tensor = vocab_embedding(
            words.transpose(0, dim) if dim else words, local(self.weight), self.ctx.name, self.num_embeddings,
            -1 if self.padding_idx is None else self.padding_idx, self.sequence_parallel,
        )  # fmt: skip
        return y.transpose(0, dim) if dim else y

    def extra_repr(self) -> str:
        """Return the layer's options as text, for printing."""
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, ranks={self.ctx.size}, "
            f"sequence_parallel={self.sequence_parallel}"
            f"{f', sequence_dim={self.sequence_dim}' if self.sequence_dim else ''}"
            f"{'' if self.padding_idx is None else f', padding_idx={self.padding_idx}'}"
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ctx: Context,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return torch.nn.functional.cross_entropy of logits that are split by the vocabulary. Collective over the context.

    No rank ever has all logits of a token: the ranks exchange three numbers per token, four with ``label_smoothing``.

    Args:
        logits: (..., V/P), this rank's words, as ``ColumnParallelLinear`` returns them; split by ``shard``. May be
            a DTensor that is split along its last dimension.
        target: (...), integers from 0 to V - 1 or ``ignore_index``, the same on every rank.
        ctx: the ranks.
        weight: (V,), a factor for each word, the same on every rank.
        ignore_index: tokens with this target do not count.
        reduction: "mean" of the tokens that count (with ``weight``, weighted by their targets' factors), "sum" or
            "none".
        label_smoothing: from 0 to 1: how much of each target is spread evenly over all words.

    Returns:
        A scalar, or with "none" the loss of each token, (...); the same on every rank; float32 for logits of 16 bits.

    Raises:
        ArgumentError: shapes or types do not fit; raised on every rank.
    """
    check_context(ctx, _LOSS)
    refuse_transforms(_LOSS)
    logits = local(logits) if isinstance(logits, Tensor) else logits
    fault = _fault_of_loss(logits, target, ctx, weight, ignore_index, reduction, label_smoothing)
    if fault:
        with ctx.agreement(_LOSS):
            raise ArgumentError(fault)
    losses, *_ = vocab_losses(logits, target, weight, ctx.name, ignore_index, float(label_smoothing))
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counts = target != ignore_index
    if weight is None:
        return total / counts.sum()
    return total / (weight.detach()[torch.where(counts, target, 0)] * counts).sum().to(total.dtype)


def _fault_of_loss(
    logits: object, target: object, ctx: Context, weight: object, ignore: object, reduction: object,
    smoothing: object,
) -> str:  # fmt: skip
    """Return what is wrong with the arguments, "" if nothing is. Local."""
    if not one_of(reduction, ("mean", "sum", "none")):
        return f"reduction: expected 'mean', 'sum' or 'none', got {short_repr(reduction)}"
    if isinstance(ignore, bool) or not isinstance(ignore, int):
        return f"ignore_index: expected an integer, got {short_repr(ignore)}"
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing <= 1:
        return f"label_smoothing: expected a number from 0 to 1, got {short_repr(smoothing)}"
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not isinstance(target, Tensor):
        return "vocab_parallel_cross_entropy: expected logits of a floating-point type and integer targets"
    if not (_has_values(logits) and _has_values(target)):
        return (
            f"{_LOSS}: expected dense tensors, got logits {_described(logits)}, targets {_described(target)}"
        )
    integers = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if not logits.ndim or target.shape != logits.shape[:-1] or not integers:
        return (
            f"target: {target.dtype} of shape {tuple(target.shape)}, expected integers of shape "
            f"{tuple(logits.shape[:-1])}, as logits have them but for the last dimension"
        )
    if weight is None:
        return ""
    if not isinstance(weight, Tensor) or isinstance(weight, DTensor) or not weight.is_floating_point():
        return "weight: expected a plain tensor of floating-point numbers, one for each word"
    if weight.ndim != 1 or count(weight.shape[0], ctx) != logits.shape[-1]:
        return (
            f"weight: shape is {tuple(weight.shape)}, expected one number for each word of all ranks: "
            f"this one has {logits.shape[-1]}"
        )
    return "" if weight.device == logits.device else f"weight: on {weight.device}, expected {logits.device}"


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and not on the meta device, where the ranks would not meet. Local."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _described(tensor: Tensor) -> str:
    return f"that is {tensor.layout} on {tensor.device}"


# -- the operators


def _embedding_fake(
    words: Tensor, weight: Tensor, name: str, total: int, padding: int, scatter: bool
) -> Tensor:
    lead = list(words.shape)
    if scatter:
        lead[0] = count(lead[0], Context.named(name))
    return weight.new_empty((*lead, weight.shape[-1]))


def _embedding_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    words, weight, ctx.context_name, ctx.total, ctx.padding, ctx.scatter = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(words)


@once
def _embedding_back(node: Any, gy: Tensor) -> Gradients:
    (words,) = node.saved_tensors
    if node.scatter:
        gy = region(gy, node.context_name, "gather", "same", 0, words.shape[0])
    first = own(node.total, Context.named(node.context_name)).start
    here = (words >= first) & (words < first + node.rows) & (words != node.padding)
    index = torch.where(here, words - first, node.rows).reshape(-1)  # an extra row for all other words
    gw = gy.new_zeros(node.rows + 1, gy.shape[-1]).index_add(
        0, index, gy.reshape(index.shape[0], gy.shape[-1])
    )
    return None, gw[: node.rows]


@operator(
    "(Tensor words, Tensor weight, str ctx, int total, int padding, bool scatter) -> Tensor",
    _embedding_fake,
    _embedding_back,
    _embedding_saves,
)
def vocab_embedding(
    words: Tensor, weight: Tensor, name: str, total: int, padding: int, scatter: bool
) -> Tensor:
    """Return the rows of ``words``, of which each rank has a part. Collective over the context."""
    ctx = Context.named(name)
    with ctx.running(_EMBEDDING):
        with ctx.agreement(_EMBEDDING) as facts:
            facts.update(words=str(tuple(words.shape)), weight=f"{total}x{weight.shape[-1]} {weight.dtype}")
            if words.device.type == "cpu":
                _check_range("words", words, total)
        mine = own(total, ctx)
        here = (words >= mine.start) & (words < mine.stop)
        if mine.stop > mine.start:
            rows = torch.nn.functional.embedding(torch.where(here, words - mine.start, 0), weight)
            rows = rows.masked_fill_(~here[..., None], 0)
        else:
            rows = weight.new_zeros((*words.shape, weight.shape[-1]))
        return reduce_scatter(rows, ctx) if scatter else reduce(rows, ctx)


# -- cross entropy: of each token, the largest logit, the sum of exponentials, the logit of its target, and with label
# smoothing the weighted sum of all logits


def _factors(weight: Tensor, target: Tensor, ignore: int, dtype: torch.dtype) -> Tensor:
    """Return the factor of each token's target. Local."""
    return weight[torch.where(target == ignore, 0, target)].to(dtype)


def _spread(weight: Tensor | None, words: Tensor, smoothing: float, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Return what label smoothing gives to each of ``words``, but for its factor, and to all together. Local."""
    share = smoothing / words.to(dtype)
    return share, smoothing if weight is None else share * weight.to(dtype).sum()


def _losses_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, name: str, ignore: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    losses = logits.new_empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    return losses, torch.empty_like(losses), target.new_empty((2,), dtype=torch.int64)


def _losses_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, ctx.context_name, ctx.ignore, ctx.smoothing = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, weight, *output[1:])


@once
def _losses_back(node: Any, g: Tensor | None, *_: None) -> Gradients:
    if g is None:
        return (None,)
    logits, target, weight, logarithm, (first, total) = node.saved_tensors
    words = torch.arange(logits.shape[-1], device=logits.device) + first
    hit = (target[..., None] == words).to(g.dtype)
    probabilities = (logits.to(g.dtype) - logarithm[..., None]).exp()
    gradient = probabilities - hit
    if weight is not None:
        gradient = gradient * _factors(weight, target, node.ignore, g.dtype)[..., None]
    if node.smoothing:
        share, spread = _spread(weight, total, node.smoothing, g.dtype)
        mine = (
            1
            if weight is None
            else weight[own(weight.shape[0], Context.named(node.context_name))].to(g.dtype)
        )
        gradient = (1 - node.smoothing) * gradient + spread * probabilities - share * mine
    gradient = torch.where((target == node.ignore)[..., None], 0, gradient * g[..., None])
    return (gradient.to(logits.dtype),)


@operator(
    "(Tensor logits, Tensor target, Tensor? weight, str ctx, int ignore, float smoothing) -> (Tensor, Tensor, Tensor)",
    _losses_fake,
    _losses_back,
    _losses_saves,
)
def vocab_losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, name: str, ignore: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, logarithms of sums of exponentials, and this rank's first word and the number of all."""
    ctx = Context.named(name)
    with ctx.running(_LOSS):
        with ctx.agreement(_LOSS) as facts:
            facts.update(
                target=str(tuple(target.shape)), dtype=str(logits.dtype), weight=weight is not None,
                ignore_index=ignore, label_smoothing=smoothing,
            )  # fmt: skip
        width = logits.shape[-1]
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = values.amax(-1) if width else values.new_full(target.shape, -torch.inf)
        block = values.new_full((1,), width)
        reduced = reduce(torch.cat([largest.reshape(-1), block]), ctx, dist.ReduceOp.MAX)
        largest, first = reduced[:-1].reshape(target.shape), reduced[-1].long() * ctx.rank
        here = (target >= first) & (target < first + width)
        chosen = torch.zeros_like(largest)
        if width:
            chosen = values.gather(-1, torch.where(here, target - first, 0)[..., None])[..., 0]
            chosen = torch.where(here, chosen, 0)
        exponentials = (values - largest[..., None]).exp().sum(-1)
        everything = values if weight is None else values * weight[own(weight.shape[0], ctx)].to(values.dtype)
        sums = [exponentials, chosen, *([everything.sum(-1)] if smoothing else [])]
        words = values.new_full((1,), width)
        total = reduce(torch.cat([*(each.reshape(-1) for each in sums), words]), ctx)
        exponentials, chosen, *rest = total[:-1].reshape(len(sums), *target.shape)
        if target.device.type == "cpu":
            with ctx.agreement(_LOSS):
                _check_range("target", torch.where(target == ignore, 0, target), int(total[-1].item()))
        logarithm = exponentials.log() + largest
        losses = logarithm - chosen
        if weight is not None:
            losses = losses * _factors(weight, target, ignore, losses.dtype)
        if smoothing:
            share, spread = _spread(weight, total[-1], smoothing, losses.dtype)
            losses = (1 - smoothing) * losses + spread * logarithm - share * rest[0]
        return torch.where(target == ignore, 0, losses), logarithm, torch.stack([first, total[-1].long()])


# -- checks


def _check_range(name: str, words: Tensor, total: int) -> None:
    """Raise ArgumentError unless all words are in the vocabulary; all ranks have the same words. Local."""
    if words.numel() and not 0 <= int(words.min()) <= int(words.max()) < total:
        raise ArgumentError(
            f"{name}: from {int(words.min())} to {int(words.max())}, expected 0 to {total - 1}"
        )
