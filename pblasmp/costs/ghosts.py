# SPDX-License-Identifier: Apache-2.0
"""Arrays without memory: shapes, strides and addresses, but no values. Algorithms run on them to be counted."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..errors import ArgumentError

_MOST_BYTES = 1 << 60


class Ghost:
    """An array of which only the shape is known. Views are ghosts, results of arithmetic too; writing does nothing.

    Args:
        view: a view on a few bytes of memory that claims to be as large as the array. It is never read or written:
            NumPy only derives the shapes and addresses of other views from it.
    """

    written: ClassVar[int] = 0
    """Bytes that were written to ghosts so far, by copies and arithmetic."""

    copied: ClassVar[int] = 0
    """Of these, those that ``np.copyto`` wrote."""

    def __init__(self, view: NDArray[Any]) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "strides", "size", "nbytes", "itemsize", "ndim", "flags"):
            return getattr(self._view, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def T(self) -> Ghost:  # noqa: N802
        """The transpose."""
        return Ghost(self._view.T)

    @property
    def real(self) -> Ghost:
        """Real parts."""
        return ghost(self.shape, self._view.real.dtype)

    imag = real

    @property
    def data(self) -> _Data:
        """Where it would be, as CuPy's arrays say it."""
        return _Data(self._view.__array_interface__["data"][0])

    def __getitem__(self, index: Any) -> Ghost:
        if isinstance(index, np.ndarray):  # whole rows
            return ghost((*index.shape, *self.shape[1:]), self.dtype)
        indices = index if isinstance(index, tuple) else (index,)
        # the rows and columns of every element
        if any(isinstance(each, (np.ndarray, list)) for each in indices):
            return ghost(np.broadcast_shapes(*(np.shape(each) for each in indices)), self.dtype)
        return Ghost(self._view[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        part = self[index]
        np.broadcast_shapes(np.shape(part), np.shape(value))  # raises ValueError if they do not fit
        Ghost.written += part.nbytes

    def view(self, dtype: np.dtype) -> Ghost:
        """Return the same bytes as another type."""
        return Ghost(self._view.view(dtype))

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ghost:
        """Return a view of the same memory, from the first element on, in another shape."""
        return Ghost(as_strided(self._view, shape, strides))

    def diagonal(self, **axes: int) -> Ghost:
        """Return the diagonal."""
        return Ghost(self._view.diagonal(**axes))

    def transpose(self, *axes: int) -> Ghost:
        """Return a view with axes in another order."""
        return Ghost(self._view.transpose(*axes))

    def reshape(self, *shape: Any, order: Any = "C") -> Ghost:
        """Return the same elements in another shape: a view of a contiguous array, a new one of others."""
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple(self.size // max(1, known) if n == -1 else n for n in shape)
        if self.size != math.prod(shape):
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        view = _view_as(self._view, shape, order)
        return ghost(shape, self.dtype, order) if view is None else Ghost(view)

    def astype(self, dtype: Any, copy: bool = True) -> Ghost:
        """Return a copy of another type; itself if it has that and no copy is asked for."""
        return self if not copy and self.dtype == dtype else ghost(self.shape, np.dtype(dtype), self._order)

    def copy(self) -> Ghost:
        """Return a copy."""
        return ghost(self.shape, self.dtype, self._order)

    def conj(self) -> Ghost:
        """Return the conjugate."""
        return self.copy()

    @property
    def _order(self) -> str:
        return "F" if self.ndim == 2 and self.strides[0] < self.strides[1] else "C"

    def _combined(self, other: Any) -> Ghost:
        shape = np.broadcast_shapes(self.shape, np.shape(other))
        return ghost(shape, np.result_type(self.dtype, getattr(other, "dtype", self.dtype)))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _combined

    def _changed(self, other: Any) -> Ghost:
        self[...] = other
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _changed

    def __len__(self) -> int:
        return int(self.shape[0])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **_: Any) -> Any:
        if method != "__call__":
            raise NotImplementedError(f"{ufunc.__name__}.{method} of an array without values")
        if out is not None:
            Ghost.written += out[0].nbytes
            return out[0]
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        return ghost(shape, np.result_type(*(x.dtype for x in inputs if hasattr(x, "dtype"))))

    def __array_function__(self, function: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        if function is np.copyto:
            where = kwargs.get("where", True)
            nbytes = args[0].nbytes if where is True else int(where.sum()) * args[0].itemsize
            Ghost.written += nbytes
            Ghost.copied += nbytes
            return None
        if function in (np.tril, np.triu):
            return args[0].copy()
        if function is np.concatenate:
            return ghost((sum(len(x) for x in args[0]),), args[0][0].dtype)
        if function is np.where:
            shape = np.broadcast_shapes(*map(np.shape, args))
            return ghost(shape, np.result_type(*(x.dtype for x in args[1:] if hasattr(x, "dtype"))))
        if function in (np.empty_like, np.zeros_like):
            return ghost(args[0].shape, kwargs.get("dtype") or args[0].dtype, args[0]._order)
        raise NotImplementedError(f"numpy.{function.__name__} of an array without values")


_ASKS_FOR_VIEWS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def _view_as(array: NDArray[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any] | None:
    """Return a view in another shape, or None if there is none."""
    if not _ASKS_FOR_VIEWS:
        flat = array.flags.c_contiguous if order == "C" else array.flags.f_contiguous
        return array.reshape(shape, order=order) if flat else None
    try:
        return np.reshape(array, shape, order=order, copy=False)
    except ValueError:
        return None


class _Data:
    """An address."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def ghost(shape: int | tuple[int, ...], dtype: Any, order: str = "C", ld: int | None = None) -> Ghost:
    """Return an array without memory. Local.

    Args:
        shape: its extents.
        dtype: its element type.
        order: "C" or "F".
        ld: leading dimension of a matrix, in elements; None: its rows (in F order: columns) touch.

    Raises:
        ArgumentError: it is so large that sums of bytes would not fit into 64 bits.
    """
    dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else shape
    lengths = list(shape if order == "C" else shape[::-1])
    if ld is not None:
        lengths[-1] = ld
    if dtype.itemsize * math.prod(lengths) > _MOST_BYTES:
        extents = " × ".join(map(str, shape))
        raise ArgumentError(
            f"an array of {extents} {dtype.name} is too large: expected at most 2^60 bytes on a rank"
        )
    strides = [dtype.itemsize * math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    return Ghost(as_strided(np.empty(1, dtype), shape, strides if order == "C" else strides[::-1]))
