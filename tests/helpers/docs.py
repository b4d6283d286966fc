# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ as tests see them: fenced blocks, and output with "..." in it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("internals/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language on a page, in order."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def occurs(shown: str, printed: str) -> bool:
    """Say whether what a page shows was printed, somewhere; "..." stands for anything, and line ends may be blank."""
    lines = [re.escape(line.rstrip()).replace(re.escape("..."), ".*") for line in shown.strip().splitlines()]
    printed = "\n".join(line.rstrip() for line in printed.splitlines())
    pattern = "\n".join(lines)
    return re.search(rf"^{pattern}$", printed, re.MULTILINE | re.DOTALL) is not None
