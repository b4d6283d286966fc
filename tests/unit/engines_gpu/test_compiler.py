# SPDX-License-Identifier: Apache-2.0
"""What kernels are compiled for, and which files of compiled ones are used. NVRTC itself is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pblasmp.engines.gpu.kernels import compiler
from pblasmp.engines.gpu.kernels.compiler import loaded, ship
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


@pytest.fixture
def shipped(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Machine code of a text for two targets, compiled by CUDA 13."""
    monkeypatch.setattr(compiler, "SHIPPED", tmp_path)
    ship({"other": b"of another", "text": b"that came along"}, "sm_90", tmp_path)
    return ship({"text": b"of Hopper's own"}, "sm_90a", tmp_path)


def test_what_came_along_is_not_compiled(nvrtc, shipped, monkeypatch):
    """Nor is NVRTC asked anything, which takes as long as a small kernel."""
    monkeypatch.delattr(sys.modules["cuda.bindings"], "nvrtc")
    loaded(0, "text", "kernel")
    loaded(0, "text", "kernel", 0, "sm_90a")
    assert nvrtc.modules == [b"that came along", b"of Hopper's own"]
    assert not (shipped.parent / "kernels").exists()


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("the text has changed", {}),
        ("another GPU", {"capability": 80}),
        ("a driver of CUDA 12", {"driver_version": 12090}),
        ("the driver does not take it", {"refused": b"that came along"}),
        ("no archive", {}),
    ],
)
def test_what_does_not_fit_is_compiled(nvrtc, shipped, why, change):
    vars(nvrtc).update(change)
    if why == "no archive":
        shipped.with_name("sm_90.zip").write_bytes(b"broken off")
    loaded(0, "text;" if why == "the text has changed" else "text", "kernel")
    assert nvrtc.targets == [f"sm_{nvrtc.capability}"]
    assert nvrtc.modules != [b"that came along"]


def test_what_was_compiled_by_the_driver_s_cuda_or_an_older_one_is_taken(nvrtc, shipped):
    """A minor version does not matter: that of NVRTC may be newer."""
    nvrtc.version = (13, 5)
    ship({"text": b"by CUDA 13.5"}, "sm_90", shipped.parent)
    loaded(0, "text", "kernel")
    nvrtc.driver_version = 14000
    loaded.cache_clear()
    loaded(0, "text", "kernel")
    assert nvrtc.modules == [b"by CUDA 13.5"] * 2


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
