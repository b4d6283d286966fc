# SPDX-License-Identifier: Apache-2.0
"""The device mesh of a context's ranks, and DTensors on it.

A context made from a device mesh has that one. Others get one over the context's ranks, from PyTorch's process group.
If there is no group, as under MPI or in a process without a launcher, one is made here, which lasts as long as the
contexts that use it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ..comm import Agreement, Communicator, Running, interfaces, machines_of, wrap
from ..comm.links import GLOO_INTERFACES, LOOPBACK, REACH_SECONDS, Place, addresses_of_host, listening
from ..context import Context
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, short_repr
from ..matrix.distributed import DistributedMatrix
from ..runtime.interop import view_like
from ..tensor_parallel import shard

if TYPE_CHECKING:
    from mpi4py import MPI


def start(comm: Communicator, call: str) -> None:
    """Make PyTorch's default process group of the ranks of ``comm``. Collective over it.

    UnsupportedError on every rank if they do not reach rank 0, ArgumentError if GLOO_SOCKET_IFNAME names no interface.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    with Running(comm, call):
        store = dist.HashStore() if comm.size == 1 else _store(comm, call)
        with Agreement(comm, call):
            _check_interfaces()
        with Agreement(comm, call, blocks=True):
            dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def _store(comm: Communicator, call: str) -> Any:
    """Return a store that listens at one address only, which every rank reaches. Collective over ``comm``."""
    one_node = len(machines_of(comm.locations())) == 1
    with Agreement(comm, call):
        sockets = [] if comm.rank else listening([LOOPBACK] if one_node else addresses_of_host(), comm.size)
    try:
        places: list[Place] = comm.bcast([each.getsockname()[:2] for each in sockets])
        number, mine = _reached(comm, places)
        with Agreement(comm, call):
            if number is None:
                tried = ", ".join(host for host, _ in places)
                raise UnsupportedError(
                    f"{call}: not every rank reaches rank 0 at {tried}: set MASTER_ADDR to an address of its host, or "
                    "make PyTorch's process group yourself, by torch.distributed.init_process_group"
                )
            if not one_node:
                _show_to_gloo(mine)
        assert number is not None
        host, port = places[number]
        store = None
        for turn in (True, False):  # rank 0 first: the others wait for it
            with Agreement(comm, call):
                if turn is (comm.rank == 0):
                    how = {"master_listen_fd": sockets[number].detach()} if turn else {}
                    store = dist.TCPStore(host, port, comm.size, turn, wait_for_workers=False, **how)
        return store
    finally:
        for each in sockets:
            each.close()


def _reached(comm: Communicator, places: list[Place]) -> tuple[int | None, str]:
    """Return which of rank 0's places every rank reaches first, and from which of its addresses this rank does.

    Collective over ``comm``.
    """
    for number, place in enumerate(places):
        mine = place[0] if comm.rank == 0 else ""
        if comm.rank:
            with suppress(OSError), socket.create_connection(place, REACH_SECONDS) as link:
                mine = link.getsockname()[0]
        if all(comm.allgather(mine)):
            return number, mine
    return None, ""


