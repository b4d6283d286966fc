/* SPDX-License-Identifier: Apache-2.0 */
/* Direct calls of CPU ranks: each rank writes what others need of its operands into memory that all share, the ranks
 * vote, and each computes what it has of the result with the local BLAS.
 *
 * Each node has slabs of its own. What ranks of other nodes read there is packed into one message to each node, which
 * also says what its sender votes for; whoever receives it writes it into the slabs. Both know without being told which
 * elements it has: all ranks know all layouts, and what each rank reads.
 *
 * A call is prepared anew each time: that takes a microsecond. ``engines/host/direct/calls.py`` says how ranks meet.
 */
#ifndef PBLASMP_CALL_H
#define PBLASMP_CALL_H

#include "meet.h"
#include "span.h"
#include "tiles.h"

#include <stddef.h>

/* What a function here returns. */
enum {
    UNFIT,        /* the call is not for direct calls; nothing has happened */
    BY_PYTHON,    /* of a reduction: the numbers that this rank tells take a closer look; nothing has happened */
    DONE,         /* without slabs */
    DONE_STAGED,  /* with slabs */
    AWAIT_VOTE,   /* wait for the vote, then go on; or not all ranks voted for the same */
    AWAIT_OTHERS, /* wait for the other ranks of the node, then go on */
    AWAIT_SUMS,   /* wait for what other nodes send, then go on */
    NEEDS_ROOM,   /* make sets of ``nbytes``, then go on */
    BROKEN,       /* a wait has failed */
    OK,           /* between functions here */
    UNKNOWN,      /* of arguments: a place is not known yet; nothing has happened */
};

enum {
    MATMUL, TRSM, TRMM, SYMM, HEMM, SYRK, HERK, SYR2K, HER2K, GEADD, SCAL, SWAP, DOT, DOTC, NRM2, ASUM, AMAX,
    POTRF, POSV, GETRF, GETRS, GESV, POTRS, TRTRS, GETRI, POTRI, TRTRI, GETRF_GETRI, POTRF_POTRI, TRTRI_LASET,
    GELS, GEQRF, ORGQR, ORMQR,
    ROUTINES,
};

/* Functions of the BLAS and of LAPACK. */
enum {
    B_GEMM, B_GEMV, B_GER, B_GERC, B_AXPY, B_SCAL, B_SWAP, B_DOT, B_ASUM,
    B_TRSM, B_TRMM, B_TRSV, B_TRMV, B_SYMM, B_HEMM, B_HEMV, B_SYRK, B_HERK, B_SYR2K, B_HER2K, B_HER, B_HER2,
    B_POTRF, B_POTRS, B_POTRI, B_GETRF, B_GETRS, B_GETRI, B_TRTRS, B_TRTRI,
    B_GELS, B_GEQRF, B_ORGQR, B_ORMQR,
    BLAS_FUNCTIONS,
};

/* A matrix that is no view, as this rank holds it: ``Held`` of engines/direct/request.py. */
typedef struct {
    axes rows, cols;
    int64_t nprow, npcol, numbering; /* of its grid: 1 by rows, 2 by columns; 0 if that is the same */
    int64_t by_columns, item, letter;
    uint64_t digest;
    int64_t address, end, ld;
} matrix;

typedef struct {
    const matrix *of; /* NULL: absent */
    int64_t i, j, m, n, transposed;
} part;

/* A local array as BLAS takes it; with ``conjugated`` its conjugate is meant. */
typedef struct {
    char *at;
    int64_t ld;
    int by_columns, conjugated;
} operand;

/* A sub-matrix, perhaps transposed: how it is dealt out, and what this rank has of it. */
typedef struct {
    operand here;
    span rows, cols;
    int64_t row, col; /* this rank's process along them; -1 outside the grid */
    int64_t m, n;     /* how many of them this rank has */
    const matrix *of;
    int transposed, active;
} view;

/* Which slabs are a rank's, by its process in a view: those of a process along their rows, and along their columns. What
 * is not dealt out is everyone's. */
enum {
    ANY,
    ROW = 1,     /* that of the view's rows */
    COL = 2,     /* or of its columns */
    ACROSS = 4,  /* or the one that has a column's indices among the view's rows: both are dealt out alike */
    NUMBER = 8,  /* the rank's number, with or without a view */
};

typedef struct {
    const view *in; /* ranks outside it, or without a part of it, have none; NULL: all ranks have */
    int row, col;   /* any of the above */
    int64_t below;  /* if it is not 0, only ranks below it have any */
} whose;

