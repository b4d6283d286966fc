/* SPDX-License-Identifier: Apache-2.0 */
/* PBLAS, factorizations and moves for LD_PRELOAD: large calls go to pblasmp, in a Python in the process, all others to
   the program's own library. To be loaded it needs neither Python nor MPI. pblasmp.preload.c_source adds the routines. */
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
static int (*serve)(int routine, long *arguments);
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
void pblasmp_preload_begin(int (*given_serve)(int, long *), void (*given_forget)(int)) {
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
