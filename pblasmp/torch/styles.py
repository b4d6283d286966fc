# SPDX-License-Identifier: Apache-2.0
"""Styles for torch.distributed.tensor.parallel.parallelize_module that use the products of this package."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ..context import Context
from ..epilogue import Scales
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, short_repr
from ..layout.grid import integer
from ..tensor_parallel.call import check_context
from .linear import ColumnParallelLinear, RowParallelLinear
from .meshes import context_of
from .parameters import ParallelModule
from .scaling import DelayedScaling
from .sequence import Sequence, work_on_part
from .vocabulary import VocabParallelEmbedding
from .wholes import check_keeps, check_parameters, check_whole, tied


class _Style(ParallelStyle):
    """Turns a whole layer into a split one in place: references to it stay valid."""

    def __init__(
        self,
        ctx: Context | None,
        input_layouts: Placement,
        output_layouts: Placement,
        scales: DelayedScaling | Scales | None,
        algo: str,
        backward_algo: str,
    ) -> None:
        super().__init__()
        self.scales, self.algo, self.backward_algo = scales, algo, backward_algo
        if ctx is not None:
            check_context(ctx, type(self).__name__)
        self.ctx, self.input_layouts, self.output_layouts = ctx, input_layouts, output_layouts

    def _expect(self, which: str, *expected: Placement, sequence: bool = False) -> None:
        """Raise ArgumentError unless a layout is one of those ``expected``, or with ``sequence`` splits a sequence."""
        found = getattr(self, which)
        if found not in expected and not (sequence and _sequence_dim(found) is not None):
            texts = [*map(repr, expected), *(["Shard(dim) of a sequence"] if sequence else [])]
            raise ArgumentError(
                f"{type(self).__name__}: {which} is {short_repr(found)}, expected {' or '.join(texts)}"
            )

    def _context(self, mesh: DeviceMesh) -> Context:
        """Return the context of a mesh's ranks. Local."""
        if self.ctx is not None:
            return self.ctx
        found = context_of(mesh)
        if found is None:
            raise ArgumentError(
                f"{type(self).__name__}: no open context on {mesh}: make one with "
                "pblasmp.Context(device_mesh), or pass ctx to the style"
            )
        return found

    def _kinds(self) -> tuple[type[torch.nn.Module], ...]:
        """Return which of PyTorch's layers it splits. Local."""
        raise NotImplementedError

    def _check(self, kind: type[torch.nn.Module]) -> None:
        """Raise an error if the style's options are not for such a layer. Local."""

    def _split(self, module: torch.nn.Module, ctx: Context, mesh: DeviceMesh) -> ParallelModule:
        """Return the split module that is to take a whole one's place. Collective over the context."""
        raise NotImplementedError

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        name, ctx = type(self).__name__, self._context(device_mesh)
        how = type(self), self.input_layouts, self.output_layouts, device_mesh
        with ctx.agreement(name) as facts:
            facts["split already"] = isinstance(module, ParallelModule)
            if isinstance(module, ParallelModule):
                if module.made_by == how:  # one module in several places of a model
                    return module
                raise ArgumentError(f"{name}: this {type(module).__name__} is split already, in another way")
            if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                raise ArgumentError(
                    f"{name}: this {type(module).__name__} has parameters that are DTensors already"
                )
            kind = _kind(module, *self._kinds(), style=name)
            check_whole(module, kind, name)
            check_parameters(module, name, in_place=True)
            self._check(kind)
        whole = {key: value for key, value in module._parameters.items() if value is not None}
        split = self._split(module, ctx, device_mesh)
        with ctx.agreement(name):
            check_keeps(module, split, kind, name)
            for key, parameter in whole.items():
                made: Any = split._parameters[key]
                made = tied(parameter, made, split._split_along[key], name)
                vars(made).update(vars(parameter) | vars(made))  # with what the user has noted there
                split.register_parameter(key, made)
                split._replaced[key] = weakref.ref(parameter)
        split.made_by = how
        return _become(module, split)


