# SPDX-License-Identifier: Apache-2.0
"""Sweeps: one set of matrices and options written down as TOML, for every level-3 routine on several grids. 0-based.

descriptors/README.md explains the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from pblasmp.errors import LayoutError
from pblasmp.layout import Grid, MatrixDescriptor
from pblasmp.problems import files
from pblasmp.problems.schema import (
    Count,
    Diag,
    Extent,
    Number,
    Ops,
    Pair,
    Side,
    Table,
    Text,
    Uplo,
    json_schema,
    table_faults,
)

FOLDER = files.root() / "sweeps"


class _PartLayout(TypedDict):
    shape: Annotated[Pair, Field(title="rows and columns of the whole matrix")]
    block: Annotated[tuple[Count, Count], Field(description="two integers, each at least 1")]


class PartTable(_PartLayout, total=False):
    """One matrix, and where the part of it begins that a routine works on."""

    source: Annotated[Pair, Field(title="process row and column of the first block, modulo the grid")]
    start: Annotated[Pair, Field(title="row and column where the part begins")]


class _Sweep(TypedDict):
    title: Text
    grids: Annotated[list[Text], Field(min_length=1, description="a list of names of grids")]
    m: Extent
    n: Extent
    k: Extent
    a: PartTable
    b: PartTable
    c: PartTable


class SweepTable(_Sweep, total=False):
    """One set of matrices and options for every level-3 routine. README.md explains the format."""

    description: Text
    side: Side
    uplo: Uplo
    ops: Ops
    diag: Diag
    alpha: Number
    beta: Number
    gap: Extent


def find_sweeps() -> list[Path]:
    """Return the sweep files of descriptors/, sorted."""
    return sorted(FOLDER.glob("*.toml"))


def schema() -> str:
    """Return the text of sweep.schema.json."""
    return json_schema("sweep.schema.json", SweepTable)


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

    def parent(self, name: str, grid: Grid, dtype: Any, order: Any = "F") -> MatrixDescriptor:
        """Return the layout of the whole of matrix ``name`` on ``grid``. In C order it is the transpose in shape only.

        A source outside the grid is taken modulo its extents.
        """
        part = self.parts[name]
        row, col = part.get("source", (0, 0))
        source = row % grid.nprow, col % grid.npcol
        tight = MatrixDescriptor(part["shape"], part["block"], grid, source, dtype, order)
        ld = max(tight.lld(rank) for rank in range(grid.size)) + self.gap
        return MatrixDescriptor(part["shape"], part["block"], grid, source, dtype, order, ld=ld)


def load_sweep(file: str | Path) -> Sweep:
    """Return the sweep written in ``file``: a path, or the name of one in descriptors/.

    Raises:
        LayoutError: the file cannot be read or makes no sweep; the message names the file and every fault.
    """
    path = Path(file) if isinstance(file, Path) else FOLDER / f"{file}.toml"
    data, faults = files.read_toml(path)
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
    found = table_faults(data, SweepTable)
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


if __name__ == "__main__":
    (files.root() / "sweep.schema.json").write_text(schema())
