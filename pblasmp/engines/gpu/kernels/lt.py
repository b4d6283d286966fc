# SPDX-License-Identifier: Apache-2.0
"""Local products through cuBLASLt: epilogues, 8-bit floats, a workspace for every lane; CUDA graphs may record them.

Also triangular solves, through cuBLAS. The bindings are nvmath-python's: a call
takes a microsecond, where ctypes with 16 arguments takes several, and CuPy's cuBLAS cannot be recorded.

Matrices are row-major. cuBLASLt's are column-major, so it computes the transpose, D^T = op(W)^T op(X)^T: row-major
memory already holds the transpose, and the letters of op stay the same.

Source: cuBLASLt's documentation (CUDA 13), cublasLt.h.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ....dtypes import DTYPES, accumulation_dtype, element_type, is_float8
from ....errors import UnsupportedError
from ...direct.asked import host_address
from ..types import DATA_TYPES, OPS, compute_type
from .lt_product import PLAIN, Batch, Fused, LtOperand, LtProduct, Op, alignment, key_of, rows_to_ask
from .views import View

WORKSPACE_BYTES = 32 << 20  # cuBLAS's own default on Hopper
_BESIDE_BYTES = 16 << 20  # of cuBLAS in other lanes, whose products have a part of the multiprocessors each
_REMEMBERED = 4096  # products, with descriptors and heuristics: a few kB each; a QR of order 16,384 has 2,000
SCALE_ALIGNED = 16  # bytes; with other addresses of scales, cuBLASLt finds an algorithm that refuses to run

ANY_ALGORITHM = -1

LETTERS = {np.dtype(name): element_type(np.dtype(name)).blas for name in ("f4", "f8", "c8", "c16")}
"""Those of cuBLAS's routines, by the element types that it has them for."""


