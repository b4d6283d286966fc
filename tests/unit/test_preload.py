# SPDX-License-Identifier: Apache-2.0
"""``pblasmp.preload`` without ScaLAPACK: its library, its variables, and what it says when something is missing."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from pblasmp import ArgumentError, LibraryNotFoundError, UnsupportedError, pblas, preload
from pblasmp.layout.routines import VECTOR_ROUTINES
from pblasmp.pblas.factorizations import ROUTINES as FACTORIZATIONS
from pblasmp.pblas.routine_functions import ROUTINES
from pblasmp.preload.c_source import ROWS, source
from tests.helpers.command_line import run_here

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The directory of the library, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pblasmp"


@pytest.fixture
def compiled(preload_cache, monkeypatch):
    """A cache that tests share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(preload_cache))


def test_the_library_has_products_factorizations_and_vectors_and_is_compiled_once(
    compiled, preload_cache, monkeypatch
):
    library = preload.library()
    monkeypatch.setenv("CC", "/bin/false")
    assert preload.library() == library
    loaded = ctypes.CDLL(str(library))
    moves = {f"p{letter}{name}" for letter in "sdcz" for name in ("gemr2d", "trmr2d")}
    for name in pblas.__all__:  # Fortran's names of moves call C's
        watched = name in ("blacs_gridexit", "blacs_exit")  # pblasmp closes what it has on a grid
        assert hasattr(loaded, f"{name}_") == (watched or (name in ROWS and name not in moves)), name
        assert hasattr(loaded, f"C{name}") == (watched or name in moves), name
    products = {f"p{letter}{name}" for name, routine in ROUTINES.items() for letter in routine.letters}
    vectors = {name for row in VECTOR_ROUTINES.values() for name in row.names}
    factors = {f"p{letter}{name}" for name, row in FACTORIZATIONS.items() for letter in row.letters}
    assert set(ROWS) == products | vectors | factors | moves
    files = [path for path in (preload_cache / "pblasmp").iterdir() if path.is_file()]
    assert files == [library]


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("pdgemm", "INTEGER(a2) * INTEGER(a3) * INTEGER(a4)"),
        ("pdsyrk", "INTEGER(a2) * INTEGER(a2) * INTEGER(a3)"),
        ("pdtrsm", "INTEGER(a4) * INTEGER(a5) * (LETTER(a0) == 'L' ? INTEGER(a4) : INTEGER(a5))"),
        ("pdgeadd", "0"),
        ("pdgemr2d", "0"),
        ("pdgemv", "-1"),
        ("pdpotrf", "INTEGER(a1) * INTEGER(a1) * INTEGER(a1)"),
        ("pdgetrf", "INTEGER(a0) * INTEGER(a1) * INTEGER(a1)"),
        ("pdgesv", "INTEGER(a0) * INTEGER(a0) * INTEGER(a0)"),
        ("pdgetrs", "INTEGER(a1) * INTEGER(a1) * INTEGER(a2)"),
        ("pdormqr", "INTEGER(a2) * INTEGER(a3) * INTEGER(a4)"),
    ],
)
def test_operations(name, volume):
    function = source().partition(f"serve({list(ROWS).index(name)}, arguments)")[0]
    assert function.rpartition("is_large(")[2].startswith(f"{volume});")


def test_variables(compiled, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    found = preload.environment(100, "host")
    assert found["LD_PRELOAD"] == f"{preload.library()}:/lib/other.so"
    assert found["PBLASMP_PRELOAD_MIN"] == "100"
    assert found["PBLASMP_PRELOAD_ENGINE"] == "host"
    assert json.loads(found["PBLASMP_PRELOAD_SYS"])["executable"] == sys.executable
    ctypes.CDLL(found["PBLASMP_PRELOAD_PYTHON"])


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LibraryNotFoundError, match="no C compiler 'no-such-compiler'"):
        preload.library()
    assert not cache.exists()


def test_a_compiler_with_options(cache, tmp_path, monkeypatch):
    """As it is called: one that only makes its output."""
    for name in ("cc", "other"):
        compiler = tmp_path / "bin" / name
        compiler.parent.mkdir(exist_ok=True)
        compiler.write_text(COMPILER.format(called=tmp_path / "called"))
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for value, called in (("other -g0", "other -g0 -O2"), (" ", "cc -O2")):
        monkeypatch.setenv("CC", value)
        path = preload.library()
        assert path.parent == cache
        assert (tmp_path / "called").read_text().startswith(f"{tmp_path}/bin/{called} -fPIC -shared -o ")
        path.unlink()


