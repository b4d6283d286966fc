# SPDX-License-Identifier: Apache-2.0
"""Several column-parallel layers with one input as one product: query, key and value, or gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from .linear import ColumnParallelLinear, check_new_linear
from .meshes import local
from .parameters import agreed

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..context import Context

_CALL = "FusedColumnParallelLinear"


class FusedColumnParallelLinear(torch.nn.Module):
    """Column-parallel layers with one input, multiplied at once. Making one is collective over the context.

    One product forward and one back in place of one for each layer: with ``sequence_parallel`` the input is gathered
    once. The layers are ``ColumnParallelLinear`` under their own names, so checkpoints have each weight by itself, on
    any number of ranks; a rank's outputs of each are ``pblasmp.tensor_parallel.shard``'s. The forward pass copies the
    rank's weights together.

    Args:
        in_features: size of the input.
        out_features: by name, the size of each whole layer.
        bias: whether they have biases.
        ctx: the ranks.
        **options: as for ``ColumnParallelLinear``, without ``gather_output``, ``scales`` and ``linear``.

    Raises:
        ArgumentError: there are no layers, or an option is none of these.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        bias: bool = True,
        *,
        ctx: Context,
        **options: Any,
    ) -> None:
        super().__init__()
        with agreed(ctx, _CALL) as facts:
            if not isinstance(out_features, Mapping) or not out_features:
                raise ArgumentError(
                    f"out_features: expected a size for each layer, by name, got {out_features!r}"
                )
            self._reserve(out_features, options, facts)
        for name, outputs in out_features.items():
            self.add_module(name, ColumnParallelLinear(in_features, outputs, bias, ctx=ctx, **options))

    def _reserve(self, layers: Mapping[str, Any], options: Mapping[str, Any], facts: dict[str, Any]) -> None:
        """Check names and options of layers that are to be made; the names are facts. Local."""
        for name in ("gather_output", "scales", "linear"):
            if options.get(name):
                raise ArgumentError(f"{name}: not an option of a FusedColumnParallelLinear")
        for name in layers:
            self.add_module(name, None)  # raises an error if it is no name
        facts["layers"] = ", ".join(layers)

    @classmethod
    def from_linears(cls, linears: Mapping[str, torch.nn.Linear], *, ctx: Context, **options: Any) -> Self:
        """Return this rank's shards of rank 0's whole layers. Collective over the context.

        Args:
            linears: by name, of the same sizes on every rank, with one number of inputs, all with a bias or none.
            ctx: the ranks.
            **options: as for the class.

        Raises:
            ArgumentError: the layers do not fit together, or one has more than its weight and bias, as for
                ``from_linear`` of ``ColumnParallelLinear``; raised on every rank.
        """
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        with agreed(ctx, _CALL) as facts:
            if not isinstance(linears, Mapping) or not linears:
                raise ArgumentError(f"linears: expected layers by name, got {linears!r}")
            for linear in linears.values():
                check_new_linear(linear)
            kinds = {(each.in_features, each.bias is None, each.weight.dtype) for each in linears.values()}
            if len(kinds) != 1:
                raise ArgumentError(
                    "linears: expected one number of inputs and one type, all with a bias or none"
                )
            made._reserve(linears, options, facts)
        for name, linear in linears.items():
            made.add_module(name, ColumnParallelLinear.from_linear(linear, ctx=ctx, **options))
        return made

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        """Return the layers' outputs, in their order. Collective over the context.

        Args:
            x: as for ``ColumnParallelLinear``; a plain tensor.

        Returns:
            for each layer what it would return by itself.
        """
        layers: list[Any] = list(self.children())
        first = layers[0]
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            with first.ctx.agreement("pblasmp.torch"):
                raise ArgumentTypeError(f"x: expected a plain tensor, got {type(x).__name__}")
        weights = [local(layer.weight) for layer in layers]
        biases = None if first.bias is None else torch.cat([local(layer.bias) for layer in layers])
        mains = tuple(main for layer in layers for main in layer.main_grads())
        whole = first._forward(x, torch.cat(weights), None if first.skip_bias_add else biases, mains)
        parts: tuple[Tensor, ...] = whole.split([weight.shape[0] for weight in weights], -1)
        if not first.skip_bias_add:
            return parts
        bias = [None if layer.bias is None else local(layer.bias) for layer in layers]
        return tuple(zip(parts, bias, strict=True))