typedef struct call call;

/* Copies of an operand's parts, one for each process of another distribution, in shared memory. */
typedef struct {
    span rows, cols;
    int64_t start; /* the offset of the first one */
    int by_columns;
    int own;            /* they are in memory of this rank alone */
    int64_t gap;        /* elements between columns, or rows, of a matrix that is not dealt out */
    int64_t item;       /* bytes of an element */
    const view *staged; /* what is written there before the vote; NULL: nothing */
    const view *triangle; /* or of what a triangle is */
    char half;            /* 'L' or 'U': most of what is beyond this triangle is left out; else 0 */
    int64_t part;         /* rows of a half, columns of 'U', so many at a time from the last on, are read by these nodes: */
    int (*reads)(const call *c, int64_t node, int64_t part); /* part 0 are the first rows; by all, if ``part`` is 0 */
    char **places;        /* by process of ``cols``, where in a message each is, and stays; NULL: messages are unpacked */
    whose readers;        /* of what is staged */
    const view *home;     /* what is computed here is read where this is; NULL: by who computes it */
    whose writers;        /* who does */
    span across;          /* the columns of a slab, among those of ``home``, if ``cols`` are not: partial sums */
} slabs;

enum {
    SLABS = 8,                   /* at most */
    PIVOTS = 1024,               /* at most */
    PROCESSES = 64,              /* at most, if ranks are on several nodes */
    SCRATCH = 1 << 19, WORK = 1 << 18, /* bytes of the memory of this rank alone, and after them of LAPACK's workspace */
};

/* When which way is faster: see engines/host/direct/limits.py. */
typedef struct {
    int64_t tiny, stay, portion, handoff, uncopied, transposed, strip, equations;
    int64_t lapack, cholesky, width, part, rows, meeting, factoring, dealt;
} limits;

/* Rows i to i1 and columns j to j1 of this rank's part of a triangle: a triangle of them, or all. */
typedef struct {
    int64_t i, i1, j, j1;
    int is_tile;
} piece;

/* One of the products with what is stored of a triangle: with A itself, or with its transpose. */
typedef struct {
    int turned;
    slabs *right; /* the columns, as rows, along A's columns; along its rows for the transpose */
    slabs *sums;  /* partial sums along A's rows, or along its columns */
    span parts;   /* how what is summed is dealt out */
    int64_t row, col; /* which of the slabs are this rank's */
} stored_product;

typedef struct {
    char side, uplo, op;
} words;

typedef int phase(call *c);
/* What a message has from a rank for a node: pack it, unpack it, or, without a message, count its bytes. */
typedef int64_t carry(const call *c, int64_t rank, int64_t node, char *message, int unpacks);
typedef void visit(call *c, const piece *p);
/* What the BLAS computes on local operands, or on copies of all of them: d of m x n from x and y. */
typedef void kernel(const call *c, int64_t m, int64_t n, operand x, operand y, operand d);
/* Wait for a flag, or for messages; return COME once it is up: anything else, even what a function leaves that an exception
 * of a signal has ended, breaks the call. */
enum { COME = 0x5EA5 };
typedef int wait(int64_t flag);
typedef void blas(void);

