# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ name every public name, and what they show at Python's prompt is so."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

import pblasmp as pb
from pblasmp import pblas
from tests.helpers.docs import DOCS, PAGES, blocks

DOCUMENTED = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|py:data):: (?:pblasmp\.)?(\w+)$", re.MULTILINE
)


def test_every_public_name_is_in_the_reference():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    assert set(DOCUMENTED.findall("\n".join(pages))) == set(pb.__all__)


DOTTED = re.compile(r"^\.\. auto(?:class|function|exception):: pblasmp\.([\w.]+)$", re.MULTILINE)

FRESH = """
import importlib, operator, sys
for name in sys.argv[1:]:
    for module in [each for each in sys.modules if each.partition(".")[0] == "pblasmp"]:
        del sys.modules[module]
    try:
        operator.attrgetter(name)(importlib.import_module("pblasmp"))
    except AttributeError as error:
        print(error)
"""


def missing(*names: str) -> list[str]:
    """What a process that has only imported pblasmp says of each of these attributes that it lacks."""
    command = [sys.executable, "-c", FRESH, *names]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_what_the_reference_names_is_there_before_anything_else_was_imported():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    names = {name for name in DOTTED.findall("\n".join(pages)) if not name.startswith(("torch.", "engines."))}
    assert {"layout.files.load_grid", "pblas.pdgemm", "Context"} <= names
    assert missing(*sorted(names), "layout", "pblas", "tensor_parallel", "testing", "errors") == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_layers_are_there_before_anything_else_was_imported():
    assert missing("torch.ColumnParallelLinear") == []


def test_what_does_not_exist_is_an_attribute_error():
    assert missing("nothing", "layout.nothing", "__main__") == [
        "module 'pblasmp' has no attribute 'nothing'",
        "module 'pblasmp.layout' has no attribute 'nothing'",
        "module 'pblasmp' has no attribute '__main__'",
    ]


def test_every_name_of_pblas_is_found_by_search(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    generate = importlib.import_module("generate")
    assert set(re.findall(r"`(p[sdcz]\w+)`", generate.pblas())) == {
        name for name in pblas.__all__ if name[0] == "p"
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "pycon")], ids=lambda page: page.stem
)
def test_prompts(page):
    text = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)
