# SPDX-License-Identifier: Apache-2.0
"""What kernels are compiled for, and which files of compiled ones are used. NVRTC itself is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pblasmp.engines.gpu.kernels.compiler import loaded
from pblasmp.errors import StatusError
from tests.helpers.fakenvrtc import FakeNvrtc


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    """With a folder of its own, as CuPy's."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return FakeNvrtc(monkeypatch)


@pytest.mark.parametrize(
    ("capability", "target"), [(90, "sm_90"), (80, "sm_80"), (86, "compute_80"), (103, "compute_90")]
)
def test_kernels_are_for_the_gpu_that_there_is(nvrtc, capability, target):
    """Or, if NVRTC does not know it, for the newest before it, which the driver translates."""
    nvrtc.capability = capability
    loaded(0, "text", "kernel")
    assert nvrtc.targets == [target]


def test_a_text_is_compiled_once_on_a_machine(nvrtc, monkeypatch):
    """Not for another GPU, nor by another NVRTC, nor if files are not to be used."""
    changes = [{}, {}, {"capability": 80}, {"version": (13, 1)}, {}]
    for number, compiled in zip(range(5), (1, 1, 2, 3, 3), strict=True):
        vars(nvrtc).update(changes[number])
        loaded.cache_clear()  # as in a new process
        loaded(0, "text", "kernel")
        assert len(nvrtc.targets) == compiled
    assert nvrtc.modules[0] == nvrtc.modules[1]
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    for _ in range(2):
        loaded.cache_clear()
        loaded(0, "text", "kernel")
    assert len(nvrtc.targets) == 5


def test_files_that_others_may_write_are_not_loaded(nvrtc, tmp_path):
    loaded(0, "text", "kernel")
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(b"another's")
    file.chmod(0o666)
    loaded.cache_clear()
    loaded(0, "text", "kernel")
    assert b"another's" not in nvrtc.modules
    assert file.read_bytes() == nvrtc.modules[-1]


def test_what_nvrtc_says_is_said(nvrtc):
    nvrtc.error = "pblasmp.cu(3): error: expected a ;  "
    with pytest.raises(StatusError, match=r"^NVRTC: NVRTC_ERROR_COMPILATION: .*expected a ;$"):
        loaded(0, "text", "kernel")
