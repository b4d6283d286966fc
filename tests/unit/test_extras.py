# SPDX-License-Identifier: Apache-2.0
"""The command that installs an extra works where pblasmp came from: a clone, a local wheel, an index."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from pblasmp import extras
from tests.helpers.mpi import ROOT


def test_in_a_clone():
    assert extras.install("cu13") == f"pip install -e '{ROOT}[cu13]' (the extra pblasmp[cu13])"


class Installed:
    """A distribution as pip leaves it."""

    def __init__(self, url):
        self.url = url

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.url and json.dumps({"url": self.url})


@pytest.mark.parametrize("kind", ["index", "local", "gone", "git", "none"])
def test_elsewhere(monkeypatch, tmp_path, kind):
    source = tmp_path / "a clone"
    source.mkdir()
    url = {
        "local": source.as_uri(),
        "gone": (tmp_path / "gone").as_uri(),
        "git": "https://x.org/pblasmp",
    }.get(kind)

    def distribution(name):
        if kind == "none":
            raise importlib.metadata.PackageNotFoundError(name)
        return Installed(url)

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "pblasmp" / "extras.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    expected = (
        f"pip install '{source}[mpi]' (the extra pblasmp[mpi])"
        if kind == "local"
        else "pip install 'pblasmp[mpi]'"
    )
    assert extras.install("mpi") == expected