struct call {
    /* What is requested: ``Asked`` of engines/direct/request.py. */
    int64_t routine, name; /* its number above, and one of its name in messages */
    int64_t is_new;
    char side, uplo, op_a, op_b, diag, unused[3];
    double alpha[2], beta[2];
    part a, b, c, d, beside; /* beside A: IPIV or TAU */
    int64_t count;   /* how many pivots, or factors of reflectors, all ranks have */
    int64_t yields;  /* of a wait: see board_meet */
    /* Where. */
    int64_t unlike;  /* flips bits of the vote: what this rank has found in the last call */
    char *memory;    /* the set of slabs */
    int64_t capacity, most; /* bytes of a set, and of the largest that may be made */
    /* The ranks. */
    board *votes, *meets;
    int64_t ranks, rank;
    int64_t nodes, node;    /* how many there are, and which is this rank's */
    const int64_t *node_of; /* of each rank */
    int64_t workers; /* ranks that may compute at the same time: of each node, and no more than any node has */
    int64_t alike;   /* all ranks round alike, as far as is known; if not, none computes what others compute, too */
    int64_t small_kernels; /* the BLAS multiplies small real matrices without copying them, by one thread */
    const limits *limits;
    char *scratch;  /* SCRATCH + WORK bytes of this rank alone, aligned */
    wait *waits;    /* a flag, for longer than a moment */
    blas *functions[LETTERS][BLAS_FUNCTIONS];
    /* What comes of it. */
    int64_t number, nbytes, touched; /* bytes of a set: of this call, and of the largest so far */
    int64_t checksum; /* of 32 bits, of a result and what is beside it, that each rank, or node, has computed for itself */
    int64_t told;    /* how many numbers this rank tells with its vote */
    double tells[4];
    char *factor_at;        /* A's factor, if it has been factored to solve with it */
    int64_t factor_ld;
    union {
        int32_t pivots[PIVOTS]; /* from 1 */
        double tau[2 * PIVOTS]; /* numbers of the call's type */
        uint32_t numbers[4 * PIVOTS];
    };
    int32_t info;           /* LAPACK's; -1 if pivots are no rows of A */
    /* The rest is not Python's. */
    matrix held_beside; /* what the core itself has made of IPIV or TAU */
    int letter, state;
    int64_t item;
    scalar factor, other, one, less, zero;
    phase *compute, *finish;
    kernel *kernel;
    int takes;            /* whether this rank takes part in ``finish`` */
    view x, y, to, old;
    int has_old;          /* D starts as ``old`` */
    view into;            /* D, perhaps transposed */
    slabs room[SLABS];
    int rooms;
    slabs *left, *right;  /* of x and of y; NULL: they are read where they are */
    slabs *start;         /* of what D starts as, if that is not where D is */
    char *places[2][PROCESSES]; /* of ``left`` and ``right`` */
    int64_t flags_at;     /* the offset of flags, which are down when the ranks have voted; their number */
    int64_t flag_count;
    flag *flags;
    int64_t owned;        /* bytes of scratch that are in use */
    int64_t here;         /* this rank's number among those of its node */
    carry *carry;         /* what goes along with messages */
    /* Of routines. */
    words words;          /* for the BLAS */
    int adjoint, is_symmetric, is_vector, together, aligned, upwards, in_place;
    int terms;
    stored_product term[2];
    slabs *across[2];
    int64_t blocks;
    operand array;        /* what is factored in blocks */
    int is_lower, is_dealt; /* with rows dealt out to the ranks of all nodes, at this step */
    int64_t order, workers_here, blocks_together, failed, fault, step;
};

size_t call_size(void);
int call_start(call *c);
int call_go_on(call *c);

int64_t number_of(const call *c); /* on which the ranks vote */

/* A number of a number and a word: different words give different ones. And of the pivots, or factors of reflectors. */
uint64_t mixed(uint64_t h, uint64_t word);
uint64_t mixed_beside(const call *c, uint64_t h);

/* Copy what this rank has of a part into a slab that is all of it, in Fortran order, or ``back``: with ``half``, 'L' or
 * 'U', only what is on that side of a diagonal, which is included. */
void part_copy(const part *p, char *slab, int back, int half, int64_t diagonal);

/* -- for routines */

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return UNFIT;                                                                                              \
    } while (0)

phase prepare_product, prepare_triangular, prepare_sided, prepare_updated, prepare_sum, prepare_scaled;
phase prepare_exchanged, prepare_reduced, prepare_lapack, prepare_factored, prepare_solved;

static inline int is_single(const call *c)
{
    return c->ranks == 1;
}

static inline int has_tau(const call *c)
{
    return c->routine >= GEQRF;
}

static inline int is_on_one_node(const call *c)
{
    return c->nodes == 1;
}

static inline int64_t along(operand x) /* from an element of a column to the next */
{
    return x.by_columns ? 1 : x.ld;
}

static inline int is_one(const call *c, const scalar *x)
{
    return c->letter == S || c->letter == C ? x->s[0] == 1 && (c->letter == S || x->s[1] == 0)
                                            : x->d[0] == 1 && (c->letter == D || x->d[1] == 0);
}

