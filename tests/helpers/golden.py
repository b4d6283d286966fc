# SPDX-License-Identifier: Apache-2.0
"""What every rank owns in the problems of descriptors/, by brute force, independent of pblasmp.layout.

It reads the TOML itself, deals blocks out like cards, and shares no code with the library. The results are in
descriptors/golden: ``python -m tests.helpers.golden --write`` makes them again, and without --write says which
are stale. In each file, for each operand:

    shape         of the operand (of the sub-matrix, where it has a window)
    local_shapes  by rank
    lld           by rank: the leading dimension of the local array
    rows, cols    by rank: the global indices of its local rows and columns
    owners        the matrix, each element the rank that owns it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AG, RS, AR = "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"
DESCRIPTORS = Path(__file__).parents[2] / "descriptors"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def golden(problem: Path) -> dict[str, Any]:
    """Return what every rank owns of each operand in the problem file."""
    return {name: describe(operand) for name, operand in resolve(read(problem)).items()}


def invalid_files() -> list[Path]:
    """The descriptor files with faults."""
    return sorted((DESCRIPTORS / "invalid").glob("*.toml"))


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


# --- what a file says, with every default written out ---


def resolve(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return shape, block, source, grid, order, ld and window of each operand in full."""
    scheme = file.get("scheme", "gemm")
    if scheme == "gemm":
        operands = resolve_gemm(file)
    else:
        orders = file.get("order", "C")
        ops = file.get("ops", "TN" if orders[-1] == "F" else "NT")
        orders = orders if len(orders) == 3 else orders * 3
        operands = {}
        for name, order in zip("abd", orders, strict=True):
            trans = {"a": ops[0], "b": ops[1], "d": "N"}[name] != "N"
            operands[name] = one_dimensional(file, name, trans, order, orders[2]) | {
                "source": [0, 0],
                "order": order,
            }
            operands[name] |= file.get(name, {})
    if "c" in file:
        operands["c"] = operands["d"] | {"ld": operands["d"].get("ld")} | file["c"]
    for operand in operands.values():
        if isinstance(operand["grid"], str):
            operand["grid"] = read(DESCRIPTORS / "grids" / f"{operand['grid']}.toml")
    return operands


