# SPDX-License-Identifier: Apache-2.0
"""The order in which ``one_kernel.cu`` goes through its tiles: the kernel's own lines, compiled for the CPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np

from pblasmp.engines.gpu.kernels import one_kernel

TEXT = """
#define __device__
#define __forceinline__
typedef unsigned char u8; typedef unsigned long long u64; typedef unsigned int u32;
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static struct { int x; } gridDim;
struct Job { int row_blocks, col_blocks, tiles, rank; u8 *boxes[2][RANKS], *inboxes[2][RANKS]; };
%s
extern "C" void tiles(int rows, int cols, int rank, int blocks, int results, int* out) {
  Job job = {rows, cols, rows * cols, rank};
  gridDim.x = blocks;
  const int count = (results ? RANKS - 1 : SUMS ? RANKS : 1) * job.tiles;
  for (int s = 0; s < count; s++) {
    Tile t = results ? result_at(job, s) : tile_at(job, s);
    *out++ = t.owner; *out++ = t.row_block; *out++ = t.col_block;
  }
}
extern "C" u64 image(int tiles, int source, int number, int inbox) {
  Job job = {0, 0, tiles, 0};
  return (u64)(inbox == 2 ? result_inbox_at : inbox ? inbox_at : box_at)(job, 0, 0, source, number) / IMAGE;
}
"""


class Order:
    """The kernel's order of tiles, and where their images are.

    Args:
        directory: where the library is made.
        ranks: their number.
        cluster: blocks of a cluster.
        form, parts: as of the kernel.

    Attributes:
        image: ``image(tiles, source, number, which)`` is the place of a tile's image in half of a buffer: of boxes (0),
            or of inboxes, of a part (1) or a result (2).
    """

    def __init__(self, directory: Path, ranks: int, cluster: int, form: str, parts: str = "sent") -> None:
        text = Path(one_kernel.__file__).with_suffix(".cu").read_text()
        pieces = [
            text[text.index(first) : text.index(last)]
            for first, last in (
                ("#define BM", "typedef unsigned char u8"),
                ("struct Tile {", "__device__ __forceinline__ float bias_of"),
                ("#define IMAGE", "__device__ __forceinline__ u32* flag_at"),
                ("__device__ __forceinline__ u8* box_at", "// -- parts that go"),
                ("__device__ __forceinline__ u8* inbox_at", "__device__ __forceinline__ void to_words"),
            )
        ]
        lines = TEXT % "".join(pieces)
        library = directory / f"order_{ranks}_{cluster}_{form}_{parts}.so"
        which = {"FORM": one_kernel.FORMS.index(form), "PARTS": one_kernel.PARTS.index(parts)}
        which |= {"RANKS": ranks, "CLUSTER": cluster, "BN": 64, "MMA": 0, "RESULT": 0}
        macros = [f"-D{name}={value}" for name, value in which.items()]
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-shared", "-fPIC", *macros, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=lines, text=True, check=True)
        code = ctypes.CDLL(str(library))
        self._tiles, self.image = code.tiles, code.image
        self.image.restype = ctypes.c_uint64
        self.ranks, self.cluster, self.sums = ranks, cluster, form != "matmul_allgather"

    def tiles(self, share: tuple[int, int], rank: int, blocks: int) -> np.ndarray:
        """Return a rank's tiles at all positions, each its owner, its row block and its column block.

        ``share`` is how many row blocks and column blocks a rank has, ``blocks`` how many run.
        """
        return self._of(share, rank, blocks, self.ranks if self.sums else 1)

    def results(self, share: tuple[int, int], rank: int, blocks: int) -> np.ndarray:
        """Return the other ranks' tiles that a rank fetches, likewise."""
        return self._of(share, rank, blocks, self.ranks - 1, results=True)

    def _of(
        self, share: tuple[int, int], rank: int, blocks: int, count: int, *, results: bool = False
    ) -> np.ndarray:
        found = np.zeros((count * share[0] * share[1], 3), np.int32)
        self._tiles(*share, rank, blocks, int(results), found.ctypes.data_as(ctypes.c_void_p))
        return found
