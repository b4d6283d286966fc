# SPDX-License-Identifier: Apache-2.0
"""Matrices over arrays of other libraries that the ranks have in parts, and the way back; JAX's if it is installed."""

import socket
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.tensor_parallel import shard
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import only_long


class Shared:
    """An array that can do nothing but share its memory."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@on_ranks(1, 3, *only_long(2, 4, 5, 6))
def test_parts(ctx):
    """Parts of rows and of columns that come out even or not, of both orders and of several types."""
    for rows, axis, order in ((12, 0, "C"), (7, 0, "F"), (7, 1, "C"), (1, 1, "F"), (0, 0, "C"), (2, 0, "C")):
        dtype = ("float64", "complex64", "float32")[rows % 3]
        whole = np.arange(rows * 5).reshape(rows, 5).astype(dtype)
        mine = whole[shard(rows, ctx.size, ctx.rank)].copy()
        if axis:
            whole, mine = whole.T, mine.T
        mine = np.asarray(mine, order=order)
        x = ctx.from_dlpack_shards(Shared(mine), axis=axis)
        name = f"{rows} {axis} {order}"
        assert np.array_equal(x.allgather(), whole), name
        assert x.dtype == dtype, name
        mine[:1, :1] = 77
        assert (x.local[:1, :1] == 77).all(), f"{name} no copy: a copy"
        back = x.to_dlpack_shard(axis)
        assert np.array_equal(back, mine), f"{name} back"
        assert back.flags.c_contiguous, f"{name} back"
        same = order == "F" or not mine.size or np.shares_memory(back, mine)
        assert same, f"{name} the same memory: a copy"
    whole = np.random.default_rng(1).standard_normal((9, 7))
    for part in (slice(None), slice(2, 8)):
        x = ctx.scatter(whole, block=2)[part, :5]
        for axis in (0, 1):
            n = x.shape[axis]
            found, at = x.to_dlpack_shard(axis), shard(n, ctx.size, ctx.rank)
            expected = whole[part, :5][at] if axis == 0 else whole[part, :5][:, at]
            assert np.array_equal(found, expected), f"moved {part} {axis}"
    faults(ctx)


def faults(ctx):
    one, last = np.zeros((2, 3)), ctx.rank == ctx.size - 1
    shards = ctx.from_dlpack_shards
    for words, kind, args in (
        (["axis: expected 0 or 1, got 2"], pb.ArgumentError, (one, 2)),
        (["axis: expected 0 or 1, got True"], pb.ArgumentError, (one, True)),
        (["expected a NumPy array", "got builtins.list"], pb.ArgumentError, ([[1.0]],)),
        (["shard: ", "(2 dimensions), got 1"], pb.ArgumentError, (np.zeros(3),)),
        (["int64"], pb.ArgumentError, (np.zeros((2, 3), int),)),
        (
            ["shard: expected C order on all ranks, or F order", "the ranks have neither"],
            pb.ArgumentError,
            (np.zeros((4, 6))[::2, ::2],),
        ),
    ):
        refuses(ctx, kind, words, shards, *args)
    refuses(ctx, pb.ArgumentError, ["float64, expected float32"], partial(shards, one, dtype="f4"))
    if ctx.size > 1:
        more = np.zeros((3, 3)) if last else one
        words = [
            "shard: the ranks have shapes (2, 3), ",
            "(3, 3): expected as many columns on every rank, and as many rows",
        ]
        refuses(ctx, pb.LayoutError, words, shards, more)
        refuses(ctx, pb.LayoutError, ["(2, 4): expected as many columns on"], shards, np.zeros((2, 3 + last)))
        kinds = one.astype("float32") if last else one
        refuses(ctx, pb.RankMismatchError, ["dtype"], shards, kinds)
        refuses(ctx, pb.RankMismatchError, ["axis"], shards, one, int(last))
        orders = np.asarray(np.zeros((2, 3)), order="F" if last else "C")
        refuses(ctx, pb.LayoutError, ["C order on all ranks", "ranks have C", ", F: "], shards, orders)
    x = ctx.zeros((3, 3), block=1)
    refuses(ctx, pb.ArgumentError, ["axis: expected 0 or 1"], x.to_dlpack_shard, "0")


def jax_arrays(comm, port):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank)
    try:
        with pb.Context(comm, engine="host") as ctx:
            mesh = Mesh(np.array(jax.devices()), ("x",))
            for spec, axis in ((PartitionSpec("x", None), 0), (PartitionSpec(None, "x"), 1)):
                whole = np.arange(24.0).reshape(6, 4)
                sharding = NamedSharding(mesh, spec)
                a = jax.make_array_from_callback(whole.shape, sharding, lambda index, of=whole: of[index])
                x = ctx.from_dlpack_shards(a)
                assert np.array_equal(x.allgather(), whole), f"{spec}: {x.local}"
                own = ctx.from_dlpack_shards(a.addressable_shards[0].data, axis)
                assert np.array_equal(own.allgather(), whole), f"{spec} of one device: {own.local}"
                narrow = a.astype("bfloat16")  # which NumPy does not read by DLPack
                for each, of in ((x, a), (ctx.from_dlpack_shards(narrow), narrow)):
                    at = of.addressable_shards[0].data.unsafe_buffer_pointer()
                    right = each.local.ctypes.data == at and each.dtype == of.dtype
                    assert right, f"{spec} {of.dtype} no copy: a copy"
                words, everything = ["read-only"], (slice(None), slice(None))
                refuses(ctx, pb.ArgumentError, words, x.__setitem__, everything, 0)
                y = pb.matmul(x, x.T)[:, :4]  # block-cyclic, then as JAX has it
                part = jax.dlpack.from_dlpack(y.to_dlpack_shard(axis))
                b = jax.make_array_from_single_device_arrays(y.shape, sharding, [part])
                found = np.asarray(b.addressable_shards[0].data)
                expected = (whole @ whole.T)[:, :4][a.addressable_shards[0].index]
                assert np.array_equal(found, expected), f"{spec} back"
            everywhere = jax.make_array_from_callback(
                (2, 2), NamedSharding(mesh, PartitionSpec()), np.eye(2).__getitem__
            )
            words = ["a jax.Array that is replicated, expected one that is split along one axis"]
            refuses(ctx, pb.ArgumentError, words, ctx.from_dlpack_shards, everywhere)
            turned = NamedSharding(Mesh(np.array(jax.devices())[::-1], ("x",)), PartitionSpec("x"))
            a = jax.make_array_from_callback((4, 2), turned, np.ones((4, 2)).__getitem__)
            words = [
                "rank 0 has the rows from 2 on, expected those from 0 on",
                "in the order of the context's ranks",
            ]
            refuses(ctx, pb.LayoutError, words, ctx.from_dlpack_shards, a)
    finally:
        jax.distributed.shutdown()


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: pip install 'pblasmp[jax]'")
def test_jax():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_on_one_node(jax_arrays, 2, launch=True, port=port, timeout=120)
