# SPDX-License-Identifier: Apache-2.0
"""The order in which ``one_kernel.cu`` goes through its tiles: the kernel's own lines, compiled for the CPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from pblasmp.engines.gpu.kernels import one_kernel

TEXT = """
#define __device__
#define __forceinline__
typedef unsigned char u8; typedef unsigned long long u64; typedef unsigned int u32;
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static struct { int x; } gridDim;
struct Job { int row_blocks, col_blocks, tiles, rank; };
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
"""


class Order:
    """The kernel's order of tiles.

    Args:
        directory: where the library is made.
        ranks: their number.
        cluster: blocks of a cluster.
        sums: ranks add parts of each other's tiles.
    """

    def __init__(self, directory: Path, ranks: int, cluster: int, *, sums: bool) -> None:
        text = Path(one_kernel.__file__).with_suffix(".cu").read_text()
        first, last = "struct Tile {", "__device__ __forceinline__ float bias_of"
        lines = TEXT % text[text.index(first) : text.index(last)]
        library = directory / f"order_{ranks}_{cluster}_{int(sums)}.so"
        macros = [f"-DRANKS={ranks}", f"-DCLUSTER={cluster}", f"-DSUMS={int(sums)}"]
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-shared", "-fPIC", *macros, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=lines, text=True, check=True)
        self._tiles: Any = ctypes.CDLL(str(library)).tiles
        self.ranks, self.cluster, self.sums = ranks, cluster, sums

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
