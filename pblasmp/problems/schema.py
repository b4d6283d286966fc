# SPDX-License-Identifier: Apache-2.0
"""The format of descriptor files: which keys a table has, and what each value must be.

The JSON schemas in descriptors/ are made from these types: ``python -m pblasmp.problems.schema``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from ..dtypes import ELEMENT_TYPES
from ..errors import LayoutError, faults_text, required, short_repr
from ..layout.factor_problem import FactorRoutine
from ..layout.grid import LARGEST
from ..layout.routines import ROUTINES
from ..layout.schemes import FORMS, SCHEMES

with required("descriptor files", "cli"):
    from pydantic import Field, Strict, TypeAdapter
    from typing_extensions import Required, TypedDict, get_type_hints

Table = dict[str, Any]

_COMPLETE = ("shape", "block", "grid")


def _names(known: Iterable[str]) -> Any:
    """Return the type of a text that must be one of some names."""
    names: list[Any] = [*known]
    return Field(
        pattern=f"^({'|'.join(names)})$",
        description=f"one of {', '.join(names)}",
        json_schema_extra={"enum": names},
    )


Text = Annotated[str, Strict(), Field(min_length=1, description="a text")]
Extent = Annotated[int, Strict(), Field(ge=0, le=LARGEST, description="an integer, at least 0")]
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST, description="an integer, at least 1")]
Pair = Annotated[tuple[Extent, Extent], Field(description="two integers, each at least 0")]
_Float = Annotated[float, Strict()]
Number = Annotated[_Float | tuple[_Float, _Float], Field(description="a number, or [real, imaginary]")]
DType = Annotated[str, Strict(), _names(ELEMENT_TYPES)]
GridText = Annotated[str, Strict(), Field(pattern="^[1-9][0-9]{0,99}x[1-9][0-9]{0,99}(-row|-col)?$")]
Op = Annotated[Literal["N", "T", "C"], Field(description='"N", "T" or "C"')]
Side = Annotated[Literal["L", "R"], Field(description='"L" or "R"')]
Uplo = Annotated[Literal["L", "U"], Field(description='"L" or "U"')]
Diag = Annotated[Literal["N", "U"], Field(description='"N" or "U"')]
MemoryOrder = Annotated[Literal["C", "F"], Field(description='"C" or "F"')]
Ops = Annotated[
    str, Strict(), Field(pattern="^[NTC]{2}$", description="two letters of N, T and C, for A and B")
]
Orders = Annotated[
    str,
    Strict(),
    Field(
        pattern="^([CF]|[CF]{3})$",
        description='"C", "F", or three of these letters for A, B and D',
    ),
]


Shares = Annotated[
    list[Extent], Field(min_length=1, description="a list of integers, one for each rank, each at least 0")
]
Flag = Annotated[bool, Strict(), Field(description="true or false")]
Arrays = Annotated[str, Strict(), Field(pattern="^(x|w|xw)$", description='"x", "w" or "xw"')]


class GridTable(TypedDict, total=False):
    """A process grid: a file of grids/, or the table in a problem."""

    nprow: Required[Count]
    npcol: Required[Count]
    order: Annotated[Literal["row", "col"], Field(description='"row" or "col"')]
    description: Text


GridValue = Annotated[
    GridText | tuple[Count, Count] | GridTable,
    Field(description='a grid like "2x3", "2x3-col" or [2, 3], or a table with nprow and npcol'),
]


class OperandTable(TypedDict, total=False):
    """One matrix. Keys that it lacks are taken from the top of the file."""

    shape: Annotated[Pair, Field(title="rows and columns as stored, before op")]
    window: Annotated[
        tuple[Pair, Pair],
        Field(
            title="the operand is the sub-matrix [i0:i1, j0:j1] of this matrix",
            description="[[i0, i1], [j0, j1]], each at least 0",
        ),
    ]
    block: Annotated[
        Count | tuple[Count, Count],
        Field(
            title="rows and columns of a block, or one for both",
            description="an integer, or two, each at least 1",
        ),
    ]
    source: Annotated[Pair, Field(title="process row and column of the first block")]
    grid: GridValue
    dtype: DType
    order: MemoryOrder
    lead: Annotated[Pair, Field(title="rows and columns of the first block that come before the matrix")]
    ld: Annotated[Count, Field(title="leading dimension of padded local arrays, in elements")]


class RowBytesTable(TypedDict, total=False):
    """By array, how many bytes its rows are apart on each rank."""

    x: Shares
    w: Shares
    c: Shares
    out: Shares


class Raises(TypedDict):
    """In a file of invalid/: the error, the step that notices it, and a part of the text of each fault."""

    at: Annotated[
        Literal["structure", "values", "rules"], Field(description='"structure", "values" or "rules"')
    ]
    error: Text
    faults: Annotated[list[Text], Field(min_length=1, description="a list of texts")]


class _Titled(TypedDict):
    title: Annotated[Text, Field(title="what the problem shows, in one line")]


class ProblemTable(_Titled, total=False):
    """A distributed matrix product D = alpha op(A) op(B) + beta C. README.md explains the format."""

    description: Text
    scheme: Annotated[str, Strict(), _names(SCHEMES)]
    ops: Annotated[Ops, Field(title="op(A) and op(B): N as it is, T transposed, C conjugate-transposed")]
    m: Annotated[Extent, Field(title="rows of op(A) and D")]
    n: Annotated[Extent, Field(title="columns of op(B) and D")]
    k: Annotated[Extent, Field(title="columns of op(A), rows of op(B)")]
    nranks: Annotated[Count, Field(title="of a scheme, or for the squarest grid of so many")]
    grid: GridValue
    block: Annotated[
        Count | Annotated[list[Count], Field(min_length=2, max_length=3)],
        Field(
            title="block size of m, n and k, or one for all",
            description="an integer, two for m and n, or three for m, n and k, each at least 1",
        ),
    ]
    source: Pair
    dtype: DType
    order: Annotated[Orders, Field(title="memory order of all, or of A, B and D; by default C")]
    alpha: Number
    beta: Number
    a: OperandTable
    b: OperandTable
    d: OperandTable
    c: Annotated[OperandTable, Field(title="like d unless something else is said")]
    raises: Raises


class RoutineTable(_Titled, total=False):
    """A level-3 routine other than GEMM. README.md explains the format."""

    routine: Required[Annotated[str, Strict(), _names(ROUTINES)]]
    a: Required[OperandTable]
    d: Required[OperandTable]
    description: Text
    side: Side
    uplo: Uplo
    op_a: Op
    diag: Diag
    grid: GridValue
    block: Annotated[Count | tuple[Count, Count], Field(description="an integer, or two, each at least 1")]
    source: Pair
    dtype: DType
    order: MemoryOrder
    b: OperandTable
    c: OperandTable


class FactorTable(_Titled, total=False):
    """A factorization, or what is solved with one. README.md explains the format."""

    factorization: Required[Annotated[str, Strict(), _names(get_args(FactorRoutine))]]
    a: Required[OperandTable]
    description: Text
    op: Op
    factored: Annotated[Flag, Field(title="A has its factors already")]
    inverse: Annotated[Flag, Field(title="the right-hand sides are the identity")]
    unit: Annotated[Flag, Field(title="the diagonal of a triangle is taken as ones")]
    conjugate: Annotated[Flag, Field(title="the conjugates of A and of its factors are meant")]
    subset: Annotated[Pair, Field(title="the first and the last of the eigenvalues that are wanted")]
    grid: GridValue
    block: Annotated[Count | tuple[Count, Count], Field(description="an integer, or two, each at least 1")]
    source: Pair
    dtype: DType
    order: MemoryOrder
    b: OperandTable
    c: Annotated[OperandTable, Field(title="the factors")]
    d: Annotated[OperandTable, Field(title="the solution, the inverse, or the vectors")]


class ParallelTable(_Titled, total=False):
    """A tensor-parallel product. README.md explains the format."""

    form: Required[Annotated[str, Strict(), _names(FORMS)]]
    tokens: Required[Annotated[Shares, Field(title="rows of X on each rank")]]
    inputs: Required[Annotated[Shares, Field(title="columns of X on each rank")]]
    outputs: Required[Annotated[Shares, Field(title="outputs of each rank's weights")]]
    description: Text
    rows: Annotated[Shares, Field(title="rows of the result on each rank")]
    dtype: DType
    w_dtype: DType
    out_dtype: DType
    c_dtype: DType
    outputs_first: Annotated[Flag, Field(title="W is outputs x inputs in memory")]
    inner: Annotated[Extent, Field(title="tokens in each index of X's first dimension")]
    return_gathered: Annotated[Flag, Field(title="the gathered X is returned as well")]
    row_bytes: RowBytesTable
    turned: Annotated[Flag, Field(title="the arrays are those of the transposed product")]
    transposed: Annotated[Arrays, Field(title="operands that are transposed first")]
    conjugated: Annotated[Arrays, Field(title="operands that are conjugated first")]


# --- checking ---


def raise_faults(what: str, faults: list[str]) -> None:
    """Raise LayoutError if there are faults of ``what``. Local."""
    if faults:
        raise LayoutError(faults_text(f"this {what}", faults))


def table_faults(
    data: object, table: type, prefix: str = "", *, needs: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> list[str]:
    """Return what keeps ``data`` from being a table of this type, each key by itself, with a prefix. Local.

    ``needs`` are keys that are required although the type does not require them, ``without`` the other way round.
    """
    if not isinstance(data, dict):
        return [f"{prefix.rstrip('.') or 'data'}: expected a table, got {short_repr(data)}"]
    keys, checkers, always = _keys(table)
    found = []
    for key, value in data.items():
        name = f"{prefix}{key if isinstance(key, str) else short_repr(key)}"
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, 0.7) if isinstance(key, str) else []
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(keys)}"
            found.append(f"{name}: unknown key: {hint}")
        elif (inner := _table_in(keys[key])) and isinstance(value, dict):
            found += table_faults(value, inner, f"{name}.")
        elif not _holds(value, checkers[key]):
            found.append(f"{name}: expected {_expected(keys[key])}, got {short_repr(value)}")
    required = [key for key in keys if key in always or key in needs]
    return found + [
        f"{prefix}{key}: missing, expected {_expected(keys[key])}"
        for key in required
        if key not in data and key not in without
    ]


@lru_cache
def _keys(table: type) -> tuple[dict[str, Any], dict[str, TypeAdapter[Any]], list[str]]:
    """Return the type and the checker of each key of a table, and the keys that it requires."""
    kinds = get_type_hints(table, include_extras=True)
    always: set[str] = set(table.__required_keys__)  # type: ignore[attr-defined]
    for key, kind in kinds.items():
        if getattr(kind, "__origin__", None) is Required:  # unseen while annotations are texts
            always.add(key)
            kinds[key] = get_args(kind)[0]
    return (
        kinds,
        {key: TypeAdapter(kind) for key, kind in kinds.items()},
        [key for key in kinds if key in always],
    )


def _holds(value: object, checker: TypeAdapter[Any]) -> bool:
    try:
        json.dumps(value)  # pydantic would take a set or an iterator for a list
        checker.validate_python(value)
    except (TypeError, ValueError, RecursionError):  # pydantic's ValidationError is a ValueError
        return False
    return True


def _table_in(kind: Any) -> type | None:
    """Return the type of the table that a value of some type may be, if any."""
    bare = kind.__origin__ if hasattr(kind, "__metadata__") else kind
    return next((each for each in (bare, *get_args(bare)) if hasattr(each, "__required_keys__")), None)


def _expected(kind: Any) -> str:
    """Return in words what a value must be."""
    said = (getattr(each, "description", None) for each in reversed(getattr(kind, "__metadata__", ())))
    return next(filter(None, said), "a table")


# --- how the keys of a table depend on each other ---


def is_complete(table: Table) -> bool:
    """Return whether the table of a matrix alone says where every element is. Local."""
    return all(key in table for key in _COMPLETE)


def _of_product(data: Table) -> Iterator[str]:
    """Yield how the keys of a product contradict each other."""
    sizes = [key for key in "mnk" if key in data]
    scheme = data.get("scheme", "gemm")

    def in_both(key: str) -> bool:
        return all(key in data.get(name, ()) for name in "ab")

    if sizes and len(sizes) < 3:
        yield f"{', '.join(sizes)}: m, n and k must be given together"
    if "c" not in data and data.get("beta", 0) not in (0, [0, 0], (0, 0)):
        yield "beta: there is no C to scale: expected a table [c], or beta = 0"
    if not sizes and "nranks" not in data and all(is_complete(data.get(name, {})) for name in "abd"):
        return
    if scheme != "gemm":
        follow = f"the layouts of scheme {scheme!r} follow from m, n, k and nranks"
        if not sizes:
            yield f"m: missing: {follow}"
        if "nranks" not in data:
            yield f"nranks: missing: {follow}"
        yield from (
            f"{key}: not expected here: {follow}" for key in ("grid", "block", "source") if key in data
        )
        return
    if not (sizes or in_both("shape")):
        yield "m, n, k: missing, expected these or a.shape and b.shape"
    if not ("block" in data or in_both("block")):
        yield "block: missing, expected this or a.block and b.block"
    if ("grid" in data) == ("nranks" in data):
        yield f"grid, nranks: expected one of them, got {'both' if 'grid' in data else 'neither'}"


def _of_routine(data: Table) -> Iterator[str]:
    """Yield what the matrices of a routine or a factorization lack."""
    for name in "abcd":
        known = data.get(name, _COMPLETE)
        for key in _COMPLETE:
            if key not in known and (key == "shape" or key not in data):
                yield f"{name}.{key}: missing"


KINDS: dict[str, tuple[type, Callable[[Table], Iterable[str]]]] = {
    "routine": (RoutineTable, _of_routine),
    "factorization": (FactorTable, _of_routine),
    "form": (ParallelTable, lambda _: ()),
    "": (ProblemTable, _of_product),
}
"""The table of each kind of problem, and what yields contradictions in it, by the key that says which one it is."""


def kind_of(data: Table) -> str:
    """Return which of ``KINDS`` a table is meant to be. Local."""
    return next((kind for kind in KINDS if kind in data), "")


def problem_faults(data: object, kind: str = "", *, titled: bool = True) -> list[str]:
    """Return what keeps ``data`` from being a problem of a kind of ``KINDS``, whatever its values are. Local.

    They are the faults of its keys, or else how these contradict each other. If ``titled``, it must have a title.
    """
    table, contradictions = KINDS[kind]
    found = table_faults(data, table, without=() if titled else ("title",))
    return found or [*contradictions(cast(Table, data))]


def json_schemas() -> dict[str, str]:
    """Return the text of each JSON schema by the name of its file: of keys and values, not of how they fit. Local."""
    names = {"": "problem", "form": "parallel"}
    files = {f"{names.get(kind, kind)}.schema.json": table for kind, (table, _) in KINDS.items()}
    return {name: _json_schema(name, table) for name, table in files.items()}


def _json_schema(name: str, table: type) -> str:
    """Return the text of a JSON schema of a type of table. Local."""
    schema = TypeAdapter(table).json_schema()
    parts = schema.pop("$defs")
    for each in (schema, *parts.values()):
        del each["title"]
        each["additionalProperties"] = False
        for key, value in each["properties"].items():
            if value.get("title") == key.replace("_", " ").title():  # Pydantic's own
                del value["title"]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name}
    return json.dumps({**head, **schema, "$defs": parts}, indent=2) + "\n"


if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "descriptors"
    for file, text in json_schemas().items():
        (folder / file).write_text(text)
