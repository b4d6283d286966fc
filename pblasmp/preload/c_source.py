# SPDX-License-Identifier: Apache-2.0
"""The C library that is loaded into ScaLAPACK programs, made from the tables of routines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature

import numpy as np

from .. import pblas
from ..layout.routines import VECTOR_ROUTINES
from ..pblas.factorizations import BESIDE, SIZES, ScalapackRoutine
from ..pblas.factorizations import ROUTINES as FACTORIZATIONS
from ..pblas.routine_functions import DTYPE, ROUTINES
from ..pblas.vector_functions import ROUTINES as VECTORS


@dataclass(frozen=True, slots=True)
class Row:
    """A routine of the library.

    Attributes:
        arguments: their names, in the order of the routine's.
        matrices: those of the arguments that are local arrays of matrices or vectors.
        beside: the arrays beside A, of one element for each of its local rows (0) or columns (1).
        sizes: the arguments that ask for the size of a workspace if they are -1.
        real: scalars that are real for every type.
        dtype: of the matrices.
        volume: the number of multiplications in C, from the addresses a0, a1 and so on; 0 for a routine that moves at
            least as much as it computes; -1 for levels 1 and 2, which ScaLAPACK itself calls on a part of the grid.
        of_c: whether the library has the name that C calls, by which integers are passed as values. Fortran's calls it.
    """

    arguments: list[str]
    matrices: tuple[str, ...]
    beside: dict[str, int]
    sizes: tuple[str, ...]
    real: tuple[str, ...]
    dtype: np.dtype
    volume: str
    of_c: bool = False


def _rows() -> Iterator[tuple[str, Row]]:
    for name, routine in ROUTINES.items():
        names, volume = routine.names, _volume(routine.names)
        for letter in routine.letters:
            real = tuple(routine.real.split())
            yield f"p{letter}{name}", Row(names, tuple(routine.shapes), {}, (), real, DTYPE[letter], volume)
    for name, row in FACTORIZATIONS.items():
        beside = {each: axis for each, axis in BESIDE.items() if each in row.names}
        sizes = tuple(each for each in row.names if each in SIZES)
        volume = _volume_of_factors(row)
        for letter in row.letters:
            dtype = DTYPE[letter]
            yield f"p{letter}{name}", Row(row.names, tuple(row.shapes), beside, sizes, (), dtype, volume)
    for vectors in VECTOR_ROUTINES.values():
        for name, letter in vectors.names.items():
            routine = VECTORS[name]
            real = tuple(routine.real.split())
            yield name, Row(routine.names, tuple(routine.shapes), {}, (), real, DTYPE[letter], "-1")
    for move in ("gemr2d", "trmr2d"):
        for letter in "sdcz":
            name = f"p{letter}{move}"
            names = list(signature(getattr(pblas, name)).parameters)
            yield name, Row(names, ("a", "b"), {}, (), (), DTYPE[letter], "0", of_c=True)


def _volume(arguments: list[str]) -> str:
    """Return the text for the multiplications of a product."""
    at = {each: f"INTEGER(a{arguments.index(each)})" for each in ("m", "n", "k") if each in arguments}
    if "k" in at:
        return f"{at.get('m', at['n'])} * {at['n']} * {at['k']}"
    if "side" in arguments:
        side = f"(LETTER(a{arguments.index('side')}) == 'L' ? {at['m']} : {at['n']})"
        return f"{at['m']} * {at['n']} * {side}"
    return "0"


def _volume_of_factors(routine: ScalapackRoutine) -> str:
    """Return the text for the multiplications of a factorization, an inverse, or a solve with a known factor."""
    at = {each: f"INTEGER(a{i})" for i, each in enumerate(routine.names)}
    third = at["k"] if "k" in at else at["nrhs"] if routine.written == "b" else at["n"]
    return f"{at.get('m', at['n'])} * {at['n']} * {third}"


ROWS = dict(_rows())
"""The routines of the library by name, in the order of the numbers by which it calls Python."""


def source() -> str:
    """Return the library's text. Local."""
    functions = [_function(number, name, row) for number, (name, row) in enumerate(ROWS.items())]
    return "\n".join([_HEAD.lstrip(), *functions, _TAIL])


def _function(number: int, name: str, row: Row) -> str:
    names = [f"a{i}" for i in range(len(row.arguments))]
    values = [row.of_c and _is_value(each, row) for each in row.arguments]
    kinds = ["int " if value else "void *" for value in values]
    declared = ", ".join(f"{kind}{each}" for kind, each in zip(kinds, names, strict=True))
    types, passed = ", ".join(kind.strip() for kind in kinds), ", ".join(names)
    addresses = ", ".join(f"&{each}" if value else each for value, each in zip(values, names, strict=True))
    asks = " || ".join(f"INTEGER(a{row.arguments.index(each)}) == -1" for each in row.sizes) or "0"
    symbol = f"C{name}" if row.of_c else f"{name}_"
    return f"""
void {symbol}({declared}) {{
    static void (*own)({types});
    void *arguments[] = {{{addresses}}};
    int asks = {asks}, large = !asks && is_large({row.volume});
    Watch watch = start();
    if (large && serve({number}, arguments)) {{
        stop(&watch, &by_pblasmp);
        return;
    }}
    if (!own) own = (void (*)({types}))next("{symbol}");
    own({passed});
    stop(&watch, asks ? &questions : &by_library);
}}"""


def _is_value(name: str, row: Row) -> bool:
    """Return whether C passes an argument as a value: all but arrays, descriptors and letters."""
    return not (name in (*row.matrices, "uplo", "diag") or name.startswith("desc"))


