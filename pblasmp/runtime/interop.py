# SPDX-License-Identifier: Apache-2.0
"""Users' arrays (NumPy, CuPy, PyTorch), and local arrays that share their memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..dtypes import as_dtype, element_type, is_float8, is_foreign, named_like
from ..engines.arrays import address
from ..engines.direct import alias
from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..engines.protocol import Engine


def is_torch(array: Any) -> bool:
    """Return whether ``array`` is a PyTorch tensor; loads nothing. Local."""
    kind: Any = type(array)
    return _is_tensor(kind)


@lru_cache(maxsize=64)
def _is_tensor(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] == "torch" or any(
        base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__
    )


def loses_gradient(array: Any) -> bool:
    """Return whether PyTorch expects that what is done with ``array`` now has a gradient: no call here has. Local."""
    if not (is_torch(array) and array.requires_grad):
        return False
    import torch

    enabled: bool = torch.is_grad_enabled()
    return enabled


def as_local(engine: Engine, array: Any, name: str, dtype: np.dtype | None = None) -> Any:
    """Return ``array`` as an engine's local array of any number of dimensions, without a copy. Local.

    It is NumPy's, CuPy's or PyTorch's, or anything else that shares its memory; ArgumentError if the engine cannot use
    it in place. 8-bit floats may come as bytes.
    """
    try:
        if not is_torch(array):
            return engine.take_over(_of_jax(array), dtype)
        if loses_gradient(array):
            raise ArgumentError(
                "a gradient is required, which would be lost: the functions of pblasmp.torch have gradients; "
                "otherwise use its detach(), or torch.no_grad()"
            )
        if hasattr(array, "to_local"):
            raise ArgumentError("a DTensor, expected a plain tensor: its to_local() is this rank's part")
        tensor = array.detach()
        if tensor.is_conj() or tensor.is_neg():
            raise ArgumentError("a lazy conjugate: call resolve_conj() first")
        kind, own, storage = _of_torch(tensor.dtype)
        if dtype is not None and kind.startswith("float8") and kind != dtype.name:
            raise ArgumentError(f"dtype is {kind}, expected {dtype.name}")
        on_host = tensor.device.type == "cpu"
        if own is None or storage is None:
            return engine.take_over(_as_numpy(tensor) if on_host else tensor, dtype)
        raw = tensor.view(storage)
        return engine.take_over(_as_numpy(raw) if on_host else raw).view(engine.operations.stored(own))
    except ArgumentError as error:
        raise type(error)(str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def _of_jax(array: Any) -> Any:
    """Return an array; one of JAX's on the host, of a type that DLPack lacks, as NumPy's over its memory. Local."""
    of_jax = hasattr(array, "addressable_shards") and is_foreign(array.dtype)
    on_host = of_jax and all(device.platform == "cpu" for device in array.devices())
    return np.asarray(array) if on_host else array


@lru_cache
def _of_torch(dtype: Any) -> tuple[str, np.dtype | None, Any]:
    """Return the name of a type of PyTorch, ours, and that of its storage if NumPy and DLPack's readers lack it. Local.

    None for those that are as everywhere, and ours for bytes, which may be 8-bit floats. ArgumentError if we have none.
    """
    import torch

    kind = str(dtype).removeprefix("torch.")
    own = None if kind == "uint8" else as_dtype(kind)
    storage = None if own is None else element_type(own).storage
    return kind, own, getattr(torch, storage) if storage else None


class Shard(NamedTuple):
    """This rank's shard of a two-dimensional array.

    Attributes:
        part: the shard.
        axis: along which the whole array is split; None if that is unknown.
        start: where the shard begins along it; None if that is unknown.
    """

    part: Any
    axis: int | None = None
    start: int | None = None


def shard_of(array: Any, rank: int, size: int) -> Shard:
    """Return this rank's shard of a ``jax.Array`` or a DTensor, any other array as a shard. Local.

    ArgumentError if this process has none, or several, or it is another rank's.
    """
    if hasattr(array, "addressable_shards"):
        shards, shape = array.addressable_shards, array.shape
        if len(shards) != 1:
            raise ArgumentError(
                f"shard: a jax.Array with {len(shards)} shards in this process, expected one: a process per device"
            )
        if array.is_fully_addressable:  # on one device: it is this rank's part itself
            return Shard(shards[0].data)
        split = [axis for axis, n in enumerate(shape) if shards[0].data.shape[axis] != n]
        if len(split) != 1:
            kind = "replicated" if not split else "split along several axes"
            raise ArgumentError(
                f"shard: a jax.Array that is {kind}, expected one that is split along one axis"
            )
        return Shard(shards[0].data, split[0], shards[0].index[split[0]].start or 0)
    if not hasattr(array, "placements"):
        return Shard(array)
    mesh, placement = array.device_mesh, array.placements[0]
    if mesh.ndim != 1 or mesh.size() != size or mesh.get_local_rank() != rank:
        raise ArgumentError(
            f"shard: a DTensor on {mesh}, expected one on a mesh of the context's {size} ranks"
        )
    if not placement.is_shard() and size > 1:
        raise ArgumentError(f"shard: a DTensor placed {placement}, expected Shard: redistribute it first")
    return Shard(array.to_local(), placement.dim if placement.is_shard() else None)


def _as_numpy(tensor: Any) -> Any:
    """Return a tensor on the host as a NumPy array over its memory. Local.

    PyTorch's own way to NumPy fixes the size of a tensor's storage, which FSDP must be able to free between uses.
    """
    if str(tensor.layout) != "torch.strided":
        raise ArgumentError(f"a tensor that is {tensor.layout}, expected a dense one: its to_dense()")
    dtype = named_like(str(tensor.dtype))
    if dtype is None or not tensor.numel():
        return tensor.numpy()
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return alias(tensor.data_ptr(), tuple(tensor.shape), strides, dtype.str, tensor)


def as_typed(
    engine: Engine, array: Any, name: str, bytes_are: np.dtype | None = None
) -> tuple[Any, np.dtype]:
    """Return ``array`` as ``as_local`` does, and its element type; bytes are the 8-bit floats ``bytes_are``. Local."""
    local = as_local(engine, array, name)
    kind = _of_torch(array.dtype)[0] if is_torch(array) else local.dtype
    if kind == "uint8" and bytes_are is not None and is_float8(bytes_are):
        return local.view(engine.operations.stored(bytes_are)), bytes_are
    try:
        return local, as_dtype(kind)
    except ArgumentError as error:
        raise type(error)(f"{name}: {error}") from None


def address_of(array: Any) -> int:
    """Return where the first element of a NumPy, CuPy or PyTorch array is. Local."""
    return int(array.data_ptr()) if is_torch(array) else address(array)


def new_like(array: Any, engine: Engine, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return an uninitialized C-ordered array of the same library, and on the same device, as ``array``. Local."""
    if is_torch(array):
        return array.new_empty(shape, dtype=torch_type(dtype))
    flat = engine.empty((1, math.prod(shape)), dtype, "C", max(1, math.prod(shape)))
    return flat.reshape(shape)


