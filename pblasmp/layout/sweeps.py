# SPDX-License-Identifier: Apache-2.0
"""Sweeps: one set of matrices and options written down as TOML, for every level-3 routine on several grids. 0-based.

descriptors/README.md explains the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError
from . import files
from .descriptor import MatrixDescriptor, MemoryOrder
from .filekeys import Table, sweep_faults
from .grid import Grid

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import DTypeLike

__all__ = ["Sweep", "faults_of", "load_sweep"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep file holds. Local.

    Attributes:
        path: where it was read.
        title, description: what it shows.
        grids: the grids to run on, by name.
        m, n, k: sizes as PBLAS names them.
        side, uplo, op_a, op_b, diag: options, for the routines that have them.
        alpha, beta: scalars; of complex ones real types take the real part.
        gap: padding of the leading dimension.
        parts: by matrix ("a", "b" and "c"), its table in the file.
    """

    path: Path
    title: str
    description: str
    grids: Mapping[str, Grid]
    m: int
    n: int
    k: int
    side: str
    uplo: str
    op_a: str
    op_b: str
    diag: str
    alpha: complex
    beta: complex
    gap: int
    parts: Mapping[str, Table]

    def start(self, name: str) -> tuple[int, int]:
        """Return the row and column where the part of matrix ``name`` begins."""
        row, col = self.parts[name].get("start", (0, 0))
        return row, col

    def parent(self, name: str, grid: Grid, dtype: DTypeLike, order: MemoryOrder = "F") -> MatrixDescriptor:
        """Return how the whole of matrix ``name`` lies on ``grid``. In C order it is the transpose in shape only.

        A source outside the grid is taken modulo its extents.
        """
        part = self.parts[name]
        row, col = part.get("source", (0, 0))
        source = row % grid.nprow, col % grid.npcol
        tight = MatrixDescriptor(part["shape"], part["block"], grid, source, dtype, order)
        ld = max(tight.lld(rank) for rank in range(grid.size)) + self.gap
        return MatrixDescriptor(part["shape"], part["block"], grid, source, dtype, order, ld=ld)


def load_sweep(file: str | PathLike[str]) -> Sweep:
    """Return the sweep written in ``file``: a path, or the name of one that comes with pblasmp. Local.

    Raises:
        LayoutError: the file cannot be read or makes no sweep; the message names the file and every fault.
    """
    path = files.path_of(file, "sweeps")
    data, faults = files.read(path)
    faults = faults or faults_of(data)
    if faults:
        raise files.file_error(path, faults)
    op_a, op_b = data.get("ops", "NN")
    return Sweep(
        path=path,
        title=data["title"],
        description=data.get("description", "").strip(),
        grids={name: files.load_grid(name) for name in data["grids"]},
        m=data["m"],
        n=data["n"],
        k=data["k"],
        side=data.get("side", "L"),
        uplo=data.get("uplo", "L"),
        op_a=op_a,
        op_b=op_b,
        diag=data.get("diag", "N"),
        alpha=_number(data.get("alpha", 1)),
        beta=_number(data.get("beta", 0)),
        gap=data.get("gap", 0),
        parts={name: data[name] for name in "abc"},
    )


def _number(value: Any) -> complex:
    return complex(*value) if isinstance(value, list) else complex(value)


def faults_of(data: Table) -> list[str]:
    """Return what keeps ``data`` from being a sweep. Local."""
    found = sweep_faults(data)
    if found:
        return found
    known = {path.stem for path in files.find("grids")}
    found = [
        f"grids: expected names out of {', '.join(sorted(known))}, got {name!r}"
        for name in data["grids"]
        if name not in known
    ]
    size = max(data[x] for x in "mnk")
    for name in "abc":
        part = data[name]
        for axis, (start, extent) in enumerate(zip(part.get("start", (0, 0)), part["shape"], strict=True)):
            if start + size > extent:
                found.append(
                    f"{name}.start[{axis}]: {size} from {start} on are more than the {extent} of {name}.shape"
                )
        try:
            MatrixDescriptor(part["shape"], part["block"], Grid(1, 1))
        except LayoutError as error:
            found.append(f"{name}.{error}")
    return found
