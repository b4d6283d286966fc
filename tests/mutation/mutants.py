# SPDX-License-Identifier: Apache-2.0
"""The faults: one place of a source file, changed. Messages and annotations are left alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """``source[start:end]``, in bytes, becomes ``text``; tests that run one of ``lines`` can see it."""

    start: int
    end: int
    text: str
    lines: range | None
    line: int
    before: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.text))
        return f"{self.line}: {before}  ->  {after}"


def mutants(source: bytes) -> list[Mutant]:
    """Return all mutants of a file that compile, in the order of their places."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for node, text, lines in _changes(ast.parse(source), None):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        mutant = Mutant(start, end, text, lines, node.lineno, source[start:end].decode())
        try:
            compile(mutant.apply(source), "mutant", "exec")
        except SyntaxError:
            continue
        found[start, end, text] = mutant
    return [found[key] for key in sorted(found)]


def _changes(node: ast.AST, lines: range | None) -> Iterator[tuple[ast.AST, str, range | None]]:
    """Yield ``(place, new text, lines of its statement)``; the lines are None outside of functions."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Assign) and _names(node) == ["__all__"]):
        return
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, ast.stmt) and lines is not None:
        body = getattr(node, "body", None)
        lines = range(node.lineno, max(body[0].lineno, node.lineno + 1) if body else node.end_lineno + 1)
    yield from ((node, text, lines) for text in _texts(node))
    test = getattr(node, "test", None) if isinstance(node, ast.If | ast.While | ast.IfExp) else None
    if test is not None and not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
        yield test, f"(not ({ast.unparse(test)}))", lines
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "decorator_list"):
            continue
        inside = isinstance(node, ast.FunctionDef | ast.Lambda) and name == "body"
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                of = range(child.lineno, child.end_lineno + 1) if inside and lines is None else lines
                yield from _changes(child, of)


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in place of a node."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield _text(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield _text(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _text(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield _text(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield str(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif isinstance(node, ast.Continue):
        yield "break"
    elif _may_go(node):
        yield "pass"


def _may_go(node: ast.AST) -> bool:
    """Whether a statement can be left out and its function still run."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return call or isinstance(node, ast.Raise | ast.AugAssign | ast.Delete)


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"
