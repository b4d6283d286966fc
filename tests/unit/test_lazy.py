# SPDX-License-Identifier: Apache-2.0
"""Modules that are imported on first use: one that is missing is told from one that needs another."""

import pytest

from pblasmp.lazy import submodule


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "package_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "right.py").write_text("found = 1")
    (folder / "_beside_it.py").touch()
    (folder / "needy.py").write_text("import nothing_has_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_a_module_is_imported(package):
    assert submodule(package, "right").found == 1


@pytest.mark.parametrize("name", ["other", "_beside_it"])
def test_a_name_of_no_module(package, name):
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute '{name}'$"):
        submodule(package, name)


def test_a_module_that_needs_another(package):
    with pytest.raises(ModuleNotFoundError, match="nothing_has_this_name"):
        submodule(package, "needy")
