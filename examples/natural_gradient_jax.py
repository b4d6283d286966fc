# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 2 python examples/natural_gradient_jax.py
"""Natural-gradient steps of a JAX model: J is a jax.Array whose rows, one per sample, are split over the processes.

The step (J^T J / N + damping)^-1 J^T r / N is found from the smaller matrix J J^T / N + damping, with a row for each
sample, which pblasmp makes and factors over all processes. J is used where JAX has it. On two GPUs, with JAX for
CUDA:

    mpirun -n 2 python examples/natural_gradient_jax.py --samples 8192 --width 256 --steps 10 --damping 0.01

Prints:
    the loss has fallen by a factor of 100
"""

from __future__ import annotations

import argparse
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pblasmp as pb

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=200)
parser.add_argument("--width", type=int, default=24)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--damping", type=float, default=1e-4)
args = parser.parse_args()


def start_jax(ctx):
    """Make JAX's processes of the context's ranks."""
    jax.config.update("jax_enable_x64", True)
    address = None
    if ctx.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{socket.gethostname()}:{free.getsockname()[1]}"
    device = getattr(ctx.engine, "device", None)
    local = None if device is None else [device.index]
    jax.distributed.initialize(ctx.comm.bcast(address), ctx.size, ctx.rank, local_device_ids=local)


def model(parameters, x):
    for w, b in parameters[:-1]:
        x = jnp.tanh(w @ x + b)
    w, b = parameters[-1]
    return (w @ x + b)[0]


def initial(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (out, into)) / np.sqrt(into), jnp.zeros(out))
        for k, into, out in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


with pb.Context() as ctx:
    start_jax(ctx)
    theta, unravel = ravel_pytree(initial(jax.random.key(0), (2, args.width, args.width, 1)))

    def output(theta, x):
        return model(unravel(theta), x)

    outputs = jax.jit(jax.vmap(output, in_axes=(None, 0)))
    jacobian = jax.jit(
        jax.vmap(jax.grad(output), in_axes=(None, 0))
    )  # jacrev needs memory for samples x samples

    each = args.samples // ctx.size  # samples of this process
    n = each * ctx.size
    x = jax.random.uniform(jax.random.key(1), (n, 2), minval=-1, maxval=1)[ctx.rank * each :][:each]
    y = jnp.sin(3 * x[:, 0]) * jnp.cos(2 * x[:, 1])
    by_rows = NamedSharding(Mesh(np.array(jax.devices()), ("samples",)), PartitionSpec("samples", None))

    def whole(part):
        """Return the jax.Array that the processes have in parts."""
        return jax.make_array_from_single_device_arrays((n, part.shape[1]), by_rows, [part])

    losses = []
    for _ in range(args.steps):
        residual = outputs(theta, x) - y
        losses.append(sum(ctx.comm.allgather(float((residual**2).sum()))) / n)
        j = jax.block_until_ready(whole(jacobian(theta, x)))
        start = time.perf_counter()
        a = ctx.from_dlpack_shards(j)
        r = ctx.from_dlpack_shards(whole(residual[:, None]))
        kernel = pb.matmul(a, a, op_b="T", alpha=1 / n)
        kernel += args.damping * ctx.eye(kernel.descriptor)
        step = pb.matmul(a, pb.linalg.solve(kernel, r, assume_a="pos"), op_a="T", alpha=1 / n)
        theta = theta - jnp.asarray(step.allgather()[:, 0])
        seconds = time.perf_counter() - start

    if ctx.rank == 0:
        fallen = losses[-1] < losses[0] / 100
        print("the loss has fallen by a factor of 100" if fallen else f"losses: {losses}")
        print(f"{n} samples, {theta.size} parameters; the last step took {seconds:.3f} s")
    jax.distributed.shutdown()
