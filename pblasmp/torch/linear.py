# SPDX-License-Identifier: Apache-2.0
"""torch.nn.Linear split over ranks, by outputs or by inputs; several with one input as one product."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..epilogue import Scales
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout.grid import integer
from ..tensor_parallel import shard
from . import functions
from .forms import fault_of_algorithms
from .meshes import device_type, local
from .parameters import ParallelModule, agreed
from .scaling import DelayedScaling

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..context import Context


class _ParallelLinear(ParallelModule):
    """This rank's shard of a linear layer, split along dimension ``_split`` of its weight."""

    _whole_kind = torch.nn.Linear
    _split: int
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        ctx: Context,
        sequence_parallel: bool,
        sequence_dim: int,
        skip_bias_add: bool,
        gradient_accumulation_fusion: bool,
        device: Any,
        dtype: Any,
        linear: torch.nn.Linear | None,
        device_mesh: DeviceMesh | None,
        scales: DelayedScaling | Scales | None,
        form: str,
        algo: str,
        backward_algo: str,
        conflict: str,
    ) -> None:
        with agreed(ctx, type(self).__name__):
            if conflict:
                raise ArgumentError(conflict)
            in_features = integer(in_features, "in_features", 0, ArgumentError)
            out_features = integer(out_features, "out_features", 0, ArgumentError)
            sequence_dim = integer(sequence_dim, "sequence_dim", 0, ArgumentError)
            if not isinstance(scales, (DelayedScaling, Scales, type(None))):
                raise ArgumentTypeError(
                    f"scales: expected a DelayedScaling or pblasmp.Scales, got {type(scales).__name__}"
                )
            if gradient_accumulation_fusion and scales is not None:
                raise ArgumentError("gradient_accumulation_fusion: expected False with scales")
            fault = fault_of_algorithms(form, ctx, algo, backward_algo)
            if fault is not None:
                raise fault
        shape = out_features, in_features
        bias_split = shape[:1], None if self._split else 0
        super().__init__(
            ctx, device, dtype, device_mesh, weight=(shape, self._split), bias=bias_split if bias else None
        )
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.skip_bias_add = skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.scales = scales
        if isinstance(scales, DelayedScaling):
            self.scales = copy.deepcopy(scales).to(self.weight.device)
        self.shard = shard(shape[self._split], ctx.size, ctx.rank)
        self._form, self.algo, self.backward_algo = form, algo, backward_algo
        self._where = device_type(ctx)
        if linear is None:
            self.reset_parameters()
        else:
            self.load_linear(linear)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, ctx: Context, **options: Any) -> Self:
        """Return this rank's shard of rank 0's whole layer. Collective over the context.

        Args:
            linear: of the same sizes on every rank; only rank 0's values are used, the others' may be on the meta
                device. It is not changed. If rank 0's is on the meta device, so is the new layer: see
                ``reset_parameters``. What is frozen stays frozen.
            ctx: the ranks.
            **options: as for the class, without ``dtype``, which is the layer's.

        Raises:
            ArgumentError: the layer has more than its weight and bias (parametrizations, children, buffers, hooks), or
                overrides forward; raised on every rank.
        """
        return cls._of_whole(linear, ctx, options)

    @classmethod
    def _options_of_whole(cls, whole: torch.nn.Linear) -> dict[str, Any]:
        sizes = {name: getattr(whole, name) for name in ("in_features", "out_features")}
        return {**sizes, "bias": whole.bias is not None}

    def reset_parameters(self) -> None:
        """Draw new values, on the CPU and as torch.nn.Linear does. Collective over the context.

        Every rank draws with rank 0's generator and keeps its shard: the same layer on any number of ranks, and
        generators that were in step stay in step. On the meta device nothing is drawn: after ``to_empty``, call it
        again.
        """
        if not self._may_draw():
            return
        if isinstance(self.scales, DelayedScaling):
            self.scales.reset()
        with self._generator_of_root() as generator:
            fan_in = self.in_features
            if fan_in and self.out_features:
                deviation = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(fan_in)
                limit = math.sqrt(3.0) * deviation
                self._draw("weight", lambda whole: whole.uniform_(-limit, limit, generator=generator))
            if self.bias is not None:
                limit = 1 / math.sqrt(fan_in) if fan_in else 0.0
                self._draw("bias", lambda whole: whole.uniform_(-limit, limit, generator=generator))

    def load_linear(self, linear: torch.nn.Linear) -> None:
        """Take this rank's shard of the values of rank 0's whole layer. Collective over the context.

        Args:
            linear: of the same sizes on every rank; only rank 0's values are used, and each rank gets its shard only.
                If it is on the meta device there, there are no values to take.

        Raises:
            ArgumentError: sizes or types differ, only one of the two layers has a bias, or the whole one computes with
                more than these; raised on every rank.
        """
        self._load_whole(linear)

    def _cast(self, x: Tensor, *parameters: Tensor | None) -> list[Any]:
        """Return input and parameters in the type that autocast asks for; only x if that is cast to 8 bits. Local."""
        if not isinstance(x, Tensor):
            return [x, *parameters]
        dtype = torch.get_autocast_dtype(self._where)
        if self.scales is not None:
            return [x if x.itemsize == 1 else x.to(dtype), *parameters]
        untouched = None, torch.float64  # as PyTorch's own layers are
        return [
            each if getattr(each, "dtype", None) in untouched else each.to(dtype) for each in (x, *parameters)
        ]

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output; with ``skip_bias_add`` also the bias to add. Collective over the context.

        Args:
            x: this rank's input, of the weight's type unless there are ``scales``.

        Raises:
            ArgumentError: x does not fit; raised on every rank, except for a column-parallel layer whose input every
                rank has: those multiply without waiting for each other.
        """
        if self._replaced:
            self._check_ties()
        mains = self.main_grads() if self.gradient_accumulation_fusion else ()
        y = self._forward(x, self._held("weight"), None if self.skip_bias_add else self._held("bias"), mains)
        if not self.skip_bias_add:
            return y
        return y, self.bias if self.bias is None or isinstance(y, DTensor) else local(self.bias)

    def main_grads(self) -> tuple[Tensor, ...]:
        """Return what the weight's gradient is added to, if anything. Local; collective over the context if it fails.

        Raises:
            ArgumentError: the weight has no ``main_grad`` of its part's shape.
        """
        if not (self.gradient_accumulation_fusion and torch.is_grad_enabled() and self.weight.requires_grad):
            return ()
        main, shape = getattr(self.weight, "main_grad", None), local(self.weight.detach()).shape
        main = main.to_local() if isinstance(main, DTensor) else main
        if isinstance(main, Tensor) and main.shape == shape and main.is_floating_point():
            return (main,)
        given = (
            type(main).__name__ if not isinstance(main, Tensor) else f"{tuple(main.shape)} of {main.dtype}"
        )
        alone = self._form == "matmul_local"
        with nullcontext() if alone else self.ctx.agreement("pblasmp.torch"):
            raise ArgumentError(
                f"weight.main_grad: expected floating-point numbers of shape {tuple(shape)}, got {given}"
            )

    def _forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mains: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Return the layer's output for these parameters. Collective over the context."""
        dim = self.sequence_dim if self.sequence_parallel else 0
        if dim and isinstance(x, Tensor):
            if x.ndim < dim + 2:
                with self.ctx.agreement("pblasmp.torch"):
                    raise ArgumentError(
                        f"x: shape is {tuple(x.shape)}, expected a sequence along dimension {dim}"
                    )
            x = x.transpose(0, dim)
        # by the sizes of the layer: the others are at their product
        splits = self._form == "split_matmul_allreduce"
        if splits and isinstance(x, Tensor) and x.shape[-1:] != (self.in_features,):
            with self.ctx.agreement("pblasmp.torch"):
                raise ArgumentError(
                    f"x: shape is {tuple(x.shape)}, expected {self.in_features} as its last dimension"
                )
        if torch.is_autocast_enabled(self._where):
            x, weight, bias = self._cast(x, weight, bias)
        y = functions.multiply(
            self._form, x, weight, self.ctx, bias, self.scales, self.algo, self.backward_algo, mains
        )
        return y.transpose(0, dim) if dim else y

    def extra_repr(self) -> str:
        """Return the layer's options as text, for printing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"ranks={self.ctx.size}, sequence_parallel={self.sequence_parallel}"
            f"{f', sequence_dim={self.sequence_dim}' if self.sequence_dim else ''}"
            f"{', skip_bias_add=True' if self.skip_bias_add else ''}"
            f"{', gradient_accumulation_fusion=True' if self.gradient_accumulation_fusion else ''}"
            f"{f', scales={self.scales}' if isinstance(self.scales, Scales) else ''}"
            f"{f', algo={self.algo!r}' if self.algo != 'auto' else ''}"
            f"{f', backward_algo={self.backward_algo!r}' if self.backward_algo != 'auto' else ''}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y = x wᵀ + b with the outputs split over the ranks. Making one is collective over the context.

    ``weight`` and ``bias`` are DTensors of (N, K) and (N,); a rank's part, ``weight.to_local()``, is (N/P, K): its
    outputs, as ``pblasmp.tensor_parallel.shard`` splits them. On one rank without a process group they are plain
    tensors. The names are Megatron's.

    Args:
        in_features, out_features: sizes of the whole layer.
        bias: whether there is one.
        ctx: the ranks.
        gather_output: every rank gets all outputs.
        sequence_parallel: the ranks hold parts of the input's first dimension, which is gathered.
        sequence_dim: with ``sequence_parallel`` the dimension that is split instead of the first one.
        skip_bias_add: return (y, bias), y without the bias, so that a later operation can add it.
        gradient_accumulation_fusion: the gradient of this rank's part of the weight is added to ``weight.main_grad``, a
            tensor of its shape in any floating-point type, which the caller makes; ``weight.grad`` stays None. Products
            are summed in the type of ``main_grad``.
        device: by default this rank's GPU on cublasmp, the CPU on the host engine; "meta", also by
            ``with torch.device("meta")``, makes a layer without values.
        dtype: by default PyTorch's.
        linear: a whole layer whose values on rank 0 are taken; by default they are drawn as torch.nn.Linear does.
        device_mesh: the one-dimensional mesh of the context's ranks that the parameters (DTensors) are on; by default
            the one that the context was made from, or a new one.
        scales: multiply in 8 bits, forward and backward: a ``DelayedScaling``, which the layer copies to
            ``layer.scales``; for inference also ``pblasmp.Scales`` (a: of the input, b: of the weight).
        algo: the algorithm of the forward product: ``pblasmp.allgather_matmul`` with ``sequence_parallel``,
            ``matmul_allgather`` with ``gather_output``; otherwise only "auto", since each rank multiplies alone.
        backward_algo: the algorithm of the product that gives the input's gradient: ``matmul_reduce_scatter`` with
            ``sequence_parallel``, otherwise ``matmul_allreduce``.

    Raises:
        ArgumentError: both the input and the output are to be gathered, or ``linear`` does not fit.
        UnsupportedError: there is no such algorithm; raised on every rank.
    """

    _split = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ctx: Context,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        skip_bias_add: bool = False,
        gradient_accumulation_fusion: bool = False,
        device: Any = None,
        dtype: Any = None,
        linear: torch.nn.Linear | None = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        conflict = ""
        if gather_output and sequence_parallel:
            conflict = "gather_output: expected False with sequence_parallel, which gathers the input"
        form = "matmul_allgather" if gather_output else "matmul_local"
        form = "allgather_matmul" if sequence_parallel else form
        super().__init__(
            in_features, out_features, bias, ctx, sequence_parallel, sequence_dim, skip_bias_add,
            gradient_accumulation_fusion, device, dtype, linear, device_mesh, scales, form, algo, backward_algo,
            conflict,
        )  # fmt: skip
        self.gather_output = gather_output


