# SPDX-License-Identifier: Apache-2.0
"""Styles for torch.distributed.tensor.parallel.parallelize_module that use the products of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ..context import Context
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..scales import Scales
from ..tensor_parallel.plan import check_context
from .linear import ColumnParallelLinear, RowParallelLinear
from .meshes import context_of
from .parameters import ParallelModule
from .scaling import DelayedScaling
from .vocabulary import VocabParallelEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


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

    def _expect(self, which: str, expected: Sequence[Placement]) -> None:
        """Raise ArgumentError unless a layout is one of those ``expected``. Local."""
        found = getattr(self, which)
        if found not in expected:
            raise ArgumentError(
                f"{type(self).__name__}: {which} is {found!r}, expected {' or '.join(map(repr, expected))}: "
                "sequences are split along the first dimension"
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


def _become(module: torch.nn.Module, split: ParallelModule) -> torch.nn.Module:
    """Turn a whole layer into a split one in place; its hooks stay. Local."""
    module.__class__ = type(split)
    fresh = vars(torch.nn.Module())
    vars(module).update({name: value for name, value in vars(split).items() if name not in fresh})
    module._parameters, module._modules = split._parameters, split._modules
    return module


class ColwiseParallel(_Style):
    """Split a torch.nn.Linear by its outputs: ``ColumnParallelLinear``. Applying it is collective over the context.

    Args:
        ctx: the ranks; by default the open context that was made from the device mesh, ``pb.Context(device_mesh)``.
        input_layouts: Replicate(), every rank has the input, or Shard(0): its part of the first dimension.
        output_layouts: Shard(-1), this rank's outputs, or Replicate(): all of them.
        scales: multiply in 8 bits, as for ``ColumnParallelLinear``.
        algo, backward_algo: algorithms by name, as for ``ColumnParallelLinear``.

    Raises:
        ArgumentError: a layout is none of these, or both gather. On application: the module is not a torch.nn.Linear.
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
        self._expect("input_layouts", (Replicate(), Shard(0)))
        self._expect("output_layouts", (Shard(-1), Replicate()))
        if input_layouts == Shard(0) and output_layouts == Replicate():
            raise ArgumentError(
                "ColwiseParallel: output_layouts: expected Shard(-1) if the input is gathered"
            )

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if type(module) is not torch.nn.Linear:
            raise ArgumentTypeError(
                f"ColwiseParallel: expected a torch.nn.Linear, got {type(module).__name__}"
            )
        split = ColumnParallelLinear.from_linear(
            module, self._context(device_mesh), gather_output=self.output_layouts == Replicate(),
            sequence_parallel=self.input_layouts == Shard(0), device=module.weight.device, device_mesh=device_mesh,
            scales=self.scales, algo=self.algo, backward_algo=self.backward_algo,
        )  # fmt: skip
        return _become(module, split)


class RowwiseParallel(_Style):
    """Split a torch.nn.Linear by its inputs: ``RowParallelLinear``. Applying it is collective over the context.

    A torch.nn.Embedding is split by its words: ``VocabParallelEmbedding``.

    Args:
        ctx: the ranks; by default the open context that was made from the device mesh, ``pb.Context(device_mesh)``.
        input_layouts: Shard(-1), this rank's inputs, or Replicate(): every rank has all; words always Replicate().
        output_layouts: Replicate(), every rank gets the sum, or Shard(0): its part of the first dimension.
        scales: for a Linear: multiply in 8 bits, as for ``RowParallelLinear``.
        algo, backward_algo: for a Linear: algorithms by name, as for ``RowParallelLinear``.

    Raises:
        ArgumentError: a layout is none of these. On application: the module is neither, or does not fit the layouts.
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
        self._expect("input_layouts", (Shard(-1), Replicate()))
        self._expect("output_layouts", (Replicate(), Shard(0)))

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        how: dict[str, Any] = {
            "ctx": self._context(device_mesh), "sequence_parallel": self.output_layouts == Shard(0),
            "device_mesh": device_mesh,
        }  # fmt: skip
        split: ParallelModule
        if type(module) is torch.nn.Embedding:
            for name in ("algo", "backward_algo"):
                if getattr(self, name) != "auto":
                    raise UnsupportedError(
                        f"{name}: expected 'auto' for a torch.nn.Embedding, which is no product, "
                        f"got {getattr(self, name)!r}"
                    )
            split = VocabParallelEmbedding.from_embedding(module, device=module.weight.device, **how)
        elif type(module) is torch.nn.Linear:
            parallel = self.input_layouts == Shard(-1)
            split = RowParallelLinear.from_linear(
                module, input_is_parallel=parallel, device=module.weight.device, scales=self.scales, algo=self.algo,
                backward_algo=self.backward_algo, **how,
            )  # fmt: skip
        else:
            raise ArgumentTypeError(
                f"RowwiseParallel: expected a torch.nn.Linear or torch.nn.Embedding, got {type(module).__name__}"
            )
        return _become(module, split)


class SequenceParallel(tensor.parallel.SequenceParallel):
    """Let a module (LayerNorm, RMSNorm, Dropout) work on this rank's part of a sequence. Local when applied.

    PyTorch's style of the same name, but with the first dimension split and plain tensors as the output, as the layers
    of this package take them. Parameters become DTensors, the same on every rank, whose gradients are summed
    over the ranks.

    Args:
        sequence_dim: the dimension that is split.
        use_local_output: return this rank's part, not a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 0, use_local_output: bool = True) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        module = super()._apply(module, device_mesh)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_sum_gradient)
        return module


def _sum_gradient(parameter: torch.Tensor) -> None:
    """Sum the ranks' parts of a gradient. Collective over the mesh.

    If they were left as parts, every optimizer step would sum them again; and PyTorch before 2.13 does not clip parts.
    """
    if isinstance(parameter, tensor.DTensor) and isinstance(parameter.grad, tensor.DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
