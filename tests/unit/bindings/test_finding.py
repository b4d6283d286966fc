# SPDX-License-Identifier: Apache-2.0
"""Where the library is looked for, and what is said when it or something it needs is missing."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from pblasmp.bindings import Library, SolverLibrary
from pblasmp.bindings.c_library import ENVIRONMENT
from pblasmp.errors import LibraryNotFoundError, StatusError, UnsupportedError, install
from tests.helpers.recorder import build


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the variable, nor cuda.pathfinder, nor an installed wheel."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(sys, "path", [])


@pytest.fixture
def pathfinder(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | Exception]:
    """What a cuda.pathfinder finds: names to paths, or to what it raises."""
    found: dict[str, str | Exception] = {}
    module = types.ModuleType("cuda.pathfinder")

    class DynamicLibNotFoundError(RuntimeError):
        pass

    def load_nvidia_dynamic_lib(name: str) -> types.SimpleNamespace:
        result = found.get(name, DynamicLibNotFoundError(f'Failure finding "{name}"'))
        if isinstance(result, Exception):
            raise result
        ctypes.CDLL(result)
        return types.SimpleNamespace(abs_path=result)

    module.DynamicLibNotFoundError = DynamicLibNotFoundError  # type: ignore[attr-defined]
    module.load_nvidia_dynamic_lib = load_nvidia_dynamic_lib  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)
    return found


def install_wheel(site: Path, cuda: str, version: int) -> str:
    folder = site / "nvidia" / "cublasmp" / cuda / "lib"
    folder.mkdir(parents=True)
    info = site / f"nvidia_cublasmp_{cuda}-0.{version // 100}.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cublasmp-{cuda}\nVersion: 0.1\n")
    return build(folder, version)


def needing(directory: Path, soname: str) -> tuple[str, str]:
    """Build a stand-in that needs the library ``soname``, unknown to the loader; return both paths."""
    hidden, lib = directory / "hidden", directory / "lib"
    hidden.mkdir()
    lib.mkdir()
    needed = str(hidden / soname)
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}", "-o", needed], check=True
    )
    return build(lib, flags=["-Wl,--no-as-needed", needed]), needed


def test_variable_names_a_file_or_its_folder(
    stand_in: Callable[..., str], pathfinder: dict[str, str | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    pathfinder["cublasmp"] = stand_in(900)
    path = stand_in(1000)
    for value in (path, str(Path(path).parent)):
        monkeypatch.setenv(ENVIRONMENT, value)
        assert (Library().version, Library().path) == (1000, path)
    assert Library(stand_in(700)).version == 700


def test_relative_path(stand_in: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(stand_in(1000))
    monkeypatch.chdir(path.parent)
    assert Library(path.name).path == str(path)


def test_variable_names_nothing(
    stand_in: Callable[..., str], pathfinder: dict[str, str | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    pathfinder["cublasmp"] = stand_in(1000)
    monkeypatch.setenv(ENVIRONMENT, "/nowhere/libcublasmp.so.0")
    with pytest.raises(LibraryNotFoundError, match=f"no cuBLASMp at /nowhere/.*, which {ENVIRONMENT} names"):
        Library()


def test_pathfinder_comes_before_wheels(
    stand_in: Callable[..., str],
    pathfinder: dict[str, str | Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pathfinder["cublasmp"] = stand_in(900)
    install_wheel(tmp_path, "cu13", 800)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert Library().path == pathfinder["cublasmp"]


@pytest.mark.parametrize("finder", ["absent", "asks for NVSHMEM", "finds one that does not open"])
@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_wheel(
    finder: str, cuda: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if finder != "absent":
        found = request.getfixturevalue("pathfinder")
        if finder == "finds one that does not open":
            found["cublasmp"] = RuntimeError("Failed to dlopen x/libcublasmp.so.0: libnvshmem_host.so.3: no")
    path = install_wheel(tmp_path, cuda, 800)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert Library().path == path


def test_system_loader(stand_in: Callable[..., str]) -> None:
    path = stand_in(1000)
    code = "import sys; sys.modules['cuda.pathfinder'] = None; from pblasmp.bindings import Library"
    code += "; print(Library().path)"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(path).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == path


def test_no_library() -> None:
    with pytest.raises(LibraryNotFoundError, match=rf"{re.escape(install('cu13'))}.*set {ENVIRONMENT}"):
        Library()


@pytest.mark.parametrize(
    ("soname", "name"),
    [
        ("libnccl.so.90", "nccl"),
        ("libcublas.so.90", "cublas"),
        ("libcublasLt.so.90", "cublasLt"),
        ("libnvshmem_host.so.90", "nvshmem_host"),
    ],
)
def test_needed_library_through_pathfinder(
    soname: str, name: str, pathfinder: dict[str, str | Exception], tmp_path: Path
) -> None:
    path, needed = needing(tmp_path, soname)
    with pytest.raises(LibraryNotFoundError, match=rf"needs {soname}.*{re.escape(install('cu13'))}"):
        Library(path)
    pathfinder[name] = needed
    assert Library(path).path == path


def test_the_nccl_of_pathfinder_is_loaded_first(
    stand_in: Callable[..., str], pathfinder: dict[str, str | Exception], tmp_path: Path
) -> None:
    """So that cuBLASMp and nccl4py have the same one, whatever else the loader would find."""
    _, pathfinder["nccl"] = needing(tmp_path, "libnccl.so.92")
    Library(stand_in(1000))
    assert str(pathfinder["nccl"]) in Path("/proc/self/maps").read_text()


def test_needed_library_of_another_version(pathfinder: dict[str, str | Exception], tmp_path: Path) -> None:
    path, _ = needing(tmp_path, "libcublas.so.0.12")
    (tmp_path / "other").mkdir()
    _, pathfinder["cublas"] = needing(tmp_path / "other", "libcublas.so.91")
    with pytest.raises(LibraryNotFoundError, match=rf"needs libcublas.so.0.12.*{re.escape(install('cu12'))}"):
        Library(path)


def test_no_driver(tmp_path: Path) -> None:
    path, _ = needing(tmp_path, "libcuda.so.90")
    with pytest.raises(LibraryNotFoundError, match=r"needs an NVIDIA GPU with its driver; libcuda\.so\.90"):
        Library(path)


def test_what_a_found_library_lacks_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install_wheel(tmp_path, "cu13", 900)
    (tmp_path / "broken").mkdir()
    Path(needing(tmp_path / "broken", "libcuda.so.90")[0]).replace(path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(LibraryNotFoundError, match="driver"):
        Library()


def test_cal_library_of_old_versions(tmp_path: Path) -> None:
    path, _ = needing(tmp_path, "libcal.so.90")
    with pytest.raises(UnsupportedError, match=r"0\.4 and older are not supported"):
        Library(path)


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "libcublasmp.so.0").write_text("not a library" * 100)
    with pytest.raises(LibraryNotFoundError, match=r"cannot be opened.*invalid ELF header"):
        Library(str(tmp_path))


def test_other_library() -> None:
    libc = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    with pytest.raises(LibraryNotFoundError, match="is not cuBLASMp: it has no cublasMpGetVersion"):
        Library(libc)


def solver_wheel(site: Path, version: int) -> str:
    """Install a cuSOLVERMp that knows its version, and whose other functions fail."""
    folder = site / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    info = site / "nvidia_cusolvermp_cu13-0.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cusolvermp-cu13\nVersion: 0.9.1\n")
    path = folder / "libcusolverMp.so.0"
    source = f"""
