# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/kohn_sham.py
"""A Kohn-Sham-like problem: a chain of atoms in one dimension, in a basis of Gaussians, until it is self-consistent.

Each cycle solves H C = S C diag(e) for the occupied orbitals: a generalized eigenproblem on CPU ranks. Above a basis of
200 functions that takes a ScaLAPACK (see the page on solving systems):

    mpirun -n 16 python examples/kohn_sham.py --atoms 400 --cycles 10

Prints:
    the eigenpairs of the last cycle are right
    the density has all electrons
    the energy has converged
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import pblasmp as pb

parser = argparse.ArgumentParser()
parser.add_argument("--atoms", type=int, default=8, help="an even number, with an electron each")
parser.add_argument("--cycles", type=int, default=40)
parser.add_argument("--block", type=int, default=32)
args = parser.parse_args()

APART, PER_ATOM, WIDTH, FINE = 2.0, 10, 0.2, 4  # of atoms; functions; of a Gaussian; grid points per function
electrons = args.atoms
size, spacing = args.atoms * PER_ATOM, APART / PER_ATOM
count, dx = (size + 40) * FINE, spacing / FINE  # of grid points, which go beyond the last functions
centers = spacing * np.arange(size)
grid = dx * (np.arange(count) - 20 * FINE)
atoms = APART * (np.arange(args.atoms) + 0.5) - spacing / 2


def soft(x):
    return 1 / np.sqrt(x * x + 1)


def overlap(i, j):
    return np.exp(-(((centers[i] - centers[j]) / (2 * WIDTH)) ** 2))


def kinetic(i, j):
    far = ((centers[i] - centers[j]) / (2 * WIDTH)) ** 2
    return (1 - 2 * far) / (4 * WIDTH**2) * np.exp(-far)


def gaussian(i, j):
    norm = (np.pi * WIDTH**2) ** -0.25
    return norm * np.exp(-0.5 * ((grid[i] - centers[j]) / WIDTH) ** 2)


def with_rows_times(phi, values):
    """Return a copy of a matrix whose rows are multiplied by numbers that every rank has."""
    found = phi.copy()
    if found.local.size:
        rows, _ = found.descriptor.global_indices(found.context.rank)
        found.local[...] *= values[rows][:, None]
    return found


with pb.Context(engine="host") as ctx:
    square, on_grid = {"block": args.block, "order": "F"}, {"block": args.block, "order": "F"}
    s = ctx.from_function(overlap, (size, size), **square)
    t = ctx.from_function(kinetic, (size, size), **square)
    phi = ctx.from_function(gaussian, (count, size), **on_grid)  # the basis at the points of the grid
    coulomb = ctx.from_function(lambda i, j: soft(grid[i] - grid[j]) * dx, (count, count), **on_grid)
    nuclei = -soft(grid[:, None] - atoms).sum(1)

    density, energy, change, seconds = np.zeros(count), np.inf, np.inf, 0.0
    for cycle in range(args.cycles):
        repelled = pb.matmul(coulomb, ctx.scatter(density[:, None], block=args.block)).allgather()[:, 0]
        exchange = -((3 / np.pi * density) ** (1 / 3))
        potential = nuclei + repelled + exchange
        h = pb.matmul(phi, with_rows_times(phi, potential * dx), t, op_a="T", beta=1)  # T + V

        start = time.perf_counter()
        values, orbitals = pb.linalg.eigh(h, s, subset_by_index=(0, electrons // 2 - 1))
        seconds = time.perf_counter() - start

        psi = pb.matmul(phi, orbitals)
        found = 2 * (psi * psi).sum(axis=1)
        before, energy = energy, 2 * values.sum() - dx * ((0.5 * repelled + 0.25 * exchange) * density).sum()
        change = abs(energy - before)
        density = found if cycle == 0 else 0.7 * density + 0.3 * found
        if change < 1e-7 * abs(energy):
            break

    right = pb.verify(pb.linalg.eigh, h, s, found=(values, orbitals))
    if ctx.rank == 0:
        print("the eigenpairs of the last cycle are right" if right else f"{right}")
        held = dx * density.sum()
        print(
            "the density has all electrons"
            if abs(held - electrons) < 1e-3 * electrons
            else f"{held} electrons"
        )
        print(
            "the energy has converged" if change < 1e-4 * abs(energy) else f"the energy changes by {change}"
        )
        print(
            f"{size} functions, {cycle + 1} cycles, energy {energy:.6f}; the last eigh took {seconds:.3f} s"
        )
