# SPDX-License-Identifier: Apache-2.0
"""torch.nn.Linear split over ranks, by outputs or by inputs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, ArgumentTypeError
from ..layout.grid import integer
from ..scales import Scales
from ..tensor_parallel import shard
from . import functions, operators
from .parameters import ParallelModule
from .scaling import DelayedScaling

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..context import Context

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(ParallelModule):
    """This rank's shard of a linear layer, split along dimension ``_split`` of its weight."""

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
        device: Any,
        dtype: Any,
        linear: torch.nn.Linear | None,
        device_mesh: DeviceMesh | None,
        scales: DelayedScaling | Scales | None,
        form: str,
        algo: str,
        backward_algo: str,
    ) -> None:
        in_features = integer(in_features, "in_features", 0, ArgumentError)
        out_features = integer(out_features, "out_features", 0, ArgumentError)
        shape = out_features, in_features
        bias_split = shape[:1], None if self._split else 0
        super().__init__(
            ctx, device, dtype, device_mesh, weight=(shape, self._split), bias=bias_split if bias else None
        )
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.scales = scales
        if isinstance(scales, DelayedScaling):
            self.scales = copy.deepcopy(scales).to(self.weight.device)
        self.shard = shard(shape[self._split], ctx.size, ctx.rank)
        self.algo, self.backward_algo = algo, backward_algo
        with ctx.agreement(type(self).__name__):
            if not isinstance(scales, (DelayedScaling, Scales, type(None))):
                raise ArgumentTypeError(
                    f"scales: expected a DelayedScaling or pblasmp.Scales, got {type(scales).__name__}"
                )
            fault = operators.fault_of_algorithms(form, ctx, algo, backward_algo)
            if fault is not None:
                raise fault
        if linear is None:
            self.reset_parameters()
        else:
            self.load_linear(linear)

    def reset_parameters(self) -> None:
        """Draw new values, on the CPU and as torch.nn.Linear does. Collective over the context.

        Every rank draws the whole layer, so that generators that were in step stay in step, and takes its shard of
        rank 0's values.
        """
        has_bias = self.bias is not None
        self.load_linear(
            torch.nn.Linear(
                self.in_features, self.out_features, has_bias, device="cpu", dtype=self.weight.dtype
            )
        )

    def load_linear(self, linear: torch.nn.Linear) -> None:
        """Take this rank's shard of the values of rank 0's whole layer. Collective over the context.

        Args:
            linear: of the same sizes on every rank; only rank 0's values are used.

        Raises:
            ArgumentError: sizes or types differ, or only one of the two layers has a bias; raised on every rank.
        """
        with self.ctx.agreement("load_linear") as facts:
            facts.update(layer=repr(self), dtype=str(self.weight.dtype))
            _check_linear(linear)
            mine = (self.out_features, self.in_features), self.bias is not None, self.weight.dtype
            given = tuple(linear.weight.shape), linear.bias is not None, linear.weight.dtype
            if given != mine:
                texts = [
                    f"{n}x{k} {dtype}{'' if b else ' without bias'}" for (n, k), b, dtype in (given, mine)
                ]
                raise ArgumentError(f"linear: {texts[0]}, expected {texts[1]}")
        self._take_of_root("weight", linear.weight)
        if self.bias is not None:
            self._take_of_root("bias", linear.bias)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias in the type that autocast asks for; only x if that is cast to 8 bits. Local."""
        if not (isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)):
            return x, self.weight, self.bias
        dtype = torch.get_autocast_dtype(x.device.type)
        if self.scales is not None:
            return x if x.itemsize == 1 else x.to(dtype), self.weight, self.bias
        return x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def extra_repr(self) -> str:
        """Return the layer's options as text, for printing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"ranks={self.ctx.size}, sequence_parallel={self.sequence_parallel}"
            f"{f', scales={self.scales}' if isinstance(self.scales, Scales) else ''}"
            f"{f', algo={self.algo!r}' if self.algo != 'auto' else ''}"
            f"{f', backward_algo={self.backward_algo!r}' if self.backward_algo != 'auto' else ''}"
        )