def _sequence_dim(placement: Placement) -> int | None:
    """Return the dimension of a sequence that a placement splits; None if it is no such placement. Local."""
    return placement.dim if type(placement) is Shard and placement.dim >= 0 else None


def _checked(layer: object) -> None:
    """Check no layer again. Local."""


def _device(layer: Any) -> torch.device | None:
    """Return where a layer is; None, the default, if it has no values on this rank. Local."""
    return None if layer.weight.is_meta else layer.weight.device


def _kind(module: torch.nn.Module, *kinds: type[torch.nn.Module], style: str) -> type[torch.nn.Module]:
    """Return which of PyTorch's layers a module is, or raise ArgumentError. Local."""
    names = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    for kind in kinds:
        if isinstance(module, kind):
            return kind
    raise ArgumentTypeError(f"{style}: expected a {names}, got {type(module).__name__}")


@cache
def _both(split: Any, whole: Any) -> type[torch.nn.Module]:
    """Return a class of modules that are split, and are still instances of a user's class. Local."""
    return type(whole.__name__, (split, whole), {})


def _become(module: torch.nn.Module, split: ParallelModule) -> torch.nn.Module:
    """Turn a whole layer into a split one in place; its hooks stay. Local."""
    kinds: Any = type(split), type(module)
    module.__class__ = kinds[0] if kinds[1] in (torch.nn.Linear, torch.nn.Embedding) else _both(*kinds)
    fresh = vars(torch.nn.Module())
    vars(module).update({name: value for name, value in vars(split).items() if name not in fresh})
    module._parameters, module._modules = split._parameters, split._modules
    return module


