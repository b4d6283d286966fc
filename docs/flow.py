# SPDX-License-Identifier: Apache-2.0
"""Draws the way of a direct call as boxes and arrows, with the file in which each step is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

CALL, ENGINE, END = "#e8f1fa", "#fdf3dc", "#e6f4ea"
"""Fills of boxes, as in pictures/call-path.svg."""


class Box(NamedTuple):
    """A step: the place and size of its box in pixels, its title, what happens, where, and the fill."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...]
    file: str
    fill: str

    @property
    def height(self) -> int:
        """The height: a line for the title, each line of text, and the file."""
        return 30 + 18 * (len(self.lines) + 1)

    def draw(self) -> str:
        """Return the box with its text."""
        middle = self.x + self.width // 2
        size = f'width="{self.width}" height="{self.height}"'
        rows = [
            f'<rect x="{self.x}" y="{self.y}" {size} rx="4" fill="{self.fill}" stroke="#444444"/>',
            f'<text x="{middle}" y="{self.y + 20}" font-weight="bold">{escape(self.title)}</text>',
        ]
        for i, line in enumerate(self.lines, 1):
            rows.append(f'<text x="{middle}" y="{self.y + 20 + 18 * i}">{escape(line)}</text>')
        at = self.y + 20 + 18 * (len(self.lines) + 1)
        rows.append(f'<text x="{middle}" y="{at}" font-size="11" fill="#6b6b6b">{escape(self.file)}</text>')
        return "\n".join(rows)


DIRECT_CALL = {
    "call": Box(
        30, 12, 350, "a @ b, pb.blas.trsm(a, b), pdgemm(…)", ("a transposed view becomes an op: no copy",),
        "pblasmp/matrix/products.py", CALL,
    ),
    "glance": Box(
        30, 116, 350, "glance", ("legal, and in one of BLAS's types?", "the tables of routines say it"),
        "pblasmp/runtime/reading.py", CALL,
    ),
    "operands": Box(
        30, 238, 350, "operands", ("a sub-matrix is a few integers,", "so a new one costs no more than a known one"),
        "pblasmp/engines/direct/sub_matrix.py", CALL,
    ),
    "vote": Box(
        30, 360, 350, "vote", ("the ranks compare one number:", "in shared memory, or with one message per node"),
        "pblasmp/_core/meet.c", CALL,
    ),
    "closer": Box(
        470, 116, 270, "look closer", ("a fault, an unusual argument,", "or votes that differ", "step 2: reading"),
        "pblasmp/runtime/planned.py", CALL,
    ),
    "host": Box(
        30, 482, 350, "CPU ranks", ("the compiled core copies what others need,", "and calls the BLAS"),
        "pblasmp/engines/host/direct/", ENGINE,
    ),
    "gpu": Box(
        420, 482, 320, "GPUs", ("a kernel writes into the peers' memory,", "cuBLAS multiplies"),
        "pblasmp/engines/gpu/direct/", ENGINE,
    ),
    "result": Box(
        225, 604, 350, "result", ("a new matrix, or out=",), "pblasmp/matrix/distributed.py", END
    ),
}  # fmt: skip
"""The steps of a direct call by name."""

ARROWS = (
    ("call", "glance"), ("glance", "operands"), ("operands", "vote"), ("vote", "host"), ("vote", "gpu"),
    ("host", "result"), ("gpu", "result"),
)  # fmt: skip
"""From which step to which a call goes; those to "look closer" are dashed, and drawn apart."""


def direct_call() -> str:
    """Return the picture as SVG."""
    paths = []
    for start, end in ARROWS:
        a, b = DIRECT_CALL[start], DIRECT_CALL[end]
        x0, x1 = a.x + a.width // 2, b.x + b.width // 2
        if start == "vote" and end == "gpu":
            x0 = a.x + a.width - 60
        if end == "result":
            x1 += -80 if start == "host" else 80
        paths.append(f'<path d="M{x0},{a.y + a.height} L{x1},{b.y - 2}" marker-end="url(#arrow)"/>')
    closer = DIRECT_CALL["closer"]
    for start in ("glance", "vote"):
        a = DIRECT_CALL[start]
        y, x = a.y + a.height // 2, closer.x + closer.width // 2
        to = f"H{closer.x - 2}" if start == "glance" else f"H{x} V{closer.y + closer.height + 2}"
        paths.append(f'<path d="M{a.x + a.width},{y} {to}" stroke-dasharray="5 4" marker-end="url(#arrow)"/>')
    last = DIRECT_CALL["result"]
    height = last.y + last.height + 12
    boxes = "\n".join(box.draw() for box in DIRECT_CALL.values())
    return _PICTURE.format(height=height, paths="\n".join(paths), boxes=boxes)


_PICTURE = """\
<?xml version="1.0" encoding="utf-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="770" height="{height}" viewBox="0 0 770 {height}" role="img"
 font-family="sans-serif" font-size="12">
<title>What a direct call does, from Python to the result</title>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#444444"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
<g stroke="#444444" fill="none">
{paths}
</g>
<g text-anchor="middle" fill="#222222">
{boxes}
</g>
</svg>
"""


def write(directory: Path) -> None:
    """Write the picture."""
    (directory / "direct-call.svg").write_text(direct_call(), encoding="utf-8")
