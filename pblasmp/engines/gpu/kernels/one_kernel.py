# SPDX-License-Identifier: Apache-2.0
"""The kernel of ``one_kernel.cu``: its tile sizes by rule, its compilation by NVRTC, its arguments, its launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import StatusError
from ..peers.windows import check_driver
from .views import View

__all__ = ["FORMS", "TILE_ROWS", "KernelJob", "OneKernel", "Tiling", "tiling"]

FORMS = ("matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
"""What the kernel does, by the number that ``FORM`` has in it."""

TILE_ROWS = 128
_STEP = 64  # inputs of a step of k
_WIDTHS = 64, 128, 192, 224, 256
_THREADS = 384
_SHARED_BYTES = 227 << 10  # that a block may use on Hopper
_BARRIER_BYTES = 512  # more than all barriers take, and what the kernel declares itself
_ALIGN_BYTES = 1024
_MAP_BYTES = 128
_MAP_ALIGN_BYTES = 64

# The time of a tile is that of multiplying its columns and so many more; after the last tiles come, once, the transfers
# of as many columns. Measured on two H100.
_TILE_COST, _NARROW_COST = 48, 72
_LAST_TILES = {
    "matmul_reduce_scatter": 1,
    "allgather_matmul": 1,
    "matmul_allreduce": 2,
    "matmul_allgather": 2,
}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut into tiles.

    Attributes:
        width: columns of a tile.
        row_blocks, col_blocks: tiles of a rank's share, down and across.
        slots: finished tiles that a block may keep while it multiplies the next.
        stages: steps of k whose operands are loaded ahead.
    """

    width: int
    row_blocks: int
    col_blocks: int
    slots: int
    stages: int

    @property
    def count(self) -> int:
        """Tiles of a rank's share."""
        return self.row_blocks * self.col_blocks

    @property
    def chunk(self) -> int:
        """Columns of a tile that TMA stores at once."""
        return 64 if self.width % 64 == 0 else 32

    @property
    def image_bytes(self) -> int:
        """Bytes of a finished tile."""
        return TILE_ROWS * self.width * 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block needs."""
        steps = self.stages * (TILE_ROWS + self.width) * _STEP * 2
        return steps + self.slots * self.image_bytes + _BARRIER_BYTES + _ALIGN_BYTES


def tiling(form: str, rows: int, cols: int, shares: int, blocks: int) -> Tiling:
    """Return how to cut a product into tiles. The same on every rank. Local.

    Args:
        form: one of ``FORMS``.
        rows, cols: of the largest share of a rank.
        shares: how many shares each rank multiplies.
        blocks: that run at once, one on a multiprocessor.
    """

    def cost(width: int) -> float:
        tiles = shares * -(-rows // TILE_ROWS) * -(-cols // width)
        rounds = -(-tiles // blocks)
        return (rounds + _LAST_TILES[form]) * width + rounds * (
            _NARROW_COST if width == _WIDTHS[0] else _TILE_COST
        )

    width = min(_WIDTHS, key=lambda width: (cost(width), -width))
    slots = 2 if _stages(width, 2) >= 4 else 1
    return Tiling(width, -(-rows // TILE_ROWS), -(-cols // width), slots, _stages(width, slots))


def _stages(width: int, slots: int) -> int:
    room = _SHARED_BYTES - _BARRIER_BYTES - _ALIGN_BYTES - slots * TILE_ROWS * width * 2
    return min(7, room // ((TILE_ROWS + width) * _STEP * 2))


@dataclass(frozen=True, slots=True)
class KernelJob:
    """The arguments of a launch: matrices and addresses, as this rank sees them. See ``one_kernel.cu``.

    Attributes:
        x, w: the operands; W is outputs × inputs.
        d: this rank's tiles of D.
        starts: where each rank's share of the rows of X begins, and where the last ends.
        control: two words: how many calls there were before this one, and how many blocks have ended.
        flags, boxes: of every rank; the boxes of even and of odd calls.
        capacity: how many flags there are for each source.
        rank: this one.
        copies: where each rank's results are copied; None for this rank's.
        bias: one row, or None.
        activation: None, "relu" or "gelu".
        alpha: the factor of the product.
    """

    x: View
    w: View
    d: View
    starts: Sequence[int]
    control: int
    flags: Sequence[int]
    boxes: Sequence[Sequence[int]]
    capacity: int
    rank: int
    copies: Sequence[View | None] = ()
    bias: View | None = None
    activation: str | None = None
    alpha: float = 1.0


_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}


class OneKernel:
    """The kernel for one form, type, number of ranks and tiling, on the current GPU. Local.

    Raises:
        StatusError: NVRTC or the driver refuses it.

    Attributes:
        tiles: the tiling.
        sums: whether ranks add parts of each other's.
    """

    def __init__(self, form: str, dtype: np.dtype, ranks: int, tiles: Tiling) -> None:
        from cuda.bindings import driver

        self._driver, self.ranks, self.tiles, self.sums = driver, ranks, tiles, form != "matmul_allgather"
        status, device = driver.cuCtxGetDevice()
        check_driver((status,))
        self._function = _loaded(int(device), form, dtype.name, ranks, tiles)
        kinds = driver.CUtensorMapDataType
        self._kind = (
            kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            if dtype.name == "float16"
            else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        )

    def launch(self, job: KernelJob, blocks: int, stream: int) -> None:
        """Queue the kernel; all its blocks must be able to run at once. Local to queue, collective to run."""
        packed = self._packed(job)
        buffer = ctypes.create_string_buffer(len(packed) + _MAP_ALIGN_BYTES)
        at = -(-ctypes.addressof(buffer) // _MAP_ALIGN_BYTES) * _MAP_ALIGN_BYTES
        ctypes.memmove(at, packed, len(packed))
        arguments = (ctypes.c_void_p * 1)(at)
        shared, addresses = self.tiles.shared_bytes, ctypes.addressof(arguments)
        check_driver(
            self._driver.cuLaunchKernel(
                self._function, blocks, 1, 1, _THREADS, 1, 1, shared, stream, addresses, 0
            )
        )

    def _packed(self, job: KernelJob) -> bytes:
        """Return ``struct Job`` of the kernel."""
        ranks, tiles = self.ranks, self.tiles
        nowhere = View(0, 0, 0, 0, job.d.dtype)
        copies = [view or nowhere for view in job.copies] or [nowhere] * ranks
        starts = [*job.starts, *[job.starts[-1]] * (ranks + 1 - len(job.starts))]
        maps = [
            self._map(job.x, (TILE_ROWS, _STEP)), self._map(job.w, (tiles.width, _STEP)),
            self._map(job.d, (TILE_ROWS, tiles.chunk)),
        ]  # fmt: skip
        addresses = [
            job.control, *job.flags, *job.boxes[0], *job.boxes[1], *(view.address for view in copies),
            job.bias.address if job.bias else 0,
        ]  # fmt: skip
        numbers = [
            *(view.rows for view in copies), *(view.cols for view in copies), *starts,
            tiles.row_blocks, tiles.col_blocks, -(-job.w.cols // _STEP), job.rank, job.d.cols,
            max(view.ld for view in copies), job.capacity, tiles.count, _ACTIVATIONS[job.activation],
            int(job.bias is not None and job.bias.dtype == np.float32),
        ]  # fmt: skip
        data = b"".join(maps) + struct.pack(
            f"<{len(addresses)}Q{len(numbers)}if", *addresses, *numbers, job.alpha
        )
        return data.ljust(job_bytes(ranks), b"\0")

    def _map(self, matrix: View, box: tuple[int, int]) -> bytes:
        """Return how TMA finds boxes of a matrix, whose rows and first address are multiples of 16 bytes."""
        driver = self._driver
        swizzles = driver.CUtensorMapSwizzle
        swizzle = {128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B}
        size, count = driver.cuuint64_t, driver.cuuint32_t
        status, tensor_map = driver.cuTensorMapEncodeTiled(
            self._kind, 2, matrix.address,
            [size(matrix.cols), size(matrix.rows)], [size(matrix.ld * 2)],
            [count(box[1]), count(box[0])], [count(1), count(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle[box[1] * 2],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        check_driver((status,))
        return ctypes.string_at(tensor_map.getPtr(), _MAP_BYTES)


@cache
def _loaded(device: int, form: str, dtype: str, ranks: int, tiles: Tiling) -> Any:  # noqa: ARG001 - a key of the cache
    """Return the kernel's function on a GPU, the current one; it stays there for the process's other plans. Local."""
    from cuda.bindings import driver

    status, module = driver.cuModuleLoadData(
        compiled(form, dtype, ranks, tiles.width, tiles.slots, tiles.stages)
    )
    check_driver((status,))
    status, function = driver.cuModuleGetFunction(module, b"one_kernel")
    check_driver((status,))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check_driver(driver.cuFuncSetAttribute(function, attribute, tiles.shared_bytes))
    return function


@cache
def compiled(form: str, dtype: str, ranks: int, width: int, slots: int, stages: int) -> bytes:
    """Return the machine code of the kernel for sm_90a. Local; takes seconds the first time.

    Raises:
        StatusError: NVRTC refuses it; the error has its log.
    """
    from cuda.bindings import nvrtc

    status, program = nvrtc.nvrtcCreateProgram(
        source(form, dtype, ranks, width, slots, stages).encode(), b"one_kernel.cu", 0, [], []
    )
    _check_nvrtc(status)
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17"]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if failed:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise StatusError(f"NVRTC: {failed.name}: {log.decode(errors='replace').strip()}")
    status, size = nvrtc.nvrtcGetCUBINSize(program)
    _check_nvrtc(status)
    cubin = b" " * size
    _check_nvrtc(*nvrtc.nvrtcGetCUBIN(program, cubin))
    _check_nvrtc(*nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin)


def source(form: str, dtype: str, ranks: int, width: int, slots: int, stages: int) -> str:
    """Return the kernel's source, with its macros. Local."""
    macros = {
        "FORM": FORMS.index(form), "HALF": int(dtype == "float16"), "RANKS": ranks, "BN": width,
        "SLOTS": slots, "STAGES": stages, "JOB_BYTES": job_bytes(ranks), "WGMMA(d, a, b, adds)": _wgmma(dtype, width),
    }  # fmt: skip
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    return "\n".join([*lines, Path(__file__).with_suffix(".cu").read_text()])


def job_bytes(ranks: int) -> int:
    """Return the size of the kernel's ``struct Job``. Local."""
    addresses, numbers = 2 + 4 * ranks, 3 * ranks + 12
    used = 3 * _MAP_BYTES + 8 * addresses + 4 * numbers
    return -(-used // _MAP_ALIGN_BYTES) * _MAP_ALIGN_BYTES


def _wgmma(dtype: str, width: int) -> str:
    """Return an instruction that multiplies 64 × 16 by 16 × width, and adds to ``d`` unless ``adds`` is 0."""
    count, kind = width // 2, "f16" if dtype == "float16" else "bf16"
    registers = ",".join(f"%{i}" for i in range(count))
    operands = ",".join(f'"+f"((d)[{i}])' for i in range(count))
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p,%{count + 2},0; '
        f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
        f'{{{registers}}},%{count},%{count + 1},p,1,1,0,0;}}" : {operands} : "l"(a), "l"(b), "r"((int)(adds)));'
    )


def _check_nvrtc(status: Any) -> None:
    if status:
        raise StatusError(f"NVRTC: {status.name}")
