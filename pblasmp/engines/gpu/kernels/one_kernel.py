# SPDX-License-Identifier: Apache-2.0
"""The kernel of ``one_kernel.cu``: its tile sizes by rule, its compilation by NVRTC, its arguments, its launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import DTYPES, FLOAT8, is_float8
from .compiler import Kernel, check_driver, cuda, loaded, with_macros
from .views import View

FORMS = ("matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
"""What the kernel does, by the number that ``FORM`` has in it."""

PARTS = ("sent", "fetched", "stored", "exchanged")
"""How parts of sums get to the ranks that add them, by the number that ``PARTS`` has in the kernel."""

TILE_ROWS, WIDTHS = 128, (64, 128, 160, 192, 208, 224, 240, 256)
"""Rows and columns of a tile."""

_LINE_BYTES = 128  # of k in a step
_CLUSTERS = 1, 2
_FEWEST_STAGES, _ENOUGH_STAGES = 3, 4
_PAIR = 2
_WIDEST_EXCHANGE = 128  # columns of a tile: registers have no room for a wider part and the next tile's sums
_WIDEST_PART = 128  # columns of a step of k in 8 bits: registers have no room for more beside the sums
_FEW = 2 * 128 * 128  # sums for a block, up to which little is multiplied while parts travel
_SHORT = 2048  # bytes of a row of X up to which two ranks exchange twice as many
_EXCHANGED = 2 << 20
"""Bytes that travel in the time of a second transfer, 5 µs on H100 and H200 by NVLink."""
_HIDES_PULLS = {"matmul_reduce_scatter": 3072, "matmul_allreduce": 2048}
"""Bytes of a row of X with which it takes as long to multiply a tile as to fetch one."""
_THREADS = 384
_SHARED_BYTES = 227 << 10  # that a block may use on Hopper
_MMA_SHARED_BYTES = 99 << 10  # on any GPU since sm_80
_MMA_THREADS, _MMA_WIDTHS, _MMA_STAGES = 256, (64, 128), 4
_PIECE_BYTES, _BOX_COLUMNS = 8192, 64  # of a result in 16 bits that is fetched at once, at most
_BARRIER_BYTES = 512  # more than all barriers take, and what the kernel declares itself
_ALIGN_BYTES = 1024
_UNIT = 16  # bytes of a row, which TMA's swizzling keeps together
_MAP_BYTES = 128
_NO_MAP = bytes(_MAP_BYTES)
_MAP_ALIGN_BYTES = 64

# The time of a tile is that of multiplying its columns and so many more. After the last tiles come, once, the transfers
# of as many columns, in the time of multiplying by so many bytes of a row of X; of parts that are on their way at once,
# in the time of so many tiles. Measured on two H200 (docs/internals/one-kernel.md).
_TILE_COST, _NARROW_COST, _NARROW_AT_ONCE = 48, 128, 64
_LAST_BYTES = {"matmul_reduce_scatter": 5120, "matmul_allreduce": 12288, "matmul_allgather": 12288}
_AT_ONCE = {"stored": 1, "exchanged": 1.5}


class Types(NamedTuple):
    """Element types: X's, W's, that of parts of sums, D's."""

    x: np.dtype
    w: np.dtype
    parts: np.dtype
    d: np.dtype


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut into tiles.

    Attributes:
        width: columns of a tile.
        row_blocks, col_blocks: tiles of a rank's share, down and across.
        cluster: blocks whose tiles lie one below the other, and which load their W together; it divides ``row_blocks``.
        slots: finished tiles that a block may keep while it multiplies the next.
        stages: steps of k whose operands are loaded ahead.
        buffers: pieces of other ranks' results that a block can hold.
        parts: one of ``PARTS``: how ranks get what others have computed of their tiles.
        mma: whether the kernel multiplies by instructions of all GPUs since sm_80, instead of Hopper's.
    """

    width: int
    row_blocks: int
    col_blocks: int
    cluster: int
    slots: int
    stages: int
    buffers: int
    parts: str
    mma: bool = False

    @property
    def count(self) -> int:
        """Tiles of a rank's share."""
        return self.row_blocks * self.col_blocks

    @property
    def box(self) -> tuple[int, int]:
        """Rows and columns of a tile that TMA stores at once."""
        columns = gcd(self.width, _BOX_COLUMNS)
        return min(TILE_ROWS, _PIECE_BYTES // (2 * columns)), columns

    @property
    def image_bytes(self) -> int:
        """Bytes of a finished tile."""
        return TILE_ROWS * self.width * 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block needs."""
        other = _ALIGN_BYTES if self.mma else _other_bytes(self.width, self.slots, self.buffers)
        return self.stages * _step_bytes(self.width) + other


def way_of_parts(
    form: str, ranks: int, rows: int, cols: int, line: int, blocks: int, *, mma: bool = False
) -> str:
    """Return how parts of sums and results travel, one of ``PARTS``. The same on every rank. Local.

    Args:
        form: one of ``FORMS``.
        rows, cols: of the sums of all ranks.
        line: bytes of a row of X on a rank.
        blocks: that run at once.
        mma: whether the kernel is not Hopper's: then they are stored or exchanged.
    """
    short = form == "matmul_allreduce" and ranks == _PAIR and line <= _SHORT
    if mma or (form != "matmul_allgather" and rows * cols <= _FEW * (1 + short) * blocks):
        # what a rank exchanges beyond its parts and its share of the sums, which two ranks send as well
        more = (ranks - 1) * (ranks - 2) * rows * cols * 2 // ranks
        return "exchanged" if form == "matmul_allreduce" and more <= _EXCHANGED else "stored"
    fetches = ranks == _PAIR and line >= _HIDES_PULLS.get(form, line + 1)
    return "fetched" if fetches else "sent"


def parts_in_boxes(parts: str, *, sums: bool) -> bool:
    """Return whether parts of sums travel in boxes, which then have tiles of every rank. Local."""
    return sums and parts not in _AT_ONCE


def gives_results(form: str, tiles: Tiling, d: np.dtype) -> bool:
    """Return whether results of type ``d`` are stored into inboxes, like parts of sums. Local."""
    stores = form == "matmul_allreduce" or (form == "matmul_allgather" and tiles.mma)
    return stores and tiles.parts == "stored" and not is_float8(d)


def tiling(
    form: str, ranks: int, rows: int, cols: int, line: int, parts: str, blocks: int, *, mma: bool = False
) -> Tiling:
    """Return how to cut a product into tiles. The same on every rank. Local.

    Args:
        form: one of ``FORMS``.
        rows, cols: of the largest share of a rank; if parts are exchanged, of everything.
        line: bytes of a row of X on a rank.
        parts: how they travel.
        blocks: that run at once, one on a multiprocessor.
        mma: whether the kernel is not Hopper's.
    """
    return _tiling(form, ranks, -(-rows // TILE_ROWS), cols, line, parts, blocks, mma)


@lru_cache(1024)
def _tiling(
    form: str, ranks: int, tall: int, cols: int, line: int, parts: str, blocks: int, mma: bool
) -> Tiling:
    """Return what ``tiling`` does of rows that make so many tiles. Local."""
    exchanges, at_once = parts == "exchanged", parts in _AT_ONCE
    buffers = 0 if form == "matmul_reduce_scatter" or exchanges else 2
    shares = 1 if form == "matmul_allgather" or exchanges else ranks
    last = _AT_ONCE.get(parts, _LAST_BYTES[form] / line)
    narrow = _NARROW_AT_ONCE if at_once else _NARROW_COST

    def share(width: int, cluster: int) -> tuple[int, int]:
        return -(-tall // cluster) * cluster, -(-cols // width)

    def cost(width: int, cluster: int) -> float:
        rounds = -(-shares * prod(share(width, cluster)) // (blocks // cluster * cluster))
        return (rounds + last) * width + rounds * (narrow if width == WIDTHS[0] else _TILE_COST)

    ways = [
        (width, cluster)
        for width in (_MMA_WIDTHS if mma else WIDTHS)
        for cluster in (_CLUSTERS[:1] if at_once else _CLUSTERS)
        if blocks >= cluster
        and _stages(width, 1, buffers) >= _FEWEST_STAGES
        and not (exchanges and width > _WIDEST_EXCHANGE)
    ]
    width, cluster = min(ways, key=lambda way: (cost(*way), -way[0], share(*way), -way[1]))
    if mma:
        stages = min(_MMA_STAGES, (_MMA_SHARED_BYTES - _ALIGN_BYTES) // _step_bytes(width))
        return Tiling(width, *share(width, 1), 1, 1, stages, 0, parts, mma=True)
    slots = 2 if _stages(width, 2, buffers) >= _ENOUGH_STAGES else 1
    return Tiling(
        width, *share(width, cluster), cluster, slots, _stages(width, slots, buffers), buffers, parts
    )


def _stages(width: int, slots: int, buffers: int) -> int:
    return min(7, (_SHARED_BYTES - _other_bytes(width, slots, buffers)) // _step_bytes(width))


def _step_bytes(width: int) -> int:
    return (TILE_ROWS + width) * _LINE_BYTES


def _other_bytes(width: int, slots: int, buffers: int) -> int:
    return slots * TILE_ROWS * width * 2 + buffers * _PIECE_BYTES + _BARRIER_BYTES + _ALIGN_BYTES


@dataclass(slots=True)
class KernelJob:
    """The arguments of a launch: matrices and addresses, as this rank sees them. See ``one_kernel.cu``.

    Attributes:
        x, w: the operands; W is outputs × inputs.
        d: this rank's tiles of D.
        starts: where each rank's share of the rows of X begins, and where the last ends.
        control: one word of 64 bits: how many calls there were before this one, and how many blocks have ended.
        flags, boxes, inboxes: of every rank; boxes and inboxes of even and of odd calls.
        capacity: how many flags there are for each source.
        rank: this one.
        copies: where each rank's results belong; None for this rank's.
        bias: one row, or None.
        activation: None, "relu" or "gelu".
        alpha: the factor of the product.
        scale_x, scale_w, scale_d: addresses of the scales of 8-bit matrices, 0 for none.
        amax: address of a float32 that is raised to the largest absolute value of this rank's results, 0 for none.
    """

    x: View
    w: View
    d: View
    starts: Sequence[int]
    control: int
    flags: Sequence[int]
    boxes: Sequence[Sequence[int]]
    inboxes: Sequence[Sequence[int]]
    capacity: int
    rank: int
    copies: Sequence[View | None] = ()
    bias: View | None = None
    activation: str | None = None
    alpha: float = 1.0
    scale_x: int = 0
    scale_w: int = 0
    scale_d: int = 0
    amax: int = 0


_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}
_BIASES = {"bfloat16": 0, "float16": 1, "float32": 2}
_MAPPED = {
    DTYPES["float16"]: "FLOAT16", DTYPES["bfloat16"]: "BFLOAT16", **dict.fromkeys(FLOAT8.values(), "UINT8"),
}  # fmt: skip
"""Element types as TMA knows them."""
_WGMMA = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_RESULTS = {"float8_e4m3fn": 1, "float8_e5m2": 2}


class OneKernel:
    """The kernel for one form, number of ranks and tiling, and for some types, on the current GPU. Local.

    Raises:
        StatusError: NVRTC or the driver refuses it.

    Attributes:
        tiles: the tiling.
        sums: whether ranks add parts of each other's.
        gives: whether they store results into each other's inboxes.
    """

    def __init__(self, form: str, types: Types, ranks: int, tiles: Tiling) -> None:
        from cuda.bindings import driver

        self._driver, self.sums, self.gives = (
            driver,
            form != "matmul_allgather",
            gives_results(form, tiles, types.d),
        )
        self._lay_out(types.x, ranks, tiles)
        status, device = driver.cuCtxGetDevice()
        check_driver((status,))
        text = source(
            form, types, ranks, replace(tiles, row_blocks=1, col_blocks=1)
        )  # the same for any sizes
        target = "" if tiles.mma else "sm_90a"
        self._function, self._kernel = _loaded(int(device), text, tiles.shared_bytes, ranks, target)

    def _lay_out(self, x: np.dtype, ranks: int, tiles: Tiling) -> None:
        """Find once what all launches have in common. Local.

        Args:
            x: the type of X.
        """
        self.ranks, self.tiles, self._step = ranks, tiles, _LINE_BYTES // x.itemsize
        self._pairs = is_float8(x) and tiles.width <= _WIDEST_PART  # it takes two steps of k at a time
        wide = tiles.width // tiles.cluster
        self._boxes = (TILE_ROWS, self._step), (wide, self._step), tiles.box
        self._words = struct.Struct(f"<{_addresses(ranks)}Q{_numbers(ranks)}if")
        self._nbytes, self._count, self._shared_bytes = job_bytes(ranks), tiles.count, tiles.shared_bytes

    def launch(self, job: KernelJob, blocks: int, stream: Any) -> None:
        """Queue the kernel; all its blocks must be able to run at once. Local to queue, collective to run."""
        tiles = self.tiles
        if not tiles.mma:  # clusters may not fit everywhere
            together = tiles.cluster
            most = _resident(self._function, together, self._shared_bytes, blocks)
            blocks = min(blocks // together, most) * together
        threads = _MMA_THREADS if tiles.mma else _THREADS
        self._kernel(stream, (blocks, 1), threads, [self._packed(job)], self._shared_bytes)

    def _packed(self, job: KernelJob) -> bytes:
        """Return ``struct Job`` of the kernel."""
        ranks, tiles, bias = self.ranks, self.tiles, job.bias
        results = [*job.copies] or [None] * ranks
        results[job.rank] = job.d
        driver, (of_x, of_w, of_d) = None if tiles.mma else self._driver, self._boxes
        maps = [_map(driver, job.x, of_x), _map(driver, job.w, of_w)]
        maps += [_NO_MAP if view is None else _map(driver, view, of_d) for view in results]
        steps = -(-job.w.cols // self._step)
        if self._pairs:
            steps += steps % 2
        words = self._words.pack(
            job.control, *job.flags, *job.boxes[0], *job.boxes[1], *job.inboxes[0], *job.inboxes[1],
            bias.address if bias else 0, job.scale_x, job.scale_w, job.scale_d, job.amax,
            *job.starts, *[job.starts[-1]] * (ranks + 1 - len(job.starts)),
            tiles.row_blocks, tiles.col_blocks, steps, job.rank, job.d.cols, job.capacity, self._count,
            _ACTIVATIONS[job.activation], _BIASES[bias.dtype.name] if bias else 0, job.alpha,
        )  # fmt: skip
        return (b"".join(maps) + words).ljust(self._nbytes, b"\0")


@lru_cache(1024)
def _map(driver: Any, matrix: View, box: tuple[int, int]) -> bytes:
    """Return how TMA finds boxes of a matrix, whose rows and first address are multiples of 16 bytes. Local.

    Without a driver where it is, for the kernel that has no TMA.
    """
    itemsize = matrix.dtype.itemsize
    if driver is None:
        place = struct.pack("<QQii", matrix.address, matrix.ld * itemsize, matrix.rows, matrix.cols)
        return place.ljust(_MAP_BYTES, b"\0")
    kind, boxes = _mapped(driver, matrix.dtype, box)
    size = driver.cuuint64_t
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        kind, 2, matrix.address, [size(matrix.cols), size(matrix.rows)], [size(matrix.ld * itemsize)], *boxes
    )
    check_driver((status,))
    return ctypes.string_at(tensor_map.getPtr(), _MAP_BYTES)


@cache
def _mapped(driver: Any, dtype: np.dtype, box: tuple[int, int]) -> tuple[Any, tuple[Any, ...]]:
    """Return what TMA is told of elements and of boxes, of whatever matrix. Local."""
    line, count = box[1] * dtype.itemsize, driver.cuuint32_t
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{line}B' if line > _UNIT else 'NONE'}"
    return getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAPPED[dtype]}"), (
        [count(box[1]), count(box[0])], [count(1), count(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, getattr(driver.CUtensorMapSwizzle, swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip


@cache
def _loaded(device: int, text: str, shared_bytes: int, ranks: int, target: str) -> tuple[int, Kernel]:
    """Return where the kernel is on the current GPU, and what queues it: the same for any sizes. Local."""
    function = loaded(device, text, "one_kernel", shared_bytes, target)
    return function, Kernel(function, f"{job_bytes(ranks)}s")


@cache
def _resident(function: int, cluster: int, shared_bytes: int, blocks: int) -> int:
    """Return how many clusters of the kernel's blocks the current GPU runs at once. Local."""
    from cuda.bindings import driver

    shape, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    of = shape.value.clusterDim
    of.x, of.y, of.z = cluster, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks // of.x * of.x, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [shape], 1
    status, clusters = driver.cuOccupancyMaxActiveClusters(function, config)
    check_driver((status,))
    return int(clusters)


@cache
def source(form: str, types: Types, ranks: int, tiles: Tiling) -> str:
    """Return the kernel's source, with its macros. Local."""
    eight, width = is_float8(types.x), tiles.width
    at_once = width // 2 if eight and width > _WIDEST_PART else width
    macros = {
        "FORM": FORMS.index(form), "EIGHT": int(eight), "HALF": int(types.parts == np.float16),
        "RESULT": _RESULTS.get(types.d.name, 0), "RANKS": ranks, "BN": width, "WN": at_once, "MMA": int(tiles.mma),
        "CLUSTER": tiles.cluster, "SLOTS": tiles.slots, "STAGES": tiles.stages, "PARTS": PARTS.index(tiles.parts),
        "JOB_BYTES": job_bytes(ranks), "MMA_TYPE": f'"{_WGMMA[types.x.name]}"',
        "WGMMA(d, a, b, adds)": _wgmma(types, at_once),
    }  # fmt: skip
    return with_macros(cuda("one_kernel.cu"), macros)


def job_bytes(ranks: int) -> int:
    """Return the size of the kernel's ``struct Job``. Local."""
    used = (2 + ranks) * _MAP_BYTES + 8 * _addresses(ranks) + 4 * (_numbers(ranks) + 1)
    return -(-used // _MAP_ALIGN_BYTES) * _MAP_ALIGN_BYTES


def _addresses(ranks: int) -> int:
    return 6 + 5 * ranks


def _numbers(ranks: int) -> int:
    return 10 + ranks


def _wgmma(types: Types, width: int) -> str:
    """Return what multiplies 64 rows by 32 bytes of k by ``width`` columns, and adds to ``d`` unless ``adds`` is 0."""
    count, inputs, (x, w) = width // 2, 32 // types.x.itemsize, (_WGMMA[each.name] for each in types[:2])
    registers = ",".join(f"%{i}" for i in range(count))
    operands = ",".join(f'"+f"((d)[{i}])' for i in range(count))
    straight = "" if is_float8(types.x) else ",0,0"  # operands of 16 bits may be transposed
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p,%{count + 2},0; '
        f"wgmma.mma_async.sync.aligned.m64n{width}k{inputs}.f32.{x}.{w} "
        f'{{{registers}}},%{count},%{count + 1},p,1,1{straight};}}" : {operands} : "l"(a), "l"(b), "r"((int)(adds)));'
    )
