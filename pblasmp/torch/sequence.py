# SPDX-License-Identifier: Apache-2.0
"""Modules that work on this rank's part of a sequence, with parameters that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..errors import ArgumentError
from ..layout.axis import fault_of_shares
from .meshes import context_of, gradient_of, on_mesh, split_of
from .registry import Gradients, once
from .wholes import check_parameters, tied

if TYPE_CHECKING:
    from ..context import Context


class Sequence(NamedTuple):
    """How a module's input is split: over which ranks, along which dimension; whether it returns its part."""

    mesh: DeviceMesh
    dim: int
    local_output: bool


def work_on_part(module: torch.nn.Module, sequence: Sequence) -> torch.nn.Module:
    """Let a module that works on whole sequences work on this rank's part of them, in place. Local.

    ArgumentError if it takes statistics over tokens, is split in another way already, or has parameters with hooks or
    gradients, which would be lost.
    """
    if isinstance(module, _OnPart):
        if module._sequence == sequence:  # one module in several places of a model
            return module
        raise ArgumentError(
            f"SequenceParallel: this {type(module).__name__} is split already, in another way"
        )
    for each in module.modules():
        if isinstance(each, torch.nn.modules.batchnorm._BatchNorm):
            raise ArgumentError(
                f"SequenceParallel: {type(each).__name__} takes statistics over tokens, which are on several ranks"
            )
        check_parameters(each, "SequenceParallel", in_place=True)
    made: list[tuple[Any, str, Any]] = []
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                whole = on_mesh(parameter.detach(), sequence.mesh, Replicate(), parameter.shape)
                new: Any = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
                new = tied(parameter, new, None, "SequenceParallel")
                vars(new).update(vars(parameter) | vars(new))  # with what the user has noted there
                made.append((each, name, new))
    for each, name, new in made:
        each._parameters[name] = new
    kind: Any = type(module)
    module.__class__ = _on_part(kind)
    module._sequence = sequence
    return module


