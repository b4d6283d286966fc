# SPDX-License-Identifier: Apache-2.0
"""The compiled core (_core/__init__.py): when it is there, why it is not; C is in tests/core/."""

from __future__ import annotations

import ctypes
import importlib.util
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

import pblasmp as pb
from pblasmp import _core
from pblasmp._core import build, objects
from pblasmp.cli import doctor
from tests.helpers.sources import ROOT

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")


@needs_compiler
def test_where_there_is_a_compiler_there_is_the_core():
    """In a clone that was installed; after its sources have changed ``python pblasmp/_core/build.py`` does it again."""
    assert _core.why_not() == ""
    assert isinstance(_core.load(), _core.Core)


@needs_compiler
def test_python_lays_out_boards_and_messages_as_c_does(tmp_path):
    check, lines = tmp_path / "check.c", [f'#include "{ROOT}/pblasmp/_core/meet.h"', "#include <stddef.h>"]
    for name, room in (("board", _core.BoardState), ("post", _core.PostState), ("sheet", _core.SheetState)):
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(room)}, "");')
        for field, _ in room._fields_:
            member = "parcel" if field == "rest" else field
            lines.append(f'_Static_assert(offsetof({name}, {member}) == {getattr(room, field).offset}, "");')
    lines.append(f'_Static_assert(VALUES == {_core.VALUES} && VOTE == {_core.VOTE}, "");')
    check.write_text("\n".join(lines))
    assert not build.run([*build.compiler(), "-std=c11", "-fsyntax-only", str(check)])


@needs_compiler
def test_python_lays_out_a_launch_as_c_does(tmp_path):
    room = _core.LaunchState
    check = tmp_path / "check.c"
    check.write_text(
        f'#include "{ROOT}/pblasmp/_core/launch.h"\n#include <stddef.h>\n'
        f'_Static_assert(sizeof(launch) == {ctypes.sizeof(room)}, "");\n'
        + "".join(
            f'_Static_assert(offsetof(launch, {name}) == {getattr(room, name).offset}, "");\n'
            for name, _ in room._fields_
        )
        + "".join(
            f'_Static_assert({name} == {getattr(_core, name)}, "");\n'
            for name in ("QUEUED", "UNFIT_NOW", "LATE", "UNLIKE", "UNREADY", "FAILED")
        )
    )
    assert not build.run([*build.compiler(), "-std=c11", "-fsyntax-only", str(check)])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What is compiled need not be fast."""
    if build.compiler() is not None:
        monkeypatch.setenv("CC", f"{shlex.join(build.compiler())} -O0")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The library's path is one of this test's own."""
    path = tmp_path / build.LIBRARY.name
    monkeypatch.delenv("PBLASMP_CORE", raising=False)
    monkeypatch.setattr(_core, "LIBRARY", path)
    _core._opened.cache_clear()
    yield path
    _core._opened.cache_clear()


def test_why_there_is_no_core(elsewhere, monkeypatch):
    assert _core.why_not() == "no C compiler when pblasmp was installed"
    _core._opened.cache_clear()
    elsewhere.write_bytes(b"of another processor")
    assert _core.why_not().startswith(f"cannot load {elsewhere}: ")
    assert _core.load() is None
    monkeypatch.setenv("PBLASMP_CORE", "0")
    assert _core.why_not() == "PBLASMP_CORE=0"
    assert _core.stale() == ""
    for given in ("off", "2"):
        monkeypatch.setenv("PBLASMP_CORE", given)
        with pytest.raises(pb.errors.ArgumentError, match=f"PBLASMP_CORE: expected 0 .*, got '{given}'"):
            _core.load()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "value"),
    [("HEAD", objects.HEAD + 8), ("ARRAY", struct.Struct("@8xPiPPPPi")), ("DTYPE", struct.Struct("@cPcc"))],
)
def test_where_objects_have_their_fields_elsewhere_there_is_no_core(monkeypatch, name, value):
    monkeypatch.setattr(objects, name, value)
    _core._opened.cache_clear()
    try:
        assert "have their fields elsewhere" in _core.why_not()
    finally:
        _core._opened.cache_clear()


@needs_compiler
def test_without_a_global_lock_there_is_no_core(monkeypatch):
    found = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED" or found(name))
    _core._opened.cache_clear()
    try:
        assert _core.why_not() == (
            "this Python has no global lock, under which the core reads Python's objects"
        )
    finally:
        _core._opened.cache_clear()


@needs_compiler
def test_a_core_of_other_sources_is_not_used(elsewhere, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(build, "digest", lambda: "of other sources")
        assert build.build(elsewhere) == ""
    why = (
        f"{elsewhere} was compiled from other sources: install pblasmp again, or run python {build.__file__}"
    )
    assert _core.why_not() == _core.stale() == why
    with pytest.warns(RuntimeWarning, match="small calls are slow: .* was compiled from other sources"):
        pb.Context(engine="host").close()
    whole: dict[str, dict[str, str]] = {"MPI library": {}, "mpirun": {}}
    assert list(doctor.faults_of_facts(whole)) == [
        (f"small calls are slow: {why}", f"python {build.__file__}")
    ]
    assert build.build(elsewhere) == ""  # in its place, while it is loaded
    assert [each.name for each in elsewhere.parent.iterdir()] == [elsewhere.name]


def installed(version, tmp_path, monkeypatch):
    """Run the hook that installations run; return what it tells the builder, and its warnings."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    warnings, data, included = [], {"force_include": {}}, {}
    app = SimpleNamespace(display_warning=warnings.append)
    hook = hooks.CoreHook(str(ROOT), {}, None, None, str(tmp_path), "wheel", app)
    hook.initialize(version, data)
    for source, target in data["force_include"].items():
        included[target] = Path(source).read_bytes()[:4]
    hook.finalize(version, data, "")
    return data | {"force_include": included}, warnings


@needs_compiler
def test_wheels_are_for_a_platform_with_the_core_and_for_all_without(tmp_path, monkeypatch):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    core = {"force_include": {f"pblasmp/_core/{build.LIBRARY.name}": b"\x7fELF"}, "pure_python": False}
    assert installed("standard", tmp_path, monkeypatch) == (core | {"tag": f"py3-none-{platform}"}, [])
    monkeypatch.setenv("PBLASMP_WHEEL_PLATFORM", "manylinux_2_17_riscv64")
    assert installed("standard", tmp_path, monkeypatch)[0]["tag"] == "py3-none-manylinux_2_17_riscv64"
    for name, value, why in (
        ("CC", "/no/compiler", "no C compiler"),
        ("CC", shutil.which("false"), "the C compiler failed: "),
        ("PBLASMP_CORE", "0", "PBLASMP_CORE=0"),
    ):
        with monkeypatch.context() as without:
            without.setenv(name, value)
            data, (warning,) = installed("standard", tmp_path, monkeypatch)
            assert data == {"force_include": {}}
            assert warning.startswith(f"pblasmp is installed without its compiled core: {why}")


@needs_compiler
def test_functions_of_other_libraries_do_not_take_its_places(tmp_path):
    other, library = tmp_path / "other.c", tmp_path / "other.so"
    names = "gemm", "view_of", "span_of", "compute_here"
    other.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
    assert not build.run([*build.compiler(), "-shared", "-fPIC", "-o", str(library), str(other)])
    script = (
        f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
        "import pblasmp as pb\nctx = pb.Context(engine='host')\na = ctx.eye(4)\n"
        "print(pb.matmul(a, a).local.trace(), len(ctx.kept))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["4.0", "0"], done