int cusolverMpGetVersion(void* handle, int* version) {{ *version = {version}; return handle ? 0 : 3; }}
int cusolverMpSetStream(void* handle, void* stream) {{ return 7; }}
"""
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return str(path)


def test_cusolvermp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., str]) -> None:
    monkeypatch.delenv("PBLASMP_CUSOLVERMP", raising=False)
    with pytest.raises(LibraryNotFoundError) as caught:
        SolverLibrary()
    for part in ("cuSOLVERMp (libcusolverMp.so.0) was not found", install("solver"), "PBLASMP_CUSOLVERMP"):
        assert part in str(caught.value)
    path = solver_wheel(tmp_path, 901)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    library = SolverLibrary()
    assert library.path == path
    library.check_version(1)
    assert (library.version, repr(library)) == (901, f"<cuSOLVERMp 0.9.1 at {path}>")
    with pytest.raises(StatusError, match=r"CUSOLVER_STATUS_INVALID_VALUE \(3\).*CUSOLVERMP_LOG_LEVEL=5"):
        library.check_version(0)
    with pytest.raises(
        StatusError, match=r"cusolverMpSetStream returned CUSOLVER_STATUS_INTERNAL_ERROR \(7\)"
    ):
        library.cusolverMpSetStream(1, 0)
    with pytest.raises(
        UnsupportedError, match=r"cusolverMpGeqrf is in cuSOLVERMp since 0.8.0, but .* does not"
    ):
        library.cusolverMpGeqrf()
    with pytest.raises(AttributeError, match="cuSOLVERMp has no function"):
        library.cusolverMpPolar()
    old = solver_wheel(tmp_path / "old", 702)
    with pytest.raises(UnsupportedError, match=r"it needs cuSOLVERMp 0.8.0 or newer, found 0.7.2 at"):
        SolverLibrary(old).check_version(1)
    monkeypatch.setenv("PBLASMP_CUSOLVERMP", stand_in(1000))
    with pytest.raises(LibraryNotFoundError, match="is not cuSOLVERMp: it has no cusolverMpGetVersion"):
        SolverLibrary()