class _OnPart(torch.nn.Module):
    """What a module's class becomes a subclass of. Its parameters are DTensors; it computes with plain tensors.

    Nothing is kept on parameters or their gradients, so that copies and conversions of the module work alike.
    """

    _sequence: Sequence

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module, for this rank's part of a sequence. Local; its backward pass is collective."""
        mesh, dim, local_output = self._sequence
        x = args[0] if args else None
        total = None
        if isinstance(x, DTensor):
            total, x = x.shape[dim], x.redistribute(placements=[Shard(dim)]).to_local()
        if isinstance(x, Tensor):
            _check_dim(self, x, dim)
            args = x, *args[1:]
        held = [
            (each._parameters, name, parameter)
            for each in self.modules()
            for name, parameter in each._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        try:
            for (parameters, name, _), plain in zip(held, _plain([each for *_, each in held]), strict=True):
                parameters[name] = plain
            if self.training and not torch.compiler.is_compiling() and _drops(self):
                with _own_numbers(mesh.get_local_rank(), x):
                    y = super().forward(*args, **kwargs)
            else:
                y = super().forward(*args, **kwargs)
        finally:
            for parameters, name, parameter in held:
                parameters[name] = parameter
        if local_output or not isinstance(y, Tensor):
            return y
        shape = list(y.shape)
        shape[dim] = _total(y.shape[dim], mesh, y.device) if total is None else total
        return on_mesh(y, mesh, Shard(dim), shape)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _new, (type(self).__bases__[1],), vars(self).copy()


@cache
def _on_part(kind: Any) -> Any:
    """Return the subclass of a class of modules that works on a part of a sequence. Local."""
    return type(kind.__name__, (_OnPart, kind), {"__module__": kind.__module__})


def _new(kind: Any) -> torch.nn.Module:
    """Return a module without any state, for copies and pickles. Local."""
    made = _on_part(kind)
    new: torch.nn.Module = made.__new__(made)
    return new


def _plain(parameters: list[DTensor]) -> list[Any]:
    """Return parameters as plain tensors, whose gradients are summed over the ranks. Local."""
    if torch.compiler.is_compiling():  # a redistribution reduces the gradient
        same = (each.redistribute(placements=each.placements) for each in parameters)
        return [each.to_local(grad_placements=[Partial()]) for each in same]
    learning = {
        id(each): each for each in parameters if each.requires_grad
    }  # once, if it is in several places
    summed = dict(zip(learning, _Summed.apply(*learning.values()), strict=True)) if learning else {}
    return [summed[id(each)] if id(each) in summed else each.to_local() for each in parameters]


class _Summed(torch.autograd.Function):
    """What a compiler takes from two functions of PyTorch, in one: they take longer than a norm."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        """Return the parameters. Local."""
        ctx.set_materialize_grads(False)
        ctx.meshes, ctx.splits = (
            [each.device_mesh for each in parameters],
            [split_of(each) for each in parameters],
        )
        # not the DTensors' own tensors, which would get a history
        return tuple(each.to_local().detach() for each in parameters)

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        """Return the gradients, summed, of each type and mesh at once. Collective over the meshes."""
        found: list[Tensor | None] = [None] * len(gradients)
        kinds: dict[tuple[torch.dtype, DeviceMesh], dict[int, Tensor]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                kinds.setdefault((gradient.dtype, ctx.meshes[i]), {})[i] = gradient
        for (_, mesh), given in kinds.items():
            whole = torch.cat([each.reshape(-1) for each in given.values()])
            _sum(whole, mesh, " and ".join(str(tuple(each.shape)) for each in given.values()))
            parts = whole.split([each.numel() for each in given.values()])
            for (i, each), part in zip(given.items(), parts, strict=True):
                found[i] = gradient_of(part.view(each.shape), ctx.splits[i])
        return tuple(found)


def _sum(tensor: Tensor, mesh: DeviceMesh, what: str) -> None:
    """Sum a tensor over the ranks, in place; in the context of the mesh, if there is one, they agree on it before.

    Collective over the mesh.
    """
    ctx, call = context_of(mesh), "SequenceParallel"
    with nullcontext() if ctx is None else ctx.running(call):
        if ctx is not None:
            _agree(ctx, call, f"{what} {tensor.dtype}")
        dist.all_reduce(tensor, group=mesh.get_group())


def _agree(ctx: Context, call: str, what: str) -> None:
    """Agree on what is summed, by one vote if all ranks have done so before. Collective over the context."""

    def first(facts: dict[str, Any]) -> None:
        facts["sum"] = what

    key = call, what
    number, known = ctx.calls.known(key)
    alike = number and ctx.all_repeat(call, number, ready=True) is not None
    if not alike:
        voted = bool(number)
        if not ctx.calls.agree(lambda: ctx.agreement(call), key, lambda _: known, first, voted=voted)[0]:
            ctx.calls.remember(key, True)


def _check_dim(module: torch.nn.Module, x: Tensor, dim: int) -> None:
    """Raise ArgumentError if a module normalizes the dimension that is split. Local."""
    kept = x.ndim
    if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
        kept -= len(module.normalized_shape)
    elif isinstance(module, torch.nn.GroupNorm):
        kept = 1
    if dim >= kept:
        raise ArgumentError(
            f"SequenceParallel: {type(module).__name__} with an input of shape {tuple(x.shape)}: dimension {dim} is "
            f"split over the ranks, expected one of the first {kept}"
        )


def _drops(module: torch.nn.Module) -> bool:
    return any(isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p for each in module.modules())


@contextmanager
def _own_numbers(rank: int, x: Tensor | None) -> Iterator[None]:
    """Draw other numbers than the other ranks, whose generators then are still in step if they were. Local."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([x.device] if x is not None and x.is_cuda else []):
        torch.manual_seed(seed + rank)
        yield


def _total(mine: int, mesh: DeviceMesh, device: torch.device) -> int:
    """Return the length of a sequence of whose parts this rank's has this length. Collective over the mesh.

    ArgumentError on every rank if it is not split as ``shard`` splits.
    """
    ranks: int = mesh.size()
    if torch.compiler.is_compiling():  # which has to know it
        return mine * ranks
    counts = torch.zeros(ranks, dtype=torch.int64, device=device)
    counts[mesh.get_local_rank()] = mine
    _sum(counts, mesh, f"{tuple(counts.shape)}")
    found: list[int] = counts.tolist()
    if fault := fault_of_shares(found, "tokens"):
        raise ArgumentError(f"SequenceParallel: {fault}")
    return sum(found)
