# SPDX-License-Identifier: Apache-2.0
"""``pblasmp.engines.host.mpi_libraries``: what is said of a library that the loader cannot open."""

import re
import shutil
import subprocess

import pytest

from pblasmp.engines.host.mpi_libraries import _opened
from pblasmp.errors import LibraryNotFoundError


def compiled(path, *needs):
    """A library without functions that needs others."""
    options = f"-Wl,--no-as-needed,-soname,{path.name}"
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", "-o", path, options, "-x", "none", *needs], check=True
    )
    return path


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_what_a_library_needs_is_found_beside_it_or_named(tmp_path):
    needed = compiled(tmp_path / "libneeded-by-none.so")
    library = compiled(tmp_path / "libelpa.so.19", f"-L{tmp_path}", f"-l:{needed.name}")
    needed.rename(tmp_path / "elsewhere.so")
    words = f"{library} cannot be opened: {needed.name}: cannot open shared object file"
    with pytest.raises(LibraryNotFoundError, match=re.escape(words)) as raised:
        _opened(library)
    assert str(raised.value).endswith(": add the folder where that is to LD_LIBRARY_PATH")
    (tmp_path / "elsewhere.so").rename(needed)
    assert _opened(library)


def test_what_is_no_library_is_named(tmp_path):
    path = tmp_path / "libscalapack.so"
    path.write_text("no library")
    with pytest.raises(LibraryNotFoundError, match=re.escape(f"{path} cannot be opened: {path}: ")) as raised:
        _opened(path)
    assert "LD_LIBRARY_PATH" not in str(raised.value)