_HEAD = r"""
/* Made by pblasmp.preload.c_source. PBLAS, factorizations and moves for LD_PRELOAD: large calls go to pblasmp, in a
   Python in the process, all others to the program's own library. To be loaded it needs neither Python nor MPI. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define INTEGER(address) ((double)*(int *)(address))
#define LETTER(address) toupper(*(unsigned char *)(address))

/* Functions of Python: answer a call, and return 0 if it is not for pblasmp; BLACS is about to free a grid, -1: all. */
static int (*serve)(int routine, void **arguments);
static void (*forget)(int context);
static double least; /* operations from which a call is large */
static int begun, process, vectors; /* vectors: levels 1 and 2 are computed, too; every process of a grid calls them */

/* How many calls, and their nanoseconds without those of calls that are made inside them. */
typedef struct {
    long calls, nanoseconds;
} Share;
static Share by_pblasmp, by_library, grids, questions; /* questions: for the size of a workspace */

typedef struct {
    long began, inside; /* and what "inside" was */
} Watch;
static long inside; /* nanoseconds of calls that have been made inside the present one */

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static Watch start(void) {
    Watch watch = {now(), inside};
    inside = 0;
    return watch;
}

static void stop(const Watch *watch, Share *share) {
    long passed = now() - watch->began;
    share->calls++;
    share->nanoseconds += passed - inside;
    inside = watch->inside + passed;
}

/* Called by pblasmp.preload.serve, in the call that needs a grid first: how long it took to make it. */
void pblasmp_preload_grid(long nanoseconds) {
    grids.calls++;
    grids.nanoseconds += nanoseconds;
    inside += nanoseconds;
}

static void give_up(const char *what) {
    const char *why = dlerror();
    fprintf(stderr, "pblasmp preload: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    fflush(NULL);
    _exit(1);
}

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) give_up(name);
    return found;
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (!value) {
        fprintf(stderr, "pblasmp preload: the environment lacks %s: start the program with pblasmp preload\n", name);
        _exit(1);
    }
    return value;
}

/* Called by pblasmp.preload.serve. */
void pblasmp_preload_begin(int (*given_serve)(int, void **), void (*given_forget)(int)) {
    serve = given_serve;
    forget = given_forget;
}

static void start_python(void) {
    int (*here)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    if (here && here()) give_up("this program is a Python program: let it import pblasmp.pblas instead");
    void *python = dlopen(variable("PBLASMP_PRELOAD_PYTHON"), RTLD_NOW | RTLD_GLOBAL);
    if (!python) give_up("cannot load Python");
    void (*initialize)(int) = (void (*)(int))dlsym(python, "Py_InitializeEx");
    int (*run)(const char *, void *) = (int (*)(const char *, void *))dlsym(python, "PyRun_SimpleStringFlags");
    void *(*let_go)(void) = (void *(*)(void))dlsym(python, "PyEval_SaveThread");
    if (!initialize || !run || !let_go) give_up("this Python lacks a function");
    const char *home = getenv("PYTHONHOME");
    char *before = home ? strdup(home) : NULL;
    setenv("PYTHONHOME", variable("PBLASMP_PRELOAD_HOME"), 1);
    initialize(0);
    if (before) setenv("PYTHONHOME", before, 1);
    else unsetenv("PYTHONHOME");
    free(before);
    if (run("import json, os, sys\n"
            "vars(sys).update(json.loads(os.environ['PBLASMP_PRELOAD_SYS']))\n"
            "sys.exec_prefix = sys.prefix\n"
            "import mpi4py\n"
            "mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
            "import pblasmp.preload.serve\n"
            "pblasmp.preload.serve.begin()\n", NULL) || !serve)
        give_up("pblasmp does not start");
    let_go();
}

/* Whether a call is pblasmp's; then Python has been started. */
static int is_large(double volume) {
    if (!begun) {
        int count;
        double n = atof(variable("PBLASMP_PRELOAD_MIN"));
        least = n * n * n;
        vectors = getenv("PBLASMP_PRELOAD_VECTORS") != NULL;
        ((void (*)(int *, int *))next("Cblacs_pinfo"))(&process, &count);
        begun = 1;
    }
    int large = volume < 0 ? vectors : volume >= least;
    if (large && !serve) start_python();
    return large;
}
"""

_TAIL = r"""
/* A grid's number may be given to another grid, and MPI may end: pblasmp closes what it has on a grid before. */
void blacs_gridexit_(int *context) {
    if (forget) forget(*context);
    ((void (*)(int *))next("blacs_gridexit_"))(context);
}

void Cblacs_gridexit(int context) {
    if (forget) forget(context);
    ((void (*)(int))next("Cblacs_gridexit"))(context);
}

void blacs_exit_(int *more) {
    if (forget) forget(-1);
    ((void (*)(int *))next("blacs_exit_"))(more);
}

void Cblacs_exit(int more) {
    if (forget) forget(-1);
    ((void (*)(int))next("Cblacs_exit"))(more);
}

static void __attribute__((destructor)) write_counts(void) {
    const char *path = getenv("PBLASMP_PRELOAD_COUNTS");
    FILE *file = begun && !process && path ? fopen(path, "w") : NULL;
    if (file) {
        const Share *shares[] = {&by_pblasmp, &by_library, &grids};
        for (int i = 0; i < 3; i++) fprintf(file, "%ld %ld\n", shares[i]->calls, shares[i]->nanoseconds);
        fclose(file);
    }
}
"""
