/* SPDX-License-Identifier: Apache-2.0
   Copies sub-matrices from a grid of 2 x 1 to one of 2 x 2 and back: all by Fortran's name of p?gemr2d, a lower
   trapezoid by C's name of p?trmr2d. Says how many elements are wrong. For four processes. */
#include <stdio.h>
#include <stdlib.h>

void Cblacs_pinfo(int *rank, int *ranks);
void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int nprow, int npcol);
void Cblacs_gridinfo(int context, int *nprow, int *npcol, int *myrow, int *mycol);
void Cblacs_gridexit(int context);
void Cblacs_exit(int more);
void Cigsum2d(int context, const char *scope, const char *top, int m, int n, int *a, int lda, int row, int col);
int numroc_(int *n, int *nb, int *process, int *source, int *processes);
void pdgemr2d_(int *m, int *n, double *a, int *ia, int *ja, int *desca, double *b, int *ib, int *jb, int *descb,
               int *context);
void Cpdtrmr2d(char *uplo, char *diag, int m, int n, double *a, int ia, int ja, int *desca, double *b, int ib, int jb,
               int *descb, int context);

enum { ROWS = 17, COLS = 14, M = 11, N = 9, IA = 3, JA = 4, IB = 5, JB = 2 };

struct matrix {
    int context, nb, desc[9], myrow, mycol, nprow, npcol, rows, cols;
    double *local;
};

static struct matrix make(int nprow, int npcol, int nb) {
    struct matrix x = {.nb = nb};
    int zero = 0, m = ROWS, n = COLS;
    Cblacs_get(-1, 0, &x.context);
    Cblacs_gridinit(&x.context, "Row", nprow, npcol);
    if (x.context >= 0) {
        Cblacs_gridinfo(x.context, &x.nprow, &x.npcol, &x.myrow, &x.mycol);
        x.rows = numroc_(&m, &nb, &x.myrow, &zero, &x.nprow);
        x.cols = numroc_(&n, &nb, &x.mycol, &zero, &x.npcol);
    }
    /* DTYPE_ is not set: ScaLAPACK does not read it here */
    int desc[9] = {0, x.context, ROWS, COLS, nb, nb, 0, 0, x.rows};
    for (int i = 0; i < 9; i++) x.desc[i] = desc[i];
    x.local = calloc((size_t)x.rows * x.cols + 1, sizeof(double));
    return x;
}

/* Writes to all elements what they are to be, or counts those that are not: value is that of row i and column j. */
static int each(struct matrix *x, double (*value)(int i, int j), int write) {
    int wrong = 0;
    for (int j = 0; j < x->cols; j++)
        for (int i = 0; i < x->rows; i++) {
            int row = (i / x->nb * x->nprow + x->myrow) * x->nb + i % x->nb;
            int col = (j / x->nb * x->npcol + x->mycol) * x->nb + j % x->nb;
            double *at = &x->local[i + (size_t)j * x->rows], expected = value(row + 1, col + 1);
            if (write) *at = expected;
            else wrong += *at != expected;
        }
    return wrong;
}

static double first(int i, int j) { return i * 100 + j; }
static int inside(int i, int j, int top, int left) { return i >= top && i < top + M && j >= left && j < left + N; }
static double moved(int i, int j) { return inside(i, j, IB, JB) ? first(i - IB + IA, j - JB + JA) : -1; }
static double nothing(int i, int j) { return -1 + 0 * (i + j); }
static double lower(int i, int j) { return inside(i, j, IA, JA) && i - IA >= j - JA ? -1 : first(i, j); }

int main(void) {
    int rank, ranks, m = M, n = N, ia = IA, ja = JA, ib = IB, jb = JB;
    Cblacs_pinfo(&rank, &ranks);
    struct matrix a = make(2, 1, 3), b = make(2, 2, 2);
    each(&a, first, 1);
    each(&b, nothing, 1);
    pdgemr2d_(&m, &n, a.local, &ia, &ja, a.desc, b.local, &ib, &jb, b.desc, &b.context);
    int wrong = each(&b, moved, 0);
    each(&b, nothing, 1);
    Cpdtrmr2d("L", "N", M, N, b.local, IB, JB, b.desc, a.local, IA, JA, a.desc, b.context);
    wrong += each(&a, lower, 0);
    Cigsum2d(b.context, "All", " ", 1, 1, &wrong, 1, -1, -1);
    if (rank == 0) printf("%d wrong\n", wrong);
    if (a.context >= 0) Cblacs_gridexit(a.context);
    Cblacs_gridexit(b.context);
    Cblacs_exit(0);
    return 0;
}