class ColwiseParallel(_Style):
    """Split a torch.nn.Linear by its outputs: ``ColumnParallelLinear``. Applying it is collective over the context.

    Args:
        ctx: the ranks; by default the open context that was made from the device mesh, ``pb.Context(device_mesh)``.
        input_layouts: Replicate(), every rank has the input, or Shard(dim): its part of a sequence, Shard(0) of the
            first dimension, Shard(1) if the batch is the first one.
        output_layouts: Shard(-1), this rank's outputs, or Replicate(): all of them.
        scales: multiply in 8 bits, as for ``ColumnParallelLinear``.
        algo, backward_algo: algorithms by name, as for ``ColumnParallelLinear``.

    Raises:
        ArgumentError: a layout is none of these, or both gather. On application: the module is not a torch.nn.Linear,
            or overrides forward; something of it would be lost, such as a parametrization, a child or a hook of a
            parameter; or its weight is that of another module, which is split in another way. Raised on every rank,
            before the module is changed.
    """

    def __init__(
        self,
        *,
        ctx: Context | None = None,
        input_layouts: Placement = Replicate(),  # noqa: B008 - immutable
        output_layouts: Placement = Shard(-1),  # noqa: B008
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        super().__init__(ctx, input_layouts, output_layouts, scales, algo, backward_algo)
        self._expect("input_layouts", Replicate(), sequence=True)
        self._expect("output_layouts", Shard(-1), Replicate())
        if input_layouts != Replicate() and output_layouts == Replicate():
            raise ArgumentError(
                "ColwiseParallel: output_layouts: expected Shard(-1) if the input is gathered, got Replicate()"
            )

    def _kinds(self) -> tuple[type[torch.nn.Module], ...]:
        return (torch.nn.Linear,)

    def _split(self, module: torch.nn.Module, ctx: Context, mesh: DeviceMesh) -> ParallelModule:
        dim = _sequence_dim(self.input_layouts)
        linear: Any = module
        return ColumnParallelLinear._of_whole(linear, ctx, {
            "gather_output": self.output_layouts == Replicate(), "sequence_parallel": dim is not None,
            "sequence_dim": dim or 0, "device": _device(linear), "device_mesh": mesh, "scales": self.scales,
            "algo": self.algo, "backward_algo": self.backward_algo,
        }, _checked)  # fmt: skip


class RowwiseParallel(_Style):
    """Split a torch.nn.Linear by its inputs: ``RowParallelLinear``. Applying it is collective over the context.

    A torch.nn.Embedding is split by its words: ``VocabParallelEmbedding``.

    Args:
        ctx: the ranks; by default the open context that was made from the device mesh, ``pb.Context(device_mesh)``.
        input_layouts: Shard(-1), this rank's inputs, or Replicate(): every rank has all; words always Replicate().
        output_layouts: Replicate(), every rank gets the sum, or Shard(dim): its part of a sequence, Shard(0) of the
            first dimension, Shard(1) if the batch is the first one.
        scales: for a Linear: multiply in 8 bits, as for ``RowParallelLinear``.
        algo, backward_algo: for a Linear: algorithms by name, as for ``RowParallelLinear``.

    Raises:
        ArgumentError: a layout is none of these. On application: as for ``ColwiseParallel``; or the input of a Linear
            is whole and its output is split.
    """

    def __init__(
        self,
        *,
        ctx: Context | None = None,
        input_layouts: Placement = Shard(-1),  # noqa: B008 - immutable
        output_layouts: Placement = Replicate(),  # noqa: B008
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        super().__init__(ctx, input_layouts, output_layouts, scales, algo, backward_algo)
        self._expect("input_layouts", Shard(-1), Replicate())
        self._expect("output_layouts", Replicate(), sequence=True)

    def _kinds(self) -> tuple[type[torch.nn.Module], ...]:
        return torch.nn.Linear, torch.nn.Embedding

    def _check(self, kind: type[torch.nn.Module]) -> None:
        if kind is torch.nn.Embedding:
            for name in ("algo", "backward_algo"):
                if getattr(self, name) != "auto":
                    raise UnsupportedError(
                        f"{name}: expected 'auto' for a torch.nn.Embedding, which is no product, "
                        f"got {short_repr(getattr(self, name))}"
                    )
        elif self.output_layouts != Replicate() and self.input_layouts == Replicate():
            raise ArgumentError(
                "RowwiseParallel: input_layouts: expected Shard(-1) if the output is scattered, got Replicate()"
            )

    def _split(self, module: torch.nn.Module, ctx: Context, mesh: DeviceMesh) -> ParallelModule:
        layer: Any = module
        dim = _sequence_dim(self.output_layouts)
        how: dict[str, Any] = {
            "sequence_parallel": dim is not None, "sequence_dim": dim or 0, "device_mesh": mesh,
            "device": _device(layer),
        }  # fmt: skip
        if isinstance(layer, torch.nn.Embedding):
            return VocabParallelEmbedding._of_whole(layer, ctx, how, VocabParallelEmbedding._check_whole)
        how.update(input_is_parallel=self.input_layouts == Shard(-1), scales=self.scales)
        how.update(algo=self.algo, backward_algo=self.backward_algo)
        return RowParallelLinear._of_whole(layer, ctx, how, _checked)


class SequenceParallel(ParallelStyle):
    """Let a module (LayerNorm, RMSNorm, Dropout) work on this rank's part of a sequence. Local when applied.

    PyTorch's style of the same name, but with the first dimension split and plain tensors as the output, as the layers
    of this package take them. For modules that treat each token alone; any number of tokens, also none on some ranks.
    Parameters become DTensors, the same on every rank, whose gradients are summed over the ranks. Ranks whose
    generators are in step drop different elements.

    Args:
        sequence_dim: the dimension that is split.
        use_local_output: return this rank's part, not a DTensor.

    Raises:
        ArgumentError: on application: the module takes statistics over tokens, or its parameters have hooks or
            gradients, which would be lost. In its forward pass: it normalizes the dimension that is split; raised on
            every rank that has such an input.
    """

    def __init__(self, *, sequence_dim: int = 0, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim = integer(sequence_dim, "sequence_dim", 0, ArgumentError)
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        made = Sequence(device_mesh, self.sequence_dim, self.use_local_output)
        return work_on_part(module, made)
