/* SPDX-License-Identifier: Apache-2.0 */
/* Level 1: vectors that are scaled or exchanged, and numbers that the ranks tell with their votes.
 *
 * ``engines/local/sums.py`` says what each rank tells. Sums are made in double precision.
 */
#include "call.h"

#include <math.h>

static int scale(call *c)
{
    if (c->to.active)
        BLAS(c, 4, SCAL)(INT(c->to.m), &c->factor, c->to.here.at, INT(along(c->to.here)));
    return OK;
}

int prepare_scaled(call *c)
{
    c->to = view_of(&c->d, 0, 0);
    c->compute = scale;
    return OK;
}

static int exchange(call *c)
{
    if (c->left != NULL) {
        take(c, c->left, &c->to);
        take(c, c->right, &c->x);
    } else if (c->x.active)
        BLAS(c, 5, SWAP)(INT(c->x.m), c->x.here.at, INT(along(c->x.here)), c->to.here.at, INT(along(c->to.here)));
    return OK;
}

int prepare_exchanged(call *c)
{
    REQUIRE(apart_but(c, NULL));
    c->x = view_of(&c->a, 0, 0), c->to = view_of(&c->d, 0, 0);
    if (!is_single(c) && !same_places(&c->x, &c->to)) {
        c->left = stage(c, &c->x, c->to.rows, c->to.cols, c->x.here.by_columns, (whose){&c->to, ROW, COL, 0});
        c->right = stage(c, &c->to, c->x.rows, c->x.cols, c->to.here.by_columns, (whose){&c->x, ROW, COL, 0});
    }
    c->compute = exchange;
    return OK;
}

/* -- numbers */

/* A vector of this rank: of real numbers, ``step`` from one to the next; imaginary parts follow real ones. */
typedef struct {
    const char *at;
    int64_t step, count;
    int is_double;
} reals;

static double element(const reals *x, int64_t i)
{
    return x->is_double ? ((const double *)x->at)[i * x->step] : (double)((const float *)x->at)[i * x->step];
}

static reals reals_of(const call *c, const view *v, int imaginary)
{
    int is_double = c->letter == D || c->letter == Z, width = c->letter >= C ? 2 : 1;
    return (reals){v->here.at + imaginary * (is_double ? 8 : 4), along(v->here) * width, v->m, is_double};
}

/* Sums of products of x with y, or of x's sizes: eight at a time, for processors that make several. */
static double sum_of_floats(reals x, reals y, int sizes)
{
    enum { LANES = 8 };
    const float *p = (const float *)x.at, *q = (const float *)y.at;
    double sums[LANES] = {0}, total = 0;
    int64_t i = 0;
    if (x.step == 1 && y.step == 1 && !sizes)
        for (; i + LANES <= x.count; i += LANES)
            for (int k = 0; k < LANES; k++)
                sums[k] += (double)p[i + k] * (double)q[i + k];
    for (; i < x.count; i++)
        total += sizes ? fabs(element(&x, i)) : element(&x, i) * element(&y, i);
    for (int k = 0; k < LANES; k++)
        total += sums[k];
    return total;
}

static double sum_of_products(const call *c, reals x, reals y)
{
    typedef double dot(arg, arg, arg, arg, arg);
    if (!x.is_double)
        return sum_of_floats(x, y, 0);
    return ((dot *)c->functions[c->letter][B_DOT])(INT(x.count), x.at, INT(x.step), y.at, INT(y.step));
}

static double sum_of_sizes(const call *c, reals x)
{
    typedef double asum(arg, arg, arg);
    if (!x.is_double)
        return sum_of_floats(x, x, 1);
    return ((asum *)c->functions[c->letter][B_ASUM])(INT(x.count), x.at, INT(x.step));
}

static double size_of(reals x, reals y, int is_complex, int64_t i)
{
    return is_complex ? fabs(element(&x, i)) + fabs(element(&y, i)) : fabs(element(&x, i));
}

/* The first of the largest elements, NaN being the largest. */
static int64_t largest(reals x, reals y, int is_complex)
{
    int64_t found = 0;
    double most = size_of(x, y, is_complex, 0);
    for (int64_t i = 1; i < x.count && most == most; i++) {
        double size = size_of(x, y, is_complex, i);
        if (!(size <= most))
            most = size, found = i;
    }
    return found;
}

int prepare_reduced(call *c)
{
    const view *x = &c->x, *y = &c->y;
    int is_complex = c->letter >= C;
    double *tells = c->tells;
    c->x = view_of(&c->a, 0, 0), c->y = c->b.of == NULL ? c->x : view_of(&c->b, 0, 0);
    REQUIRE(is_single(c) || same_places(x, y));
    for (int k = 0; k < 4; k++)
        tells[k] = 0;
    if (c->routine == AMAX)
        tells[0] = tells[1] = -1;
    c->told = c->routine == AMAX ? 4 : c->routine == ASUM || (c->routine != NRM2 && !is_complex) ? 1 : 2;
    if (!x->active)
        return OK;
    reals re = reals_of(c, x, 0), im = reals_of(c, x, 1), re_y = reals_of(c, y, 0), im_y = reals_of(c, y, 1);
    double sign = c->routine == DOTC ? 1 : -1; /* of the product of imaginary parts */
    switch (c->routine) {
    case DOT:
    case DOTC:
        tells[0] = sum_of_products(c, re, re_y);
        if (is_complex) {
            tells[0] += sign * sum_of_products(c, im, im_y);
            tells[1] = sum_of_products(c, re, im_y) - sign * sum_of_products(c, im, re_y);
        }
        break;
    case NRM2:
        tells[1] = sum_of_products(c, re, re) + (is_complex ? sum_of_products(c, im, im) : 0);
        if (!(tells[1] > 0x1p-800 && tells[1] < 0x1p1000))
            return BY_PYTHON; /* it may have lost something */
        break;
    case ASUM:
        tells[0] = sum_of_sizes(c, re) + (is_complex ? sum_of_sizes(c, im) : 0);
        break;
    default: {
        int64_t at = largest(re, im, is_complex);
        tells[0] = size_of(re, im, is_complex, at);
        tells[1] = (double)span_at_place(&x->rows, x->row, at);
        tells[2] = element(&re, at);
        tells[3] = is_complex ? element(&im, at) : 0;
    }
    }
    return OK;
}
