/* SPDX-License-Identifier: Apache-2.0 */
/* Calls as Python has them are read into a call, which then starts: an ``Asked``, or the arguments of a function.
 * What is unusual about these takes the ordinary way, which has the words for it.
 *
 * Without Python's headers: its functions are given by address. Where an object has its type, and an array of NumPy its
 * fields, ``objects.py`` checks before anything is read.
 */
#ifndef PBLASMP_ARGUMENTS_H
#define PBLASMP_ARGUMENTS_H

#include "call.h"

enum { OPTIONS = 5, SIZES = 4, MATRICES = 4, ENTRIES = 11, PLACES = 1024, SLOTS = 2 * PLACES };

typedef const void *object;

/* Python's and NumPy's types, and functions. */
typedef struct {
    int64_t head; /* bytes that all objects begin with; the last word of them is the type */
    object none, array, integer, real, complex, text;
    object elements[4];   /* of matrices */
    object integers[3];   /* of descriptors and IPIV: int, long and long long */
    object (*item)(object tuple, intptr_t i);
    long long (*as_integer)(object x, int *overflow);
    double (*as_real)(object x), (*real_part)(object x), (*imaginary_part)(object x);
    const char *(*as_text)(object x, intptr_t *length);
    void (*forget_error)(void);
    void *(*let_others_run)(void);
    void (*go_on)(void *state);
} python;

/* ``PyArrayObject`` and ``PyArray_Descr`` of NumPy's C API, after their heads. */
typedef struct {
    char *data;
    int nd;
    const intptr_t *shape, *strides;
    object base, dtype;
    int flags;
} array_fields;

typedef struct {
    object element;
    char kind, type, byteorder;
} dtype_fields;

/* A local array with its descriptor, which are legal together. */
typedef struct {
    int64_t address, shape[2], strides[2], count, entries[ENTRIES];
    int64_t letter, rows, cols;
    const matrix *held; /* NULL: a free slot */
} place;

/* How a routine takes a matrix: where it is among the arguments, the sizes that are its rows and columns, or the other way
 * round by an option; where the increment of a vector is, else -1. */
typedef struct {
    int64_t at, rows[2], cols[2], chosen_by, increment, written;
} matrix_form;

enum { BY_NONE = -1, BY_LENGTH = -2 };

/* Of matrices that are no local arrays with descriptors, but a ``Handle`` of runtime/handle.py: where these have their slots;
 * the type ``Held``, else NULL; which of them may be absent if beta is 0, or -1. */
typedef struct {
    int64_t context, view_of, at, array, held;
    object type;
    int64_t optional;
} handle_form;

/* A routine for one type: ``DirectForm`` of pblas/direct.py; or for all, of handles, the first of which is D: ``HandleForm``
 * of runtime/direct_forms.py. Places among the arguments are -1 if it has none there. */
typedef struct {
    char call[16];
    int64_t routine, letter;
    char words[8], letters[OPTIONS][4]; /* what options are that it lacks; the legal letters of the others */
    int64_t options[OPTIONS], sizes[SIZES];
    int64_t alpha, beta, real_alpha, real_beta;
    double no_beta;
    matrix_form matrices[MATRICES];
    int64_t passes[4];                  /* which of these are A to D */
    int64_t tells, beside, axis, k, makes;
    handle_form handle;
} form;

typedef struct {
    call *call;
    const form *form;
    object given;  /* the arguments, a tuple; or an ``Asked`` */
    place *places; /* SLOTS of them */
    int64_t held;  /* where a ``Held`` has its address in the core, a number */
    /* Of the first vector: whether this rank is in its process column, or row; and where it begins, from 1. */
    int64_t in_column, start;
} arguments;

/* What a GPU queues a call by. ``pattern`` is the same for calls whose operands are dealt out alike, and only lie elsewhere;
 * with ``bases`` it tells this rank's calls apart. See engines/gpu/direct/gpu_direct.py. */
enum { ALIGNED = 16, OPERAND = 10, PATTERN = 6 + 4 * OPERAND };

typedef struct {
    const form *form;    /* of ``given``; NULL: that is an ``Asked`` of this routine */
    object given;
    int64_t held, routine;
    int64_t number;      /* on which the ranks vote */
    int64_t offsets[4];  /* of A to D in their matrices, in bytes; -1: absent, or the same as D */
    int64_t bases[4];    /* where they begin, aligned; 0: likewise */
    int64_t pattern[PATTERN];
} look;

void arguments_know(const python *p);
/* Remember the array and the descriptor that are given. */
void arguments_learn(arguments *r, const matrix *held, int64_t rows, int64_t cols);
/* Read the arguments and start the call. Returns what ``call_start`` does, or UNKNOWN: learn all matrices first. */
int arguments_start(arguments *r);
/* The same of an ``Asked``. UNKNOWN: a ``Held`` has no address in the core yet. */
int asked_start(arguments *r, int routine, int count);
/* Read a call for a GPU, which is not started. Returns OK, UNFIT or UNKNOWN. */
int asked_look(look *l);

#endif
