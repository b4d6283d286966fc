# SPDX-License-Identifier: Apache-2.0
"""Compile what wheels bring as machine code into the package's folder for it: kernels.py [TARGET ...].

That is the one kernel for products of 16 bits by 2, 4 and 8 ranks, in all tilings that ``tiling`` takes of many sizes,
and what kernels.txt lists: a file of the kernels and its macros in each line. It has what the calls of
``benchmarks/first_calls.py`` need, which a test checks on simulated GPUs. NVRTC must be installed, no GPU. Other
kernels are compiled when they are needed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pblasmp.dtypes import DTYPES  # noqa: E402
from pblasmp.engines.gpu.kernels import compiler  # noqa: E402
from pblasmp.engines.gpu.kernels.one_kernel import FORMS, Types, source, tiling, way_of_parts  # noqa: E402
from pblasmp.resources import usable_cores  # noqa: E402

TARGETS = "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"
HOPPER = "sm_90a"  # whose code may use WGMMA
BLOCKS = {
    "sm_80": (108,),
    "sm_89": (142,),
    "sm_90": (),
    HOPPER: (132, 106),
    "sm_100": (148,),
    "sm_120": (188, 170),
}
"""Multiprocessors that the one kernel has on GPUs of a kind; on Hopper also beside other communicators."""
RANKS = 2, 4, 8
SIDES = [128 << i for i in range(9)] + [3 * 128 << i for i in range(8)] + [7 * 128 << i for i in range(6)]
INPUTS = [512 << i for i in range(6)]  # of a rank


def listed() -> Iterator[str]:
    """Yield the texts of the list; those for two ranks also for more."""
    for line in ROOT.joinpath(".ci", "kernels.txt").read_text().splitlines():
        name, *macros = line.split(" ")
        found = dict(macro.split("=") for macro in macros)
        for ranks in RANKS if found.get("RANKS") == "2" else (found.get("RANKS"),):
            yield compiler.with_macros(compiler.cuda(name), found | ({"RANKS": ranks} if ranks else {}))


def one_kernels(target: str) -> Iterator[str]:
    """Yield the texts of the one kernel, some of them several times."""
    mma = target != HOPPER
    sizes = product(FORMS, RANKS, BLOCKS[target], SIDES, SIDES, INPUTS)
    tilings = set()
    for form, ranks, blocks, rows, cols, inputs in sizes:
        parts = way_of_parts(form, ranks, rows, cols, 2 * inputs, blocks, mma=mma)
        shared = form != FORMS[2] and parts != "exchanged"
        high = -(-rows // ranks) if shared else rows
        cut = tiling(form, ranks, high, cols, 2 * inputs, parts, blocks, mma=mma)
        tilings.add((form, ranks, replace(cut, row_blocks=1, col_blocks=1)))
    for (form, ranks, cut), name in product(tilings, ("bfloat16", "float16")):
        yield source(form, Types(*[DTYPES[name]] * 4), ranks, cut)


def build(target: str) -> None:
    """Compile the kernels for GPUs of a kind."""
    texts = sorted({*one_kernels(target), *(listed() if target != HOPPER else ())})
    with ProcessPoolExecutor(usable_cores()) as pool:
        codes = dict(zip(texts, pool.map(partial(compiler.compiled, target=target), texts), strict=True))
    file = compiler.ship(codes, target, compiler.SHIPPED)
    print(f"{file.name}: {len(codes)} kernels, {file.stat().st_size / 2**20:.1f} MiB", flush=True)


def main() -> None:
    """Compile for the targets given, or for all, in place of what was compiled before."""
    shutil.rmtree(compiler.SHIPPED, ignore_errors=True)
    compiler.SHIPPED.mkdir()
    for target in sys.argv[1:] or TARGETS:
        build(target)


if __name__ == "__main__":
    main()
