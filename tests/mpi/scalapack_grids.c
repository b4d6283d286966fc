/* SPDX-License-Identifier: Apache-2.0
   Makes many grids of two shapes that are open at once, multiplies on each, frees every other one, the first included,
   and multiplies on the others; then frees all and begins again. Says how many products are wrong, and how many of MPI's
   communicators the products have taken. For two processes. */
#include <mpi.h>
#include <stdio.h>

void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int nprow, int npcol);
void Cblacs_gridexit(int context);
void pdgemm_(const char *transa, const char *transb, int *m, int *n, int *k, double *alpha, double *a, int *ia, int *ja,
             int *desca, double *b, int *ib, int *jb, int *descb, double *beta, double *c, int *ic, int *jc, int *descc);

enum { GRIDS = 40, N = 2 };

static int grids[GRIDS];

static void make(void) {
    for (int i = 0; i < GRIDS; i++) {
        Cblacs_get(-1, 0, &grids[i]);
        Cblacs_gridinit(&grids[i], "Row", i % 2 ? 1 : 2, i % 2 ? 2 : 1);
    }
}

/* Multiplies 2 x 2 matrices of ones: a row or a column for each process. Returns how many elements are wrong. */
static int multiply(int from, int step) {
    int n = N, one = 1, wrong = 0;
    for (int i = from; i < GRIDS; i += step) {
        int block = 1, desc[9] = {1, grids[i], n, n, block, block, 0, 0, i % 2 ? 2 : 1};
        double alpha = i + 1, beta = 0, a[] = {1, 1}, c[] = {-1, -1};
        pdgemm_("N", "N", &n, &n, &n, &alpha, a, &one, &one, desc, a, &one, &one, desc, &beta, c, &one, &one, desc);
        wrong += (c[0] != 2 * alpha) + (c[1] != 2 * alpha);
    }
    return wrong;
}

/* How many communicators can still be made. */
static int left(void) {
    static MPI_Comm made[1 << 16];
    int count = 0;
    while (count < 1 << 16 && MPI_Comm_dup(MPI_COMM_SELF, &made[count]) == MPI_SUCCESS) count++;
    for (int i = 0; i < count; i++) MPI_Comm_free(&made[i]);
    return count;
}

int main(int argc, char **argv) {
    int given, rank, wrong = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    int taken = 0;
    for (int round = 0; round < 2; round++) {
        make();
        int before = left();
        wrong += multiply(0, 1);
        taken += before - left();
        for (int i = 0; i < GRIDS; i += 4) Cblacs_gridexit(grids[i]);
        for (int i = 1; i < GRIDS; i += 4) Cblacs_gridexit(grids[i]);
        wrong += multiply(2, 4) + multiply(3, 4);
        for (int i = 2; i < GRIDS; i += 4) Cblacs_gridexit(grids[i]), Cblacs_gridexit(grids[i + 1]);
    }
    if (rank == 0) printf("%d wrong, %d taken\n", wrong, taken);
    MPI_Finalize();
    return 0;
}
