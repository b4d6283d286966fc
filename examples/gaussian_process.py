# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/gaussian_process.py
"""An exact Gaussian process: likelihood, its gradient, and a prediction, from one Cholesky factor of the kernel matrix.

No inducing points and no random traces. Of n points it takes 8 n² bytes for the factor; elements are computed in slabs
of columns, and the derivative of the kernel matrix never exists as a whole. On two GPUs:

    mpirun -n 2 python examples/gaussian_process.py --points 100000 --slab 8192 --block 1024

Prints:
    the logarithm of the determinant is that of slogdet
    the gradient agrees with difference quotients
    the prediction is within 0.1 of the truth
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import pblasmp as pb

parser = argparse.ArgumentParser()
parser.add_argument("--points", type=int, default=500)
parser.add_argument("--slab", type=int, default=150, help="columns whose elements are computed at a time")
parser.add_argument("--block", type=int, default=64)
args = parser.parse_args()

n, small = args.points, args.points <= 1000
rng = np.random.default_rng(0)
points = rng.uniform(0, 10, (n, 2))  # the same on every rank
noise, length, scale = 0.1, 1.5, 0.8  # of the noise relative to the signal, of the kernel, of both


def truth(x):
    return np.sin(x[:, :1]) * np.cos(0.5 * x[:, 1:])


def squared_distances(x, y):
    far = x @ (-2 * y.T)
    far += (x * x).sum(1)[:, None]
    far += (y * y).sum(1)
    return np.maximum(far, 0, out=far)


def kernel(x, y, length):
    far = squared_distances(x, y)
    far *= -0.5 / length**2
    return np.exp(far, out=far)


def derivative(x, y, length):
    """Return the derivative of the kernel by the logarithm of its length."""
    far = squared_distances(x, y) / length**2
    values = np.exp(-0.5 * far)
    values *= far
    return values


def in_slabs(n):
    """Yield the columns of slabs."""
    for first in range(0, n, args.slab):
        yield slice(first, min(first + args.slab, n))


def factored(ctx, layout, length):
    """Return the Cholesky factor of the kernel matrix of all points with noise; its scale is left out."""
    xp = ctx.engine.xp  # CuPy on GPUs, which then compute the elements
    known = xp.asarray(points)
    k = ctx.empty(layout)
    for columns in in_slabs(n):

        def elements(i, j, of=columns.start):
            values = kernel(known[xp.asarray(i[:, 0])], known[xp.asarray(of + j[0])], length)
            _, *diagonal = np.intersect1d(i, of + j, return_indices=True)
            values[tuple(map(xp.asarray, diagonal))] += noise**2
            return values

        slab = k[:, columns]
        slab[...] = ctx.from_function(
            elements, slab.descriptor
        )  # a copy on each rank: it is laid out like the slab
    return pb.linalg.cholesky(k, out=k)  # in the place of K, above whose diagonal nothing is read again


def likelihood(factor, y, scale):
    """Return the logarithm of the likelihood, and K^-1 y."""
    alpha = pb.linalg.cho_solve((factor, True), y) / scale**2
    fit = float(pb.matmul(y, alpha, op_a="T").trace())
    logdet = 2 * np.log(factor.diagonal()).sum() + 2 * n * np.log(scale)
    return -0.5 * (fit + logdet + n * np.log(2 * np.pi)), alpha


def gradient(ctx, factor, y, alpha, length, scale):
    """Return the gradient of the likelihood by the logarithms of the length and of the scale."""
    quadratic = trace = 0.0
    xp = ctx.engine.xp
    known = xp.asarray(points)
    for columns in in_slabs(n):
        slab = ctx.from_function(
            lambda i, j, of=columns.start: derivative(
                known[xp.asarray(i[:, 0])], known[xp.asarray(of + j[0])], length
            ),
            (n, columns.stop - columns.start),
            block=args.block,
            grid=factor.descriptor.grid,
            order="F",
        )
        along = pb.matmul(slab, alpha, op_a="T")
        quadratic += float(pb.matmul(alpha[columns, :], along, op_a="T").trace())
        pb.linalg.cho_solve((factor, True), slab, out=slab)
        trace += slab[columns, :].trace()
    by_scale = float(pb.matmul(y, alpha, op_a="T").trace()) - n
    return 0.5 * (scale**2 * quadratic - trace), by_scale


with pb.Context() as ctx:
    grid = pb.Grid(1, ctx.size)
    layout = pb.MatrixDescriptor((n, n), (args.block, args.block), grid, order="F")
    column = pb.MatrixDescriptor((n, 1), (args.block, args.block), grid, order="F")
    observed = truth(points) + noise * scale * rng.standard_normal((n, 1))
    y = ctx.from_function(lambda i, j: observed[i, j], column)

    start = time.perf_counter()
    factor = factored(ctx, layout, length)
    value, alpha = likelihood(factor, y, scale)
    mean = time.perf_counter()
    slopes = gradient(ctx, factor, y, alpha, length, scale)
    end = time.perf_counter()

    places = rng.uniform(1, 9, (100, 2))
    across = ctx.from_function(
        lambda i, j: scale**2 * kernel(places[i[:, 0]], points[j[0]], length),
        (100, n),
        block=args.block,
        grid=grid,
    )
    predicted = pb.matmul(across, alpha).allgather()
    off = abs(predicted - truth(places)).max()
    if ctx.rank == 0:
        print(f"{n} points: log likelihood {value:.6g}, gradient {slopes[0]:.6g}, {slopes[1]:.6g}")
        print(f"likelihood {mean - start:.2f} s, gradient {end - mean:.2f} s")
    if small:
        whole = ctx.from_function(
            lambda i, j: kernel(points[i[:, 0]], points[j[0]], length) + noise**2 * (i == j), layout
        )
        logdet = pb.linalg.slogdet(whole)[1]
        same = abs(logdet - 2 * np.log(factor.diagonal()).sum()) < 1e-6 * abs(logdet)
        step, close = 1e-5, True
        for i, slope in enumerate(slopes):
            ahead, behind = (
                likelihood(
                    factored(ctx, layout, length * np.exp(h * (i == 0))), y, scale * np.exp(h * (i == 1))
                )[0]
                for h in (step, -step)
            )
            close &= abs((ahead - behind) / (2 * step) - slope) < 1e-4 * abs(slope)
        if ctx.rank == 0:
            print("the logarithm of the determinant is that of slogdet" if same else f"slogdet: {logdet}")
            print("the gradient agrees with difference quotients" if close else "the gradient is wrong")
    if ctx.rank == 0:
        print("the prediction is within 0.1 of the truth" if off < 0.1 else f"the prediction is off by {off}")