view view_of(const part *p, int turned, int conjugated);
tile tile_of(const view *v);
tile elements(const call *c, operand x);
operand from(const call *c, operand x, int64_t i, int64_t j); /* from an element on */
int same_elements(const part *x, const part *y);
int same_places(const view *x, const view *y);
int same_rank(const view *x, const view *y);
int64_t rank_of(const view *v, int64_t row, int64_t col);
int find_process(const view *v, int64_t rank, int64_t *row, int64_t *col); /* whether the rank has a part of it */
/* Whether D shares no memory with an operand other than the one, perhaps NULL, that may be D itself. */
int apart_but(const call *c, const part *in_place);
int find_old(call *c);        /* C, if it is read and is not D; UNFIT if it is not where D is */
void copy_old(const call *c);
slabs *room_for(call *c, span rows, span cols, int by_columns);
slabs *stage(call *c, const view *x, span rows, span cols, int by_columns, whose readers);
/* Of a call's x or y; who is alone on its node reads its own part and others' where they are, if they are whole slabs. */
slabs *stage_dealt(call *c, const view *x, span rows, whose readers, char **places);
operand dealt(const call *c, const slabs *s, int64_t row, int64_t col);
slabs *stage_all(call *c, const view *x, int by_columns, const view *readers); /* NULL: every rank */
/* Equal parts of its columns, or rows, for each rank, which writes D there. */
slabs *stage_shares(call *c, const view *x, int of_rows, int by_columns);
/* As stage_all, of the triangle that ``uplo`` names: most of what is beyond it is left out. */
slabs *stage_half(call *c, const view *x, int by_columns, const view *readers);
slabs *spaced(call *c, slabs *s); /* one of a square matrix, the last so far: its columns begin at unlike places of a cache */
/* What is computed in slabs is read where ``home`` is. */
void give_home(slabs *s, whose writers, const view *home, span across);
slabs *own_room(call *c, int64_t m, int64_t n, int by_columns);
operand slab(const call *c, const slabs *s, int64_t row, int64_t col);
void give(const call *c, const slabs *s, const view *x); /* write what this rank has of a matrix into slabs, or back */
void take(const call *c, const slabs *s, const view *to);
/* Write beta d and the partial sums of each process that has any of what is summed: first times beta. */
void collect(const call *c, const view *d, const slabs *sums, const span *parts, const double beta[2]);
/* Two ways to compute by a kernel: a rank does its part of D, from operands in place and from slabs of its rows and
 * columns; or, if the call is tiny, all of D in memory of its own, from all of each operand. That takes one meeting. */
int compute_here(call *c);
int compute_everywhere(call *c);
void have_flags(call *c, int64_t count);
int await_flag(const call *c, int i); /* OK or BROKEN */
int64_t place_on_node(const call *c, int64_t rank); /* a rank's number among those of its node */
/* Between nodes, of all ranks in one order, perhaps with the same for all nodes; the end is OK or BROKEN. */
void begin_exchange(call *c, carry *with, int is_for_all);
int end_exchange(const call *c);

/* Whether each block of the diagonal is on one rank. */
int has_tiles(const view *x);
void staircase(call *c, const view *x, int is_lower, visit *see);

/* Copy the part of a triangle that this rank has: into ``whole``, which is all of the matrix, or ``back``. It ends at a
 * diagonal, 0 for the main one, positive above it. */
void copy_triangle(const call *c, tile whole, const view *x, int is_lower, int64_t diagonal, int back);
void take_triangle(const call *c, tile whole, const view *to, int is_lower); /* outside a new D is zero */
void fill_triangle(const call *c, tile t, int64_t n, int is_lower, double value);
int is_nan(const call *c, tile t, int64_t i, int64_t j);

/* Whether several ranks multiply m x k by k x n elements, so few that each may have all of them: fewer if they can divide
 * the work, since all others make a plan. */
int is_tiny(const call *c, int64_t m, int64_t n, int64_t k, int can_divide);

/* d = alpha x y^T + beta d; x is m x k, y is n x k */
void gemm(const call *c, int64_t m, int64_t n, int64_t k, const scalar *alpha, operand x, operand y,
          const scalar *beta, operand d);

typedef const void *arg;
typedef void blas4(arg, arg, arg, arg);
typedef void blas5(arg, arg, arg, arg, arg);
typedef void blas6(arg, arg, arg, arg, arg, arg);
typedef void blas7(arg, arg, arg, arg, arg, arg, arg);
typedef void blas8(arg, arg, arg, arg, arg, arg, arg, arg);
typedef void blas9(arg, arg, arg, arg, arg, arg, arg, arg, arg);
typedef void blas10(arg, arg, arg, arg, arg, arg, arg, arg, arg, arg);
typedef void blas11(arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg);
typedef void blas12(arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg);
typedef void blas13(arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg, arg);

#define BLAS(c, count, name) ((blas##count *)(c)->functions[(c)->letter][B_##name])
#define INT(x) (&(int32_t){(int32_t)(x)})

#endif
