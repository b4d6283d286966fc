/* SPDX-License-Identifier: Apache-2.0
   A ScaLAPACK program that knows nothing of pblasmp: S = G G^T + n I, its Cholesky factor L, and the worst entry of
   S - L L^T. Compile it with the MPI and the ScaLAPACK of the machine, and run it with pblasmp's products:

       mpicc scalapack_program.c -o program -lscalapack-mpich -lm
       pblasmp preload -- mpirun -n 4 ./program 2000 64 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void Cblacs_pinfo(int *rank, int *ranks);
void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int nprow, int npcol);
void Cblacs_gridinfo(int context, int *nprow, int *npcol, int *myrow, int *mycol);
void Cblacs_gridexit(int context);
void Cblacs_exit(int more);
int numroc_(int *n, int *nb, int *process, int *source, int *processes);
void descinit_(int *desc, int *m, int *n, int *mb, int *nb, int *rsrc, int *csrc, int *context, int *lld, int *info);
void pdgemm_(const char *transa, const char *transb, int *m, int *n, int *k, double *alpha, double *a, int *ia, int *ja,
             int *desca, double *b, int *ib, int *jb, int *descb, double *beta, double *c, int *ic, int *jc, int *descc);
void pdpotrf_(const char *uplo, int *n, double *a, int *ia, int *ja, int *desca, int *info);
double pdlange_(const char *norm, int *m, int *n, double *a, int *ia, int *ja, int *desca, double *work);

static int zero = 0, one = 1;

/* The global index, from 0, of a local one. */
static int global_of(int local, int nb, int process, int processes) {
    return (local / nb * processes + process) * nb + local % nb;
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 1000, nb = argc > 2 ? atoi(argv[2]) : 64;
    int rank, ranks, context, nprow, npcol, myrow, mycol, info, desc[9];
    Cblacs_pinfo(&rank, &ranks);
    for (nprow = (int)sqrt((double)ranks); ranks % nprow; nprow--) {}
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", nprow, ranks / nprow);
    Cblacs_gridinfo(context, &nprow, &npcol, &myrow, &mycol);
    int rows = numroc_(&n, &nb, &myrow, &zero, &nprow), cols = numroc_(&n, &nb, &mycol, &zero, &npcol);
    int lld = rows > 1 ? rows : 1;
    descinit_(desc, &n, &n, &nb, &nb, &zero, &zero, &context, &lld, &info);
    size_t count = (size_t)lld * (cols > 1 ? cols : 1);
    double *g = calloc(count, sizeof(double)), *s = calloc(count, sizeof(double)), *l = calloc(count, sizeof(double));
    for (int j = 0; j < cols; j++)
        for (int i = 0; i < rows; i++) {
            int row = global_of(i, nb, myrow, nprow), col = global_of(j, nb, mycol, npcol);
            g[i + (size_t)j * lld] = (row * 7 + col * 3) % 5 - 2;
            s[i + (size_t)j * lld] = row == col ? n : 0;
        }
    double plus = 1, minus = -1;
    pdgemm_("N", "T", &n, &n, &n, &plus, g, &one, &one, desc, g, &one, &one, desc, &plus, s, &one, &one, desc);
    for (size_t i = 0; i < count; i++) l[i] = s[i];
    pdpotrf_("L", &n, l, &one, &one, desc, &info);
    for (int j = 0; j < cols; j++)
        for (int i = 0; i < rows; i++)
            if (global_of(i, nb, myrow, nprow) < global_of(j, nb, mycol, npcol)) l[i + (size_t)j * lld] = 0;
    pdgemm_("N", "T", &n, &n, &n, &minus, l, &one, &one, desc, l, &one, &one, desc, &plus, s, &one, &one, desc);
    double worst = pdlange_("M", &n, &n, s, &one, &one, desc, NULL);
    if (rank == 0) printf("info %d, worst entry of S - L L^T %s\n", info, worst < 1e-10 * n ? "small" : "LARGE");
    Cblacs_gridexit(context);
    Cblacs_exit(0);
    return info != 0 || worst >= 1e-10 * n;
}