def resolve_gemm(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    op_a, op_b = file.get("ops", "NN")
    orders = file.get("order", "C")
    orders = orders if len(orders) == 3 else orders * 3
    grid = file["grid"] if "grid" in file else nearest_to_a_square(file["nranks"])
    operands: dict[str, dict[str, Any]] = {}
    for name, order, op, dimensions in zip("abd", orders, (op_a, op_b, "N"), ("mk", "kn", "mn"), strict=True):
        if op != "N":
            dimensions = dimensions[1] + dimensions[0]
        operand: dict[str, Any] = {"grid": grid, "source": file.get("source", [0, 0]), "order": order}
        if "m" in file:
            operand["shape"] = [file[x] for x in dimensions]
        if "block" in file:
            sizes = file["block"]
            operand["block"] = [
                sizes if isinstance(sizes, int) else sizes["mnk".index(x)] for x in dimensions
            ]
        operands[name] = operand | file.get(name, {})
    a, b, d = operands.values()
    rows, cols = (0 if op_a == "N" else 1), (1 if op_b == "N" else 0)
    if "shape" not in d:
        d["shape"] = [window_shape(a)[rows], window_shape(b)[cols]]
    if "block" not in d:
        d["block"] = [a["block"][rows], b["block"][cols]]
    return operands


def nearest_to_a_square(ranks: int) -> dict[str, Any]:
    shapes = [(p, q) for p in range(1, ranks + 1) for q in range(p, ranks + 1) if p * q == ranks]
    nprow, npcol = min(shapes, key=lambda shape: shape[1] - shape[0])
    return {"nprow": nprow, "npcol": npcol, "order": "row"}


def one_dimensional(
    file: dict[str, Any], name: str, trans: bool, order: str, order_of_d: str
) -> dict[str, Any]:
    """Return shape, block and grid of an operand of scheme AG, RS or AR.

    The table is of F-ordered matrices. C-ordered memory is that of the transpose in F order; with D
    transposed the product is D^T = op(B)^T op(A)^T, in which A and B change places.
    """
    m, n, k, ranks = (file[x] for x in ("m", "n", "k", "nranks"))
    role = name
    if order_of_d == "C":
        m, n = n, m
        role = {"a": "b", "b": "a", "d": "d"}[name]
    if order != order_of_d:
        trans = not trans
    mp, np, kp = m // ranks, n // ranks, k // ranks
    col = {"nprow": ranks, "npcol": 1, "order": "col"}
    row = {"nprow": 1, "npcol": ranks, "order": "row"}
    table = {
        (AG, "a", False): ((m, k), (mp, k), col),
        (AG, "a", True): ((k, m), (k, mp), row),
        (AG, "b", False): ((k, n), (k, np), row),
        (AG, "b", True): ((n, k), (np, k), col),
        (AG, "d", False): ((m, n), (mp, np), col),
        (RS, "a", False): ((m, k), (m, kp), row),
        (RS, "a", True): ((k, m), (kp, m), col),
        (RS, "b", False): ((k, n), (kp, np), col),
        (RS, "b", True): ((n, k), (np, kp), row),
        (RS, "d", False): ((m, n), (m, np), row),
        (AR, "a", True): ((k, m), (kp, m), col),
        (AR, "b", False): ((k, n), (kp, n), col),
        (AR, "d", False): ((m, n * ranks), (m, n), row),
    }
    shape, block, grid = table[file["scheme"], role, trans]
    if order == "C":
        shape, block = shape[::-1], block[::-1]
        grid = row if grid is col else col
    return {"shape": list(shape), "block": list(block), "grid": grid}


def window(operand: dict[str, Any]) -> list[list[int]]:
    return operand.get("window") or [[0, operand["shape"][0]], [0, operand["shape"][1]]]


def window_shape(operand: dict[str, Any]) -> list[int]:
    return [stop - start for start, stop in window(operand)]


# --- who owns what ---


def deal(extent: int, block: int, source: int, processes: int) -> list[int]:
    """Return the process of each index: blocks are dealt out one by one, from ``source`` and round again."""
    owners: list[int] = []
    process = source
    while len(owners) < extent:
        for _ in range(block):
            if len(owners) < extent:
                owners.append(process)
        process = process + 1 if process + 1 < processes else 0
    return owners


def numbering(grid: dict[str, Any]) -> dict[tuple[int, int], int]:
    """Return the rank at each place of the grid."""
    rows, cols = range(grid["nprow"]), range(grid["npcol"])
    by_row = [(i, j) for i in rows for j in cols]
    by_col = [(i, j) for j in cols for i in rows]
    places = by_col if grid.get("order", "row") == "col" else by_row
    return {place: rank for rank, place in enumerate(places)}


def describe(operand: dict[str, Any]) -> dict[str, Any]:
    grid = operand["grid"]
    (i0, i1), (j0, j1) = window(operand)
    row_owner = deal(operand["shape"][0], operand["block"][0], operand["source"][0], grid["nprow"])[i0:i1]
    col_owner = deal(operand["shape"][1], operand["block"][1], operand["source"][1], grid["npcol"])[j0:j1]
    rank_at = numbering(grid)
    rows, cols, lld = [], [], []
    for prow, pcol in sorted(rank_at, key=rank_at.__getitem__):
        rows.append([i for i, owner in enumerate(row_owner) if owner == prow])
        cols.append([j for j, owner in enumerate(col_owner) if owner == pcol])
        contiguous = cols[-1] if operand["order"] == "C" else rows[-1]
        lld.append(max(1, len(contiguous), operand.get("ld") or 1))
    return {
        "shape": [i1 - i0, j1 - j0],
        "local_shapes": [[len(r), len(c)] for r, c in zip(rows, cols, strict=True)],
        "lld": lld,
        "rows": rows,
        "cols": cols,
        "owners": ["".join(DIGITS[rank_at[prow, pcol]] for pcol in col_owner) for prow in row_owner],
    }


# --- the files ---


def text(results: dict[str, Any]) -> str:
    """Return the results as JSON, a line for each fact."""
    operands = []
    for name, facts in results.items():
        lines = ",\n".join(
            f"    {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            for key, value in facts.items()
        )
        operands.append(f'  "{name}": {{\n{lines}\n  }}')
    return "{\n" + ",\n".join(operands) + "\n}\n"


def expected() -> dict[Path, str]:
    """Return the text of every golden file that there should be."""
    problems = sorted((DESCRIPTORS / "problems").glob("*.toml"))
    return {DESCRIPTORS / "golden" / f"{path.stem}.json": text(golden(path)) for path in problems}


def stale() -> list[str]:
    """Return what is wrong with the golden files, by name."""
    files = expected()
    there = set((DESCRIPTORS / "golden").iterdir())
    wrong = [f"{path.name}: no problem has this name" for path in sorted(there - set(files))]
    for path, content in files.items():
        if path not in there:
            wrong.append(f"{path.name}: missing")
        elif path.read_text(encoding="utf-8") != content:
            wrong.append(f"{path.name}: not what brute force gives")
    return wrong


def main() -> int:
    if "--write" in sys.argv[1:]:
        files = expected()
        for path in set((DESCRIPTORS / "golden").iterdir()) - set(files):
            path.unlink()
        for path, content in files.items():
            path.write_text(content, encoding="utf-8")
        return 0
    wrong = stale()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