COMPILER = """#!/bin/sh
echo "$0 $@" >{called}
for each; do [ "$before" = -o ] && : >"$each"; before=$each; done
"""


def test_a_compiler_that_fails(cache, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(UnsupportedError, match="false -O2"):
        preload.library()
    assert list(cache.iterdir()) == []


def test_a_python_without_a_shared_library(compiled, monkeypatch):
    known = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: 0 if name == "Py_ENABLE_SHARED" else known(name)
    )
    with pytest.raises(LibraryNotFoundError, match="has no shared library"):
        preload.environment(0, "host")


def test_a_size_below_zero():
    with pytest.raises(ArgumentError, match="at least 0"):
        preload.environment(-1, "host")


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="Linux"):
        preload.environment(0, "host")


def test_a_command_that_is_not_there(compiled):
    with pytest.raises(LibraryNotFoundError, match="cannot start 'no-such-command'"):
        preload.run(["no-such-command"], 0, "host")


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_commands_status_and_no_calls(compiled, command, status):
    assert preload.run(["sh", "-c", command], 0, "host") == (status, None)


@pytest.mark.parametrize(("command", "warns"), [("exit 0", True), ("exit 3", False)])
def test_a_command_without_calls_is_warned_of_unless_it_failed(compiled, monkeypatch, capfd, command, warns):
    found = run_here(["preload", "--engine", "host", "--", "sh", "-c", command], monkeypatch, capfd)
    assert ("no call of the program could be seen" in found.stderr) is warns
    assert found.returncode == int(command[-1])


PROGRAM = r"""
void CALLED();
#include <stdio.h>
int main(void) {
    int n = 4;
    double x = 1;
    CALLED("N", "N", &n, &n, &n, &x, &x, &n, &n, &n, &x, &n, &n, &n, &x, &x, &n, &n, &n);
    printf("the end\n");
    return 0;
}
"""
OWN = r"""
#include <stdio.h>
void Cblacs_pinfo(int *rank, int *ranks) { *rank = 0; *ranks = 1; }
void CALLED(void) { puts("the program's own"); }
"""


@pytest.fixture
def compile_program(tmp_path):
    """What returns a program on one process that calls a routine, which it has itself."""

    def compiled_program(called):
        (tmp_path / "own.c").write_text(OWN)
        (tmp_path / "main.c").write_text(PROGRAM)
        own, path, name = tmp_path / "libown.so", tmp_path / "main", f"-DCALLED={called}"
        subprocess.run(["cc", name, "-shared", "-fPIC", "-o", own, tmp_path / "own.c"], check=True)
        subprocess.run(
            ["cc", name, "-w", "-std=gnu89", "-rdynamic", "-o", path, tmp_path / "main.c", own], check=True
        )
        return str(path)

    return compiled_program


@pytest.fixture
def program(compile_program):
    """A program with a product of 4 × 4 matrices."""
    return compile_program("pdgemm_")


def test_small_calls_are_left_to_the_programs_library(program, compiled, capfd):
    status, calls = preload.run([program], 5, "host")
    assert (status, calls[:4]) == (0, (0, 1, 0, 0))
    assert capfd.readouterr().out == "the program's own\nthe end\n"


NESTED = r"""
#include <unistd.h>
void pdgemm_();
void Cblacs_pinfo(int *process, int *count) { *process = 0; *count = 1; }
void CALLED(int *n) { usleep(50000); pdgemm_(n, n, n, n, n); }
"""
INNER = "#include <unistd.h>\nvoid pdgemm_() { usleep(50000); }\n"
CALLS_NESTED = r"""
#include <stdio.h>
#include <time.h>
void CALLED();
int main(void) {
    int n = 9;
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    CALLED(&n, &n, &n);
    clock_gettime(CLOCK_MONOTONIC, &to);
    printf("%.9f\n", to.tv_sec - from.tv_sec + 1e-9 * (to.tv_nsec - from.tv_nsec));
    return 0;
}
"""