@lru_cache
def torch_type(dtype: np.dtype) -> Any:
    """Return PyTorch's type of the same name as one of NumPy's. Local."""
    import torch

    return getattr(torch, dtype.name)


def view_like(array: Any, local: Any, dtype: np.dtype) -> Any:
    """Return a C-ordered local array of ``dtype`` as an array of the library of ``array``, without a copy. Local."""
    if not is_torch(array):
        return local
    import torch

    storage = element_type(dtype).storage
    shown = torch.from_dlpack(local.view(storage) if storage else local)
    return shown.view(getattr(torch, dtype.name)) if storage else shown


def stream_getter(array: Any) -> Callable[[], int | None]:
    """Return what gives the address of PyTorch's current stream on an array's GPU; None for other arrays. Local."""
    if not is_torch(array) or array.device.type != "cuda":
        return _no_stream
    import torch

    index = array.device.index
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without the object, which takes 3 us to make
    return (lambda: int(torch.cuda.current_stream(index).cuda_stream)) if raw is None else partial(raw, index)


def _no_stream() -> None:
    """Return None."""


def on_stream_of(engine: Engine, array: Any) -> AbstractContextManager[Any]:
    """Return a context in which the engine queues on PyTorch's stream if ``array`` is a tensor on a GPU. Local."""
    if not is_torch(array) or array.device.type != "cuda":
        return nullcontext()
    handle = stream_getter(array)()
    assert handle is not None
    return engine.on_stream(handle, array.device.index)


def in_c_order(array: Any) -> bool:
    """Return whether all dimensions but the last fold into one without a copy, and rows are contiguous. Local."""
    *lead, width = array.shape
    item = array.itemsize
    dims = [(extent, stride) for extent, stride in zip(lead, array.strides, strict=False) if extent > 1]
    fits: bool = array.size == 0 or width == 1 or array.strides[-1] == item
    if dims and array.size:
        away = dims[-1][1]
        fits &= away >= width * item and away % item == 0
        fits &= all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))
    return fits


def fold(array: Any, name: str) -> Any:
    """Return ``array`` with all dimensions but the last folded into one: a C-ordered view. Local.

    ArgumentError if that would take a copy, or rows are not contiguous.
    """
    if not array.ndim or not in_c_order(array):
        raise ArgumentError(
            f"{name}: shape {tuple(array.shape)} with strides of {tuple(array.strides)} bytes, expected C order: "
            "contiguous rows at equal distances"
        )
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