class RowParallelLinear(_ParallelLinear):
    """y = x wᵀ + b with the inputs split over the ranks. Making one is collective over the context.

    ``weight`` is a DTensor of (N, K); a rank's part, ``weight.to_local()``, is (N, K/P): its inputs, as
    ``pblasmp.tensor_parallel.shard`` splits them. ``bias`` is a DTensor of (N,), the same on every rank, and so is its
    gradient. On one rank without a process group they are plain tensors. The names are Megatron's.

    Args:
        in_features, out_features: sizes of the whole layer.
        bias: whether there is one.
        ctx: the ranks.
        input_is_parallel: the input is this rank's part of the last dimension; otherwise every rank has all of it.
        sequence_parallel: the output is scattered: every rank gets its part of the first dimension.
        sequence_dim: with ``sequence_parallel`` the dimension that is split instead of the first one.
        skip_bias_add, gradient_accumulation_fusion, device, dtype, linear, device_mesh, scales: as for
            ``ColumnParallelLinear``.
        algo: the algorithm of the forward product: ``pblasmp.matmul_reduce_scatter`` with ``sequence_parallel``,
            otherwise ``matmul_allreduce``.
        backward_algo: the algorithm of the product that gives the input's gradient: ``allgather_matmul`` with
            ``sequence_parallel``, ``matmul_allgather`` without ``input_is_parallel``; otherwise only "auto", since each
            rank multiplies alone.

    Raises:
        ArgumentError: the output is to be scattered but the input is not split, or ``linear`` does not fit.
        UnsupportedError: there is no such algorithm; raised on every rank.
    """

    _split = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ctx: Context,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        skip_bias_add: bool = False,
        gradient_accumulation_fusion: bool = False,
        device: Any = None,
        dtype: Any = None,
        linear: torch.nn.Linear | None = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        conflict = ""
        if sequence_parallel and not input_is_parallel:
            conflict = "input_is_parallel: expected True with sequence_parallel, which scatters the output"
        form = "matmul_allreduce" if input_is_parallel else "split_matmul_allreduce"
        form = "matmul_reduce_scatter" if sequence_parallel else form
        super().__init__(
            in_features, out_features, bias, ctx, sequence_parallel, sequence_dim, skip_bias_add,
            gradient_accumulation_fusion, device, dtype, linear, device_mesh, scales, form, algo, backward_algo,
            conflict,
        )  # fmt: skip
        self.input_is_parallel = input_is_parallel


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
                    f"out_features: expected a size for each layer, by name, got {short_repr(out_features)}"
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
                raise ArgumentError(f"linears: expected layers by name, got {short_repr(linears)}")
            for linear in linears.values():
                ColumnParallelLinear._check_whole(linear, anew=True)
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
        weights = [local(layer.weight, joined=True) for layer in layers]
        biases = (
            None if first.bias is None else torch.cat([local(layer.bias, joined=True) for layer in layers])
        )
        mains = tuple(main for layer in layers for main in layer.main_grads())
        whole = first._forward(x, torch.cat(weights), None if first.skip_bias_add else biases, mains)
        parts: tuple[Tensor, ...] = whole.split([weight.shape[0] for weight in weights], -1)
        if not first.skip_bias_add:
            return parts
        bias = [None if layer.bias is None else local(layer.bias) for layer in layers]
        return tuple(zip(parts, bias, strict=True))