def _check_interfaces() -> None:
    """Raise ArgumentError unless gloo can use what GLOO_SOCKET_IFNAME names, if anything. Local."""
    given = os.environ.get(GLOO_INTERFACES, "")
    try:
        for name in filter(None, given.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
    except RuntimeError as error:
        raise ArgumentError(f"{GLOO_INTERFACES}: gloo cannot use {given!r}: {error}") from None


def _show_to_gloo(mine: str) -> None:
    """Let gloo use the interface of an address that is known to work, unless the user has chosen one. Local.

    By itself it tells the other ranks the address of the host's own name.
    """
    name = interfaces().get(mine)
    if name is not None:
        os.environ.setdefault(GLOO_INTERFACES, name)


def init_process_group(comm: MPI.Comm | None = None) -> None:
    """Make PyTorch's default process group of MPI's ranks, without torchrun. Collective over ``comm``.

    Its ranks are those of MPI. CPU tensors go through gloo and, if there are GPUs, GPU tensors through NCCL. Under
    mpirun the first layer of a context makes a group of the context's ranks itself if there is none; call this first
    if contexts with different ranks have layers, or if you need a device mesh.
    ``torch.distributed.destroy_process_group()`` ends the group.

    Args:
        comm: an mpi4py communicator, by default COMM_WORLD.

    Raises:
        UnsupportedError: a rank already has a process group, or does not reach rank 0; raised on every rank.
    """
    ranks, call = wrap(comm), "init_process_group"
    try:
        with Agreement(ranks, call):
            if dist.is_initialized():
                raise UnsupportedError(f"{call}: PyTorch has a default process group already")
        start(ranks, call)
    finally:
        ranks.free()


class _OwnGroup:
    """One context's hold on a process group that was made here: the last context to close ends the group."""

    users = 0

    def __init__(self) -> None:
        _OwnGroup.users += 1

    def close(self) -> None:
        _OwnGroup.users -= 1
        if not _OwnGroup.users and dist.is_initialized():
            dist.destroy_process_group()


class _Known:
    """The meshes of PyTorch's default group as it is now."""

    world: Any = None
    of_ranks: ClassVar[dict[tuple[str, tuple[int, ...]], DeviceMesh]] = {}
    of_context: ClassVar[WeakKeyDictionary[Context, DeviceMesh | None]] = WeakKeyDictionary()


def is_of_ranks(mesh: DeviceMesh, ctx: Context) -> bool:
    """Return whether a device mesh has one dimension, and as many ranks as a context, this one at its place. Local."""
    return mesh.ndim == 1 and (mesh.size(), mesh.get_local_rank()) == (ctx.size, ctx.rank)


def mesh_of(ctx: Context) -> DeviceMesh | None:
    """Return the device mesh of the context's ranks; None for one of them by itself without a process group.

    Collective over the context, the first time. UnsupportedError on every rank if the ranks are not all in one process
    group, or not in its order.
    """
    if dist.group.WORLD is not _Known.world:  # a new group, or none any more
        _Known.of_ranks.clear()
        _Known.of_context.clear()
        _Known.world = dist.group.WORLD
    if ctx not in _Known.of_context:
        _Known.of_context[ctx] = _made(ctx)
        _Known.world = dist.group.WORLD
    return _Known.of_context[ctx]


_FIRST = "the first layer of pblasmp.torch"


def _made(ctx: Context) -> DeviceMesh | None:
    if isinstance(ctx.made_of, DeviceMesh):
        return ctx.made_of
    with ctx.running(_FIRST):
        with ctx.agreement(_FIRST):  # another rank may be making another call
            mine = dist.get_rank() if dist.is_initialized() else None
        ranks = ctx.comm.allgather(mine)
        if set(ranks) == {None}:
            if ctx.size == 1 and ctx.made_of is not None:  # one of several ranks, perhaps, by itself
                return None
            start(ctx.comm, _FIRST)
            ctx.take_over(_OwnGroup())
            ranks = list(range(ctx.size))
        elif _OwnGroup.users:
            ctx.take_over(_OwnGroup())
        with Agreement(ctx.comm, _FIRST, blocks=True):
            if None in ranks or ranks != sorted(set(ranks)):
                raise UnsupportedError(
                    f"the context's ranks are {ranks} in PyTorch's default process group; expected all in one group "
                    "and in its order: under mpirun, call pblasmp.torch.init_process_group() on all ranks before the "
                    "first layer is made"
                )
            return _mesh_over(ranks, ctx)


def _mesh_over(ranks: Sequence[int], ctx: Context) -> DeviceMesh:
    """Return the device mesh of these ranks of the default group. Collective over the context, the first time."""
    key = device_type(ctx), tuple(ranks)
    if key not in _Known.of_ranks:
        group: Any = ctx.made_of
        if not isinstance(group, dist.ProcessGroup):
            group = dist.group.WORLD
            if len(ranks) < dist.get_world_size():
                group = dist.new_group(ranks, use_local_synchronization=True)
        _Known.of_ranks[key] = DeviceMesh.from_group(group, key[0], mesh_dim_names=("tp",))
    return _Known.of_ranks[key]


def context_of(mesh: DeviceMesh) -> Context | None:
    """Return the open context that was made of ``mesh``, or else one of all ranks in this order. Local."""
    found = Context.all_open()
    for ctx in found:
        if isinstance(ctx.made_of, DeviceMesh) and ctx.made_of == mesh:
            return ctx
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size():
        return None
    alike = (ctx for ctx in found if is_of_ranks(mesh, ctx))
    return next(alike, None)


def reduce(tensor: Tensor, ctx: Context, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over the ranks, in place. Collective over the context."""
    mesh = mesh_of(ctx)
    if ctx.size > 1 and mesh is not None:
        dist.all_reduce(tensor, op, mesh.get_group())
    return tensor


def reduce_scatter(tensor: Tensor, ctx: Context) -> Tensor:
    """Return this rank's part of the first dimension of the sum over the ranks. Collective over the context."""
    mesh, mine = mesh_of(ctx), shard(tensor.shape[0], ctx.size, ctx.rank)
    if ctx.size == 1 or mesh is None:
        return tensor
    block = -(-tensor.shape[0] // ctx.size)
    part = tensor.new_empty((block, *tensor.shape[1:]))
    _REDUCE_SCATTER(part, _padded(tensor, block * ctx.size), group=mesh.get_group())
    return part[: mine.stop - mine.start]


def all_gather(tensor: Tensor, ctx: Context, total: int) -> Tensor:
    """Return the ranks' parts of ``total`` rows, together. Collective over the context."""
    mesh = mesh_of(ctx)
    if ctx.size == 1 or mesh is None:
        return tensor.clone()
    block = -(-total // ctx.size)
    whole = tensor.new_empty((block * ctx.size, *tensor.shape[1:]))
    _ALL_GATHER(whole, _padded(tensor, block), group=mesh.get_group())
    return whole[:total]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a contiguous tensor of this many rows; what is added is 0. Local."""
    more = rows - tensor.shape[0]
    if not more:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((more, *tensor.shape[1:]))])


# names of PyTorch 2.13, and of versions before it
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device_type(ctx: Context) -> str:
    """Return PyTorch's name of where the context's tensors are: "cpu" or "cuda". Local."""
    return "cpu" if getattr(ctx.engine, "device", None) is None else "cuda"


def on_mesh(tensor: Tensor, mesh: DeviceMesh | None, placement: Placement, shape: Sequence[int]) -> Tensor:
    """Return this rank's part as a DTensor of ``shape``, or the part itself if there is no mesh. Local."""
    if mesh is None:
        return tensor
    whole: Tensor = DTensor.from_local(
        tensor, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=_contiguous_strides(shape)
    )
    return whole


def to_dtensor(x: DistributedMatrix, axis: int = 0) -> Tensor:
    """Return a matrix as a DTensor, ``Shard(axis)`` on a mesh of the context's ranks. Collective over the context.

    ``ctx.from_dlpack_shards`` is the way back. The tensor shares the matrix's memory if that lies so already; else the
    matrix is moved. On one rank without a process group it is a plain tensor.

    Args:
        x: in any layout.
        axis: 0 to split rows, 1 to split columns.

    Raises:
        ArgumentError: ``axis`` is neither 0 nor 1.
        UnsupportedError: the ranks are not all in one process group, or not in its order; raised on every rank.
    """
    if not isinstance(x, DistributedMatrix):
        raise ArgumentTypeError(f"x: expected a DistributedMatrix, got {short_repr(x)}")
    part = view_like(torch.empty(0), x.to_dlpack_shard(axis), x.dtype)
    return on_mesh(part, mesh_of(cast("Context", x.context)), Shard(axis), x.shape)


def split_of(tensor: Any) -> Any:
    """Return how a DTensor is split, which keeps no memory of it; None of any other tensor. Local."""
    return tensor._spec if type(tensor) is DTensor else None


def gradient_of(part: Tensor, split: Any) -> Tensor:
    """Return this rank's part of a gradient as a DTensor split so, without a history. Local.

    ``DTensor.from_local`` takes ten times as long.
    """
    return _new(_Gradient, part, split)


def _new(kind: Any, part: Tensor, split: Any) -> Any:
    """Return a DTensor without its ``__init__``, which does nothing, but takes twice as long as the rest. Local."""
    if not part.storage_offset():
        return kind.__new__(kind, part, split, requires_grad=False)
    # A DTensor gets its part's offset, and copy.deepcopy then takes it for one that has a storage.
    new = kind.__new__(kind, part.new_empty(0), split, requires_grad=False)
    new._local_tensor = part
    return new


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements. Local."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    return tuple(reversed(strides)) if shape else ()


def local(tensor: Tensor, *, joined: bool = False) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor as it is. Local; has gradients.

    Args:
        tensor: see above.
        joined: it is joined with others, so that its gradient is a part of a larger tensor: see ``_new``.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    suits = GRADIENTS_STAY_SPLIT and not joined
    if suits or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tensor.to_local()
    part: Tensor = _Local.apply(tensor)
    return part


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without a history, any other tensor as it is. Local."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


GRADIENTS_STAY_SPLIT = not str(torch.__version__).startswith(("2.11.", "2.12."))
"""Whether PyTorch accumulates the gradient of a DTensor of uneven parts as such a DTensor, not as a replicated one."""


class _Gradient(DTensor):
    """A DTensor which becomes a plain one when PyTorch detaches it, to keep it as a gradient.

    A rule for this class does that: DTensor's own dispatch takes the host longer than a small layer's products.

    Where something else holds the gradient, PyTorch copies it instead, perhaps on one rank alone. Before 2.13 DTensor
    makes room for all of a gradient whose parts are uneven, and the copy then waits for the other ranks: another rule
    makes room for this rank's part.
    """


@torch.library.register_torch_dispatch(torch.ops.aten.detach.default, _Gradient)
def _detached(_kind: Any, _func: Any, _types: Any, args: Any, _how: Any = None) -> Any:
    (gradient,) = args
    return _new(DTensor, gradient._local_tensor, gradient._spec)


@torch.library.register_torch_dispatch(torch.ops.aten.new_empty_strided.default, _Gradient)
def _room(_kind: Any, func: Any, _types: Any, args: Any, how: Any = None) -> Any:
    gradient, *layout = args
    part, split, how = gradient._local_tensor, gradient._spec, how or {}
    alike = how.get("dtype", part.dtype) == part.dtype
    if alike and [*map(tuple, layout)] == [tuple(gradient.shape), gradient.stride()]:
        return _new(DTensor, torch.empty_like(part), split)
    return func(_new(DTensor, part, split), *layout, **how)


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` whose gradient has the strides of the DTensor, also if parts are uneven."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split = tensor._spec
        return tensor.to_local().detach()  # not the DTensor's own tensor, which would get a history

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        part, split = gradients[0], ctx.split
        if part is None or not torch.is_grad_enabled():
            return None if part is None else gradient_of(part, split)
        return on_mesh(part, split.mesh, split.placements[0], split.shape)