def _check_linear(linear: object) -> None:
    """Raise ArgumentError unless ``linear`` is a layer of PyTorch's. Local."""
    if not isinstance(linear, torch.nn.Linear):
        raise ArgumentTypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")


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
        device: by default this rank's GPU on cublasmp, the CPU on the host engine.
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
        device: Any = None,
        dtype: Any = None,
        linear: torch.nn.Linear | None = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        if gather_output and sequence_parallel:
            raise ArgumentError(
                "gather_output: expected False with sequence_parallel, which gathers the input"
            )
        form = "matmul_allgather" if gather_output else "matmul_local"
        form = "allgather_matmul" if sequence_parallel else form
        super().__init__(
            in_features,
            out_features,
            bias,
            ctx,
            sequence_parallel,
            device,
            dtype,
            linear,
            device_mesh,
            scales,
            form,
            algo,
            backward_algo,
        )
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        ctx: Context,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: Any = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> Self:
        """Return this rank's shard of rank 0's whole layer. Collective over the context.

        Args:
            linear: of the same sizes on every rank; only rank 0's values are used. It is not changed.
            ctx, gather_output, sequence_parallel, device, device_mesh, scales, algo, backward_algo: as for the
                class.
        """
        _check_linear(linear)
        return cls(
            linear.in_features, linear.out_features, linear.bias is not None, ctx=ctx, gather_output=gather_output,
            sequence_parallel=sequence_parallel, device=device, dtype=linear.weight.dtype, linear=linear,
            device_mesh=device_mesh, scales=scales, algo=algo, backward_algo=backward_algo,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all outputs. Collective over the context.

        Args:
            x: (..., K), the same on every rank; with ``sequence_parallel`` this rank's part of the first dimension.
        """
        x, weight, bias = self._operands(x)
        how: dict[str, Any] = {"scales": self.scales, "algo": self.algo, "backward_algo": self.backward_algo}
        if self.sequence_parallel:
            return functions.allgather_matmul(x, weight, self.ctx, bias, **how)
        if self.gather_output:
            return functions.matmul_allgather(x, weight, self.ctx, bias, **how)
        del how["algo"]  # every rank multiplies alone
        return functions.matmul_local(x, weight, self.ctx, bias, **how)


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
        device: by default this rank's GPU on cublasmp, the CPU on the host engine.
        dtype: by default PyTorch's.
        linear: a whole layer whose values on rank 0 are taken; by default they are drawn as torch.nn.Linear does.
        device_mesh: the one-dimensional mesh of the context's ranks that the parameters (DTensors) are on; by default
            the one that the context was made from, or a new one.
        scales: multiply in 8 bits, forward and backward: a ``DelayedScaling``, which the layer copies to
            ``layer.scales``; for inference also ``pblasmp.Scales`` (a: of the input, b: of the weight).
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
        device: Any = None,
        dtype: Any = None,
        linear: torch.nn.Linear | None = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ArgumentError(
                "input_is_parallel: expected True with sequence_parallel, which scatters the output"
            )
        form = "matmul_allreduce" if input_is_parallel else "split_matmul_allreduce"
        form = "matmul_reduce_scatter" if sequence_parallel else form
        super().__init__(
            in_features,
            out_features,
            bias,
            ctx,
            sequence_parallel,
            device,
            dtype,
            linear,
            device_mesh,
            scales,
            form,
            algo,
            backward_algo,
        )
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        ctx: Context,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: Any = None,
        device_mesh: DeviceMesh | None = None,
        scales: DelayedScaling | Scales | None = None,
        algo: str = "auto",
        backward_algo: str = "auto",
    ) -> Self:
        """Return this rank's shard of rank 0's whole layer. Collective over the context.

        Args:
            linear: of the same sizes on every rank; only rank 0's values are used. It is not changed.
            ctx, input_is_parallel, sequence_parallel, device, device_mesh, scales, algo, backward_algo: as for the
                class.
        """
        _check_linear(linear)
        return cls(
            linear.in_features, linear.out_features, linear.bias is not None, ctx=ctx,
            input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel, device=device,
            dtype=linear.weight.dtype, linear=linear,
            device_mesh=device_mesh, scales=scales, algo=algo, backward_algo=backward_algo,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, or this rank's part of its first dimension. Collective over the context.

        Args:
            x: (..., K/P), this rank's inputs; without ``input_is_parallel`` (..., K), the same on every rank.
        """
        x, weight, bias = self._operands(x)
        how: dict[str, Any] = {"scales": self.scales, "algo": self.algo, "backward_algo": self.backward_algo}
        if self.sequence_parallel:
            return functions.matmul_reduce_scatter(x, weight, self.ctx, bias, **how)
        if self.input_is_parallel:
            return functions.matmul_allreduce(x, weight, self.ctx, bias, scales=self.scales, algo=self.algo)
        if isinstance(x, Tensor) and x.shape[-1:] != (self.in_features,):  # the others are at their product
            with self.ctx.agreement("pblasmp.torch"):
                raise ArgumentError(
                    f"x: shape is {tuple(x.shape)}, expected {self.in_features} as its last dimension"
                )
        return functions.split_matmul_allreduce(x, weight, self.ctx, bias, **how)