def test_a_call_inside_another_one_counts_for_itself(tmp_path, compiled, capfd):
    """The library's p?potrf takes 0.05 s and calls p?gemm, which takes as long: no second is counted twice."""
    (tmp_path / "own.c").write_text(NESTED)
    (tmp_path / "inner.c").write_text(INNER)
    (tmp_path / "main.c").write_text(CALLS_NESTED)
    own, inner, path = tmp_path / "libown.so", tmp_path / "libinner.so", tmp_path / "main"
    flags = ["cc", "-DCALLED=pdpotrf_", "-w", "-std=gnu89"]
    subprocess.run([*flags, "-shared", "-fPIC", "-o", inner, tmp_path / "inner.c"], check=True)
    subprocess.run([*flags, "-shared", "-fPIC", "-o", own, tmp_path / "own.c", inner], check=True)
    subprocess.run([*flags, "-rdynamic", "-o", path, tmp_path / "main.c", own, inner], check=True)
    status, calls = preload.run([str(path)], 100, "host")
    assert (status, calls[:4]) == (0, (0, 2, 0, 0))
    assert 0.1 <= calls.library_seconds <= float(capfd.readouterr().out)


QUERY = r"""
void CALLED();
int main(void) {
    int n = 9, size = -1;
    double x = 1;
    CALLED(&n, &x, &n, &n, &n, &n, &x, &SIZES);
    return 0;
}
"""


@pytest.mark.parametrize("sizes", ["n, &n, &size", "size, &n, &n"])
def test_sizes_of_workspaces_are_asked_of_the_programs_library(sizes, tmp_path, compiled, capfd):
    """Both of p?getri's: the answer is the program's own library's, and no call is counted."""
    (tmp_path / "own.c").write_text(OWN)
    (tmp_path / "main.c").write_text(QUERY)
    own, path = tmp_path / "libown.so", tmp_path / "main"
    flags = ["-DCALLED=pdgetri_", f"-DSIZES={sizes}"]
    subprocess.run(["cc", *flags, "-shared", "-fPIC", "-o", own, tmp_path / "own.c"], check=True)
    subprocess.run(
        ["cc", *flags, "-w", "-std=gnu89", "-rdynamic", "-o", path, tmp_path / "main.c", own], check=True
    )
    assert preload.run([str(path)], 0, "host") == (0, None)
    assert capfd.readouterr().out == "the program's own\n"


def test_levels_1_and_2_are_left_to_the_programs_library(compile_program, compiled, capfd):
    """However small the size is: ScaLAPACK calls them on one process row or column only."""
    assert {row.volume for name, row in ROWS.items() if name in ("pddot", "pzgerc", "pdtrsv")} == {"-1"}
    status, calls = preload.run([compile_program("pddot_")], 0, "host")
    assert (status, calls[:4]) == (0, (0, 1, 0, 0))
    assert capfd.readouterr().out == "the program's own\nthe end\n"


def test_without_the_variables(program, compiled):
    done = subprocess.run(
        [program], env={"LD_PRELOAD": str(preload.library())}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "lacks PBLASMP_PRELOAD_MIN: start the program with pblasmp preload" in done.stderr


def test_a_python_that_is_not_there(program, compiled):
    variables = preload.environment(0, "host") | {"PBLASMP_PRELOAD_PYTHON": "/no/libpython.so"}
    done = subprocess.run([program], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot load Python: /no/libpython.so" in done.stderr


ANOTHER_MPI = r"""
int PMPI_Init(int *count, char ***words) { return 0; }
int MPI_Initialized(int *is) { *is = 1; return 0; }
void Cblacs_gridinfo(int context, int *rows, int *cols, int *row, int *col) { *rows = *cols = 1; *row = *col = 0; }
void blacs_get_(int *context, int *what, int *value) { *value = 0; }
"""


@pytest.mark.parametrize("mpi", ["", ANOTHER_MPI], ids=["none", "another"])
def test_an_mpi4py_of_another_mpi(mpi, tmp_path, compile_program, compiled, capfd, monkeypatch):
    """The job ends before mpi4py has called anything: in two MPI libraries its calls reach the wrong one."""
    monkeypatch.setattr(f"{__name__}.OWN", OWN + mpi)
    status, _ = preload.run([compile_program("pdgemm_")], 0, "host")
    err = capfd.readouterr().err
    assert status == 1
    assert "pblasmp preload: the program's MPI library is not that of mpi4py (" in err
    assert "pip install --no-binary mpi4py" in err
    assert (f"while the program has {tmp_path}/libown.so" in err) == bool(mpi)
    assert err.count("\n") == 1
