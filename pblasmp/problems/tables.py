# SPDX-License-Identifier: Apache-2.0
"""Problems as tables of plain values, as in descriptor files, and the descriptors made from them. 0-based.

A table is checked in two steps, and each gathers every fault: its structure (``schema``), then its values (do they make
descriptors?). Whether the problem is legal is a separate question.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..dtypes import as_dtype, result_dtype, scalar
from ..errors import ArgumentError
from ..layout.descriptor import MatrixDescriptor, window_of
from ..layout.factor_problem import FactorProblem
from ..layout.grid import Grid, as_grid
from ..layout.level3_problem import Level3Problem
from ..layout.parallel import ParallelProblem
from ..layout.problem import MatmulProblem
from ..layout.schemes import Op, Scheme, scheme_operands, scheme_ops
from .schema import OperandTable, Table, is_complete, problem_faults, raise_faults, table_faults

Window = tuple[slice, slice]

_FLIPPED: dict[Op, Op] = {"N": "T", "T": "N", "C": "N"}


@dataclass(slots=True)
class TableOperands:
    """The matrices of a problem while they are made: a matrix's own table takes precedence over what all share.

    Attributes:
        data: the problem's table, with a correct structure.
        parents: by operand, the whole matrix.
        windows: by operand, the part of it that is used.
        operands: by operand, that part.
        scalars: "alpha" and "beta", of a product.
        problem: the problem of these operands; None if there are faults.
        faults: what keeps the values from making descriptors.
    """

    data: Table
    parents: dict[str, MatrixDescriptor] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    operands: dict[str, MatrixDescriptor] = field(default_factory=dict)
    scalars: dict[str, complex] = field(default_factory=dict)
    problem: Any = None
    faults: list[str] = field(default_factory=list)

    def put(self, name: str, shared: Table, like: str = "") -> None:
        """Make operand ``name``, with the window of operand ``like`` if any, or note its faults."""
        own = dict(self.data.get(name, {}))
        ranges = own.pop("window", None)
        try:
            parent = MatrixDescriptor(**{**shared, **own})
        except ArgumentError as error:
            self.faults.append(f"{name}.{error}")
            return
        window = self.windows[like] if ranges is None and like and "shape" not in own else None
        try:
            window = window or window_of(parent.shape, ranges)
        except ArgumentError as error:
            self.faults.append(f"{name}.{error}")
            return
        self.parents[name], self.windows[name], self.operands[name] = parent, window, parent[window]

    def put_scalar(self, name: str, default: int) -> None:
        """Make alpha or beta, complex only for complex matrices, or note its fault."""
        value = self.data.get(name, default)
        try:
            number = complex(*value) if isinstance(value, (list, tuple)) else value
            self.scalars[name] = scalar(number, self.operands["d"].dtype, name)
        except ArgumentError as error:
            self.faults.append(str(error))


CLASSES: dict[str, type] = {
    "routine": Level3Problem,
    "factorization": FactorProblem,
    "form": ParallelProblem,
    "": MatmulProblem,
}
"""The problems by the ``KINDS`` of their tables."""

_OPTIONS = {
    "routine": ("side", "uplo", "op_a", "diag"),
    "factorization": ("op", "factored", "inverse", "unit", "conjugate", "subset"),
}


def operands_in(kind: str, data: Table, of: type | None = None) -> TableOperands:
    """Return the matrices and the problem in a table with a correct structure, or their faults. Local.

    ``of`` is the problem's class, if it is derived from that of the kind.
    """
    made, cls = TableOperands(data), of or CLASSES[kind]
    try:
        if kind == "form":
            made.problem = _parallel(cls, data)
            made.faults += made.problem.faults()
            return made
        options = _routine_operands(made, kind) if kind else _product_operands(made)
        if not made.faults:
            made.problem = cls(**made.operands, **options)
    except ArgumentError as error:
        made.faults.append(str(error))
    return made


def _product_operands(made: TableOperands) -> dict[str, Any]:
    """Make the matrices of a product, and return its options."""
    data = made.data
    scheme: Scheme = data.get("scheme", "gemm")
    op_a, op_b = data.get("ops", "NN" if scheme == "gemm" else scheme_ops(data.get("order", "C")[-1]))
    if scheme == "gemm" or "m" not in data:
        _any_layout(made, op_a, op_b)
    else:
        _scheme_layout(made, scheme, op_a, op_b)
    if not made.faults and "c" in data:
        d = made.parents["d"]
        kept = ("dtype", "order") if is_complete(data["c"]) else d.__slots__
        made.put("c", {name: getattr(d, name) for name in kept}, like="d")
    if not made.faults:
        made.put_scalar("alpha", 1)
        made.put_scalar("beta", 0)
    return {"op_a": op_a, "op_b": op_b, "scheme": scheme}


def _routine_operands(made: TableOperands, kind: str) -> dict[str, Any]:
    """Make the matrices of a level-3 routine or a factorization, and return which it is, and its options."""
    data = made.data
    shared: Table = {key: data[key] for key in ("grid", "block", "source", "dtype", "order") if key in data}
    if "grid" in shared:
        shared["grid"] = as_grid(shared["grid"])
    for name in "abcd":
        if name in data:
            made.put(name, shared)
    given = {name: data[name] for name in _OPTIONS[kind] if name in data}
    return {
        "routine": data[kind],
        **{name: tuple(x) if isinstance(x, list) else x for name, x in given.items()},
    }


def made_from(cls: type, data: object) -> Any:
    """Return the descriptor or problem of this class in a table of plain values. Local.

    LayoutError, which names every fault, if a key is unknown or missing, or a value makes no sense.
    """
    if issubclass(cls, MatrixDescriptor):
        raise_faults("descriptor", table_faults(data, OperandTable, needs=("shape", "block", "grid")))
        values = dict(cast(Table, data))
        window = values.pop("window", None)
        whole = cls(**values)
        return whole if window is None else whole[window_of(whole.shape, window)]
    kind = next(kind for kind, known in CLASSES.items() if issubclass(cls, known))
    what = "product" if kind in ("", "form") else "problem"
    raise_faults(what, problem_faults(data, kind, titled=False))
    made = operands_in(kind, cast(Table, data), cls)
    raise_faults(what, made.faults)
    return made.problem


def _parallel(cls: type, data: Table) -> Any:
    values = {name: value for name, value in data.items() if name not in ("title", "description")}
    for name in ("tokens", "inputs", "outputs", "rows"):
        values[name] = tuple(values.get(name, ()))
    values["row_bytes"] = tuple((name, tuple(each)) for name, each in values.get("row_bytes", {}).items())
    dtype = as_dtype(values.get("dtype", "float64"))
    types = {"dtype": dtype, "w_dtype": dtype, "out_dtype": result_dtype(dtype)}
    types |= {name: as_dtype(value) for name, value in values.items() if name.endswith("dtype")}
    found = cls(**{**values, **types})
    return found if found.rows else replace(found, rows=found.default_rows())


def _any_layout(made: TableOperands, op_a: Op, op_b: Op) -> None:
    """Make A, B and D of a product on any layout; D follows A and B unless its own table says otherwise."""
    data = made.data
    dtype = data.get("dtype", "float64")
    shared: Table = {"source": data.get("source", (0, 0))}
    if "grid" in data or "nranks" in data:
        shared["grid"] = as_grid(data["grid"]) if "grid" in data else Grid.squarest(data["nranks"])
    orders = dict(zip("abd", data.get("order", "C") * 3, strict=False))
    known: dict[str, Table] = {name: {**shared, "dtype": dtype, "order": orders[name]} for name in "abd"}
    known["d"]["dtype"] = result_dtype(as_dtype(dtype))
    block = data.get("block")
    if isinstance(block, int):
        block = (block, block, block)
    elif block is not None:
        block = (*block, block[1])[:3]
    sizes = {"shape": [data[x] for x in "mnk"] if "m" in data else None, "block": block}
    for key, size in sizes.items():
        if size is not None:
            m, n, k = size
            known["a"][key], known["b"][key] = _stored(op_a, m, k), _stored(op_b, k, n)
            known["d"][key] = m, n
    made.put("a", known["a"])
    made.put("b", known["b"])
    if made.faults:
        return
    a, b = made.operands["a"], made.operands["b"]
    for key in sizes:
        sides = _stored(op_a, *getattr(a, key))[0], _stored(op_b, *getattr(b, key))[1]
        known["d"].setdefault(key, sides)
    made.put("d", known["d"])


def _scheme_layout(made: TableOperands, scheme: Scheme, op_a: Op, op_b: Op) -> None:
    """Make A, B and D of a product in the layouts of a scheme, in any mix of memory orders."""
    data = made.data
    orders = dict(zip("abd", data.get("order", "C") * 3, strict=False))
    turned = {name: orders[name] != orders["d"] for name in "abd"}  # made in D's order, then transposed
    a, b, d = scheme_operands(
        scheme, data["m"], data["n"], data["k"], data["nranks"],
        _FLIPPED[op_a] if turned["a"] else op_a, _FLIPPED[op_b] if turned["b"] else op_b,
        dtype=data.get("dtype", "float64"), order=orders["d"],
    )  # fmt: skip
    d = replace(d, dtype=result_dtype(d.dtype))
    for name, operand in (("a", a), ("b", b), ("d", d)):
        x = operand.T if turned[name] else operand
        made.put(name, {each: getattr(x, each) for each in x.__slots__})


def _stored(op: str, rows: int, cols: int) -> tuple[int, int]:
    """Return rows and columns of the stored matrix for those of op(matrix), or the reverse."""
    return (rows, cols) if op == "N" else (cols, rows)
