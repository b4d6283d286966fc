# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ name every public name, and what they show at Python's prompt is so."""

from __future__ import annotations

import doctest
import importlib
import re

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
