# SPDX-License-Identifier: Apache-2.0
"""Matrices over DTensors, and DTensors over matrices: rows or columns, that come out even or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch.meshes import mesh_of
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks
from tests.helpers.torch_ranks import host


@on_ranks(2, 3)
def test_there_and_back(comm: Any) -> None:
    with host(comm) as ctx:
        mesh = mesh_of(ctx)
        assert mesh is not None
        for shape, axis in (((6, 4), 0), ((7, 5), 0), ((4, 7), 1), ((1, 3), 0), ((0, 3), 0)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
            tensor = distribute_tensor(whole, mesh, [Shard(axis)])
            x = ctx.from_dlpack_shards(tensor)
            name = f"{shape} {axis}"
            assert np.array_equal(x.allgather(), whole.numpy()), name
            tensor.to_local()[:1, :1] = -1
            assert (x.local[:1, :1] == -1).all(), f"{name} no copy"
            back = pt.to_dtensor(x, axis)
            assert isinstance(back, DTensor)
            placed = (back.placements, back.shape, back.device_mesh) == ((Shard(axis),), tensor.shape, mesh)
            same = back.to_local().data_ptr() == x.local.ctypes.data or not x.local.size
            assert placed, f"{name} back"
            assert same, f"{name} back"
            assert torch.equal(back.to_local(), tensor.to_local()), f"{name} back"
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.arange(20).reshape(5, 4).to(dtype)
            x = ctx.from_dlpack_shards(distribute_tensor(whole, mesh, [Shard(0)]))
            moved = pt.to_dtensor(x.redistribute(block=1, grid=(1, ctx.size)), 1).full_tensor()
            assert torch.equal(moved, whole), f"{dtype}"
            assert moved.dtype == dtype, f"{dtype}"
        square = distribute_tensor(torch.eye(4), mesh, [Replicate()])
        words = ["shard: a DTensor placed R", "expected Shard: redistribute it first"]
        refuses(ctx, pb.ArgumentError, words, ctx.from_dlpack_shards, square)
        gradients = distribute_tensor(torch.eye(4), mesh, [Shard(0)]).requires_grad_()
        words = ["shard: a gradient is required"]
        refuses(ctx, pb.ArgumentError, words, ctx.from_dlpack_shards, gradients)
        refuses(ctx, pb.ArgumentError, ["x: expected a DistributedMatrix"], pt.to_dtensor, whole)


def test_of_one_process() -> None:
    with pb.Context(engine="host") as ctx:
        x = ctx.from_dlpack_shards(torch.arange(6.0).reshape(2, 3))
        assert torch.equal(pt.to_dtensor(x, 1).full_tensor(), torch.arange(6.0).reshape(2, 3))