class LocalProducts:
    """cuBLASLt on one GPU, and cuBLAS's trsm. Local; ``close`` gives everything back.

    Args:
        cupy: the module; its current device is the GPU.
        scratch: returns the address of a buffer of that name, of at least so many bytes, for other lanes than "main".

    Attributes:
        cublas: nvmath.bindings.cublas.
    """

    def __init__(self, cupy: Any, scratch: Callable[[str, int], int]) -> None:
        from nvmath.bindings import cublas, cublasLt

        self.cublas = cublas
        self._cupy, self._lt = cupy, cublasLt
        self._prepared: OrderedDict[Any, _Prepared] = OrderedDict()  # the most recently used one is the last
        self._main: Any = None  # the workspace of "main"
        self._main_at = 0
        self._scratch = scratch
        self._scalars: dict[Any, tuple[int, np.ndarray]] = {}
        self._scales: dict[tuple[str, str], Any] = {}
        attribute, dtype = _attribute(cublasLt, "matrix_layout", "COLS")
        number = np.zeros(1, dtype)
        self._columns = attribute, number, host_address(number)  # of layouts: rows to us
        self._closing = ExitStack()
        self._handle = cublasLt.create()
        self._closing.callback(cublasLt.destroy, self._handle)
        self._solver: int = cublas.create()
        self._closing.callback(cublas.destroy, self._solver)
        self._solves_on = -1, 0  # addresses of the stream that cuBLAS queues on, and of its workspace

    def reserve(self) -> None:
        """Make the workspace of "main" now, since in a run other ranks may already be waiting. Local."""
        self._main = self._cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._main_at = int(self._main.data.ptr)

    def _workspace(self, lane: str, nbytes: int) -> tuple[int, int]:
        """Return where a lane's workspace is, and its size: at least so many bytes."""
        if lane == "main":
            return self._main_at, WORKSPACE_BYTES
        return self._scratch(f"workspace {lane}", nbytes) if nbytes else 0, nbytes

    def multiply(
        self,
        stream: int,
        x: View,
        w: View,
        d: View,
        *,
        op_x: Op = "N",
        op_w: Op = "N",
        alpha: complex = 1,
        beta: complex = 0,
        c: View | None = None,
        finish: Fused = PLAIN,
        compute: str | None = None,
        batch: Batch | None = None,
        lane: str = "main",
        once: bool = False,
    ) -> None:
        """Queue ``D = alpha op(X) op(W) + beta C`` and ``finish``, with one rounding. Local.

        Args:
            x, w, d: ``op(x)`` is m × k, ``op(w)`` is k × n, ``d`` is m × n; ``d`` may be in a peer's memory.
            op_x, op_w: "N", "T" or "C".
            c: like ``d``; may be ``d``; by default ``d``.
            finish: bias, activation, scales.
            compute: as in ``matmul``: None, "tf32", "bf16x9", "fixedpoint".
            batch: how many products there are; ``x``, ``w``, ``d`` and ``c`` are those of the first one.
            lane: products of one lane run one after another, on whatever stream, and share a workspace.
            once: a product of as many rows is not expected again.

        Raises:
            ArgumentError: the shapes do not fit together.
            UnsupportedError: cuBLASLt has no such product.
        """
        if c is None:
            c, batch = d, batch if batch is None else batch._replace(c=batch.d)
        if finish is not PLAIN and (finish.scale_x | finish.scale_w | finish.scale_d) % SCALE_ALIGNED:
            finish = self._with_aligned_scales(finish, stream, lane)
        asked = x, w, c, d, op_x, op_w, beta == 0, finish, compute, batch
        rows = rows_to_ask(d.rows) if once and op_x == "N" and batch is None else d.rows
        key = key_of(asked, rows)
        product = self._prepared.get(key)
        if product is None:
            product = self._prepared[key] = self._new(LtProduct(*asked), rows)
        else:
            self._prepared.move_to_end(key)
        if finish is not PLAIN:
            product.point(self._lt, finish.pointers)
        if product.rows != d.rows:
            self._resize(product, d.rows)
        kind = accumulation_dtype(x.dtype)
        at = self._scalars_at(alpha, beta, kind)
        c_address = c.address if beta != 0 else d.address
        of_w, of_x, of_c, of_d = product.layouts
        self._lt.matmul(
            self._handle, product.description,
            at, w.address, of_w, x.address, of_x,
            at + kind.itemsize, 0 if product.without_c else c_address, of_c, d.address, of_d,
            product.algo, *self._workspace(lane, product.workspace_bytes), stream,
        )  # fmt: skip

    def gemm_ex(
        self,
        stream: int,
        x: View,
        w: View,
        d: View,
        op_x: Op,
        op_w: Op,
        alpha: complex,
        beta: complex,
        compute: str | None = None,
        *,
        lane: str = "main",
    ) -> None:
        """Queue ``D = alpha op(X) op(W) + beta D`` by cuBLAS; sizes are integers of 32 bits. Local."""
        k, kind = x.cols if op_x == "N" else x.rows, accumulation_dtype(x.dtype)
        at, of = self._scalars_at(alpha, beta, kind), _data_type(x.dtype)
        self.cublas.gemm_ex(
            self.solver(stream, lane), OPS[op_w], OPS[op_x], d.cols, d.rows, k,
            at, w.address, of, w.ld, x.address, of, x.ld, at + kind.itemsize, d.address, _data_type(d.dtype), d.ld,
            int(compute_type(x.dtype, compute)), ANY_ALGORITHM,
        )  # fmt: skip

    def gemm(
        self,
        stream: int,
        ops: tuple[Op, Op],
        sizes: tuple[int, int, int],
        alpha: complex,
        beta: complex,
        matrices: tuple[int, int, int, int, int, int],
        dtype: np.dtype,
        *,
        lane: str = "main",
    ) -> None:
        """Queue ``D = alpha op(A) op(B) + beta D`` by cuBLAS, on matrices in F order. Local.

        cuBLASLt takes 20 to 300 µs of the host to find how it computes a product of new sizes, cuBLAS takes 5.

        Args:
            ops: "N", "T" or "C" of A and of B.
            sizes: rows and columns of D, and the extent that is summed over.
            matrices: address and leading dimension of A, B and D.
            dtype: of all three matrices, one of ``LETTERS``.
            lane: as in ``multiply``.
        """
        at = self._scalars_at(alpha, beta, dtype)
        *factors, d, ldd = matrices
        op_a, op_b = OPS[ops[0]], OPS[ops[1]]
        call = getattr(self.cublas, f"{LETTERS[dtype]}gemm")
        call(self.solver(stream, lane), op_a, op_b, *sizes, at, *factors, at + dtype.itemsize, d, ldd)

    def gemv(
        self,
        stream: int,
        op: Op,
        sizes: tuple[int, int],
        alpha: complex,
        beta: complex,
        places: tuple[int, int, int, int],
        dtype: np.dtype,
        *,
        lane: str = "main",
    ) -> None:
        """Queue ``y = alpha op(A) x + beta y`` by cuBLAS, A in F order, vectors without gaps. Local.

        Args:
            places: address and leading dimension of A, and the addresses of x and y.
            stream, op, sizes, alpha, beta, dtype, lane: as in ``gemm``; ``sizes`` are A's.
        """
        at = self._scalars_at(alpha, beta, dtype)
        a, lda, x, y = places
        call = getattr(self.cublas, f"{LETTERS[dtype]}gemv")
        call(self.solver(stream, lane), OPS[op], *sizes, at, a, lda, x, 1, at + dtype.itemsize, y, 1)

    def trsm(self, stream: int, dtype: np.dtype, *arguments: int, lane: str = "main") -> None:
        """Queue cuBLAS's trsm, given what follows the handle in C; alpha is on the host. Local."""
        getattr(self.cublas, f"{LETTERS[dtype]}trsm")(self.solver(stream, lane), *arguments)

    def solver(self, stream: int, lane: str = "main") -> int:
        """Return cuBLAS's handle, which queues on a stream, with a lane's workspace. Local."""
        at, nbytes = self._workspace(lane, _BESIDE_BYTES)
        if (stream, at) != self._solves_on:
            self._solves_on = -1, 0
            self.cublas.set_stream(self._solver, stream)  # which resets the workspace
            self.cublas.set_workspace(self._solver, at, nbytes)
            self._solves_on = stream, at
        return self._solver

    @contextmanager
    def in_tf32(self) -> Iterator[None]:
        """Return a context in which ``gemm`` and ``trsm`` round factors of single precision to TF32. Local."""
        modes = self.cublas.Math
        self.cublas.set_math_mode(self._solver, int(modes.TF32_TENSOR_OP_MATH))
        try:
            yield
        finally:
            self.cublas.set_math_mode(self._solver, int(modes.DEFAULT_MATH))

    def _with_aligned_scales(self, finish: Fused, stream: int, lane: str) -> Fused:
        """Queue copies of the scales whose addresses cuBLASLt does not take. Return ``finish`` with all addresses."""
        runtime = self._cupy.cuda.runtime
        copies: dict[str, Any] = {}
        for name in ("scale_x", "scale_w", "scale_d"):
            address = getattr(finish, name)
            if address % SCALE_ALIGNED:
                if (lane, name) not in self._scales:
                    self._scales[lane, name] = self._cupy.empty(1, np.float32)
                copies[name] = at = int(self._scales[lane, name].data.ptr)
                runtime.memcpyAsync(at, address, 4, runtime.memcpyDeviceToDevice, stream)
        return replace(finish, **copies)

    def _scalars_at(self, alpha: complex, beta: complex, kind: np.dtype) -> int:
        """Return where alpha is on the host, followed by beta."""
        key = alpha, beta, kind
        found = self._scalars.get(key)
        if found is None:
            values = (alpha, beta) if kind.kind == "c" else (complex(alpha).real, complex(beta).real)
            if len(self._scalars) >= _REMEMBERED:
                self._scalars.clear()  # they are read where a product is queued
            array = np.array(values, dtype=kind)
            self._scalars[key] = found = array.ctypes.data, array
        return found[0]

    def _new(self, asked: LtProduct, rows: int) -> _Prepared:
        """Return new descriptors, and the algorithm for so many rows of X, C and D."""
        asked.check()
        found = self._prepare(asked.of_rows(rows), rows)
        if len(self._prepared) >= _REMEMBERED:  # work that was queued with them no longer needs them
            self._prepared.popitem(last=False)[1].made.close()
        return found

    def _prepare(self, asked: LtProduct, rows: int) -> _Prepared:
        with ExitStack() as made:
            product = _Prepared(self._description(asked, made), rows, without_c=asked.without_c)
            product.point(self._lt, asked.finish.pointers)
            operands = asked.operands()
            product.layouts += [self._layout(each, asked.batch, made) for each in operands.values()]
            product.result = self._heuristic(asked, product, operands, made)
            product.algo = product.result.ctypes.data  # its first field is the algorithm
            product.workspace_bytes = int(product.result["workspace_size"][0])
            product.made = made.pop_all()
        return product

    def _resize(self, product: _Prepared, rows: int) -> None:
        """Set the rows of X, C and D."""
        set_, (attribute, number, at) = self._lt.matrix_layout_set_attribute, self._columns
        number[0] = product.rows = rows
        for layout in product.layouts[1:]:
            set_(layout, attribute, at, number.itemsize)

    def _description(self, asked: LtProduct, made: ExitStack) -> int:
        """Return a new matmul descriptor, which ``made`` destroys."""
        lt, x, d, finish = self._lt, asked.x, asked.d, asked.finish
        description: int = lt.matmul_desc_create(
            int(compute_type(x.dtype, asked.compute)), int(_data_type(accumulation_dtype(x.dtype)))
        )
        made.callback(lt.matmul_desc_destroy, description)
        attributes = {
            "TRANSA": OPS[asked.op_w],
            "TRANSB": OPS[asked.op_x],
            "EPILOGUE": int(lt.Epilogue[finish.epilogue]),
        }
        if finish.bias:
            default = DTYPES["bfloat16"] if is_float8(x.dtype) and d.dtype != np.float16 else d.dtype
            attributes["BIAS_DATA_TYPE"] = int(_data_type(finish.bias_dtype or default))
        for name, value in attributes.items():
            _set(lt, "matmul_desc", name, value, description)
        return description

    def _layout(self, operand: LtOperand, batch: Batch | None, made: ExitStack) -> int:
        """Return a new matrix layout, which ``made`` destroys."""
        lt, view = self._lt, operand.view
        layout: int = lt.matrix_layout_create(int(_data_type(operand.dtype)), view.cols, view.rows, view.ld)
        made.callback(lt.matrix_layout_destroy, layout)
        if batch is not None:
            _set(lt, "matrix_layout", "BATCH_COUNT", batch.size, layout)
            _set(lt, "matrix_layout", "STRIDED_BATCH_OFFSET", operand.step, layout)
        return layout

    def _heuristic(
        self, asked: LtProduct, product: _Prepared, operands: dict[str, LtOperand], made: ExitStack
    ) -> np.ndarray:
        """Return the algorithm that cuBLASLt takes, or raise UnsupportedError."""
        lt = self._lt
        preference = lt.matmul_preference_create()
        made.callback(lt.matmul_preference_destroy, preference)
        wanted = {"MAX_WORKSPACE_BYTES": WORKSPACE_BYTES}
        for letter, operand in operands.items():
            wanted[f"MIN_ALIGNMENT_{letter}_BYTES"] = alignment(operand.view, operand.step)
        for name, value in wanted.items():
            _set(lt, "matmul_preference", name, value, preference)
        result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, product.description, *product.layouts, preference,
                1, result.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            raise UnsupportedError(f"{asked}: {error}") from None
        if not count[0]:
            raise UnsupportedError(f"{asked}: cuBLASLt found no algorithm")
        return result

    def close(self) -> None:
        """Free descriptors, handle and workspaces. Local; no work may be in flight."""
        with self._closing:
            for product in self._prepared.values():
                self._closing.push(product.made)
            self._prepared.clear()
        self._main = None
        self._scales.clear()


