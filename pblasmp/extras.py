# SPDX-License-Identifier: Apache-2.0
"""The command that installs one of pblasmp's extras, from wherever pblasmp itself was installed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import LibraryNotFoundError


@contextmanager
def required(what: str, extra: str) -> Iterator[None]:
    """Make the error of an import in this block say which extra has the missing module. Local.

    Args:
        what: what needs the module, as the subject of a sentence in the plural.
        extra: the extra that installs it.

    Raises:
        LibraryNotFoundError: the module is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise LibraryNotFoundError(f"{what} need {error.name}: {install(extra)}") from None


def install(extra: str) -> str:
    """Return the pip command that installs an extra: in a clone it names the clone, not a package index. Local."""
    editable, source = _source()
    command = f"pip install {'-e ' if editable else ''}{shlex.quote(f'{source}[{extra}]')}"
    return command if source == "pblasmp" else f"{command} (the extra pblasmp[{extra}])"


def _source() -> tuple[bool, str]:
    """Return whether pblasmp is an editable install, and the name or path from which pip installs it."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return True, str(clone)
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlsplit

    try:
        # PEP 610: pip writes this file for packages that do not come from an index.
        text = importlib.metadata.distribution("pblasmp").read_text("direct_url.json")
        url = urlsplit(json.loads(text or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False, "pblasmp"
    path = unquote(url.path)
    return False, path if url.scheme == "file" and Path(path).is_dir() else "pblasmp"
