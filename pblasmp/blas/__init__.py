# SPDX-License-Identifier: Apache-2.0
"""Levels 1 to 3 of the PBLAS on distributed matrices, under BLAS's names without the letter of the type.

Level 1: vectors. Level 2: matrices times vectors, updates of rank one and two. Level 3: triangular and symmetric
products, solves, updates of rank k, sums; ``pb.matmul`` is GEMM.
"""

from __future__ import annotations

from . import level3, vectors
from .level3 import *  # noqa: F403 - each module lists its names once
from .vectors import *  # noqa: F403

__all__: list[str] = []
__all__ += level3.__all__
__all__ += vectors.__all__


def __dir__() -> list[str]:
    return __all__