class _Prepared:
    """Descriptors and algorithm of one product."""

    __slots__ = (
        "_pointed", "algo", "description", "layouts", "made", "result", "rows", "without_c", "workspace_bytes"
    )  # fmt: skip

    def __init__(self, description: int, rows: int, *, without_c: bool) -> None:
        self.description, self.rows, self.without_c = description, rows, without_c
        self.layouts: list[int] = []
        self.algo = self.workspace_bytes = 0
        self.result: Any = None
        self.made = ExitStack()  # destroys the descriptors
        self._pointed: dict[str, int] = {}

    def point(self, lt: Any, pointers: dict[str, int]) -> None:
        """Set the addresses that have changed since the previous call."""
        if pointers == self._pointed:
            return
        for name, address in pointers.items():
            _set(lt, "matmul_desc", name, address, self.description)
        self._pointed = pointers


_ATTRIBUTES = {
    "matmul_desc": "MatmulDescAttribute",
    "matmul_preference": "MatmulPreferenceAttribute",
    "matrix_layout": "MatrixLayoutAttribute",
}


def _set(lt: Any, kind: str, name: str, value: int, thing: int) -> None:
    """Set an attribute of a descriptor, a preference or a layout."""
    attribute, dtype = _attribute(lt, kind, name)
    number = np.array([value], dtype)
    getattr(lt, f"{kind}_set_attribute")(thing, attribute, host_address(number), number.itemsize)


@cache
def _attribute(lt: Any, kind: str, name: str) -> tuple[int, np.dtype]:
    """Return an attribute's number and type. Local."""
    attribute = int(getattr(lt, _ATTRIBUTES[kind])[name])
    return attribute, getattr(lt, f"get_{kind}_attribute_dtype")(attribute)


@cache
def _data_type(dtype: np.dtype) -> int:
    return DATA_TYPES[dtype.name]
