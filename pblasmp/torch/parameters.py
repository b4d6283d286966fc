# SPDX-License-Identifier: Apache-2.0
"""Parameters split over ranks: DTensors, marked as Megatron's tools look for them, and the modules that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import ArgumentError, ArgumentTypeError
from ..tensor_parallel import shard
from ..tensor_parallel.plan import check_context
from .meshes import device_type, local, mesh_of, on_mesh

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["ParallelModule"]


class ParallelModule(torch.nn.Module):
    """A module whose parameters are split over the ranks of a context. Making one is collective over the context.

    Args:
        ctx: the ranks.
        device, dtype, device_mesh: as for the layers.
        **parameters: by name, the whole shape and the dimension that is split (None if every rank has all of it);
            None if there is no such parameter.
    """

    def __init__(
        self,
        ctx: Context,
        device: Any,
        dtype: Any,
        device_mesh: DeviceMesh | None,
        **parameters: tuple[Sequence[int], int | None] | None,
    ) -> None:
        super().__init__()
        check_context(ctx, type(self).__name__)
        self.ctx = ctx
        self._split_along = {name: given[1] for name, given in parameters.items() if given is not None}
        if device is None:
            gpu = getattr(ctx.engine, "device", None)
            device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu.index)
        mesh = mesh_of(ctx) if device_mesh is None else _fitting(device_mesh, ctx)
        for name, given in parameters.items():
            if given is None:
                self.register_parameter(name, None)
                continue
            shape, dim = given
            mine = list(shape)
            if dim is not None:
                part = shard(shape[dim], ctx.size, ctx.rank)
                mine[dim] = part.stop - part.start
            values = torch.empty(mine, device=device, dtype=dtype)
            placement = Replicate() if dim is None else Shard(dim)
            parameter: Any = torch.nn.Parameter(on_mesh(values, mesh, placement, shape))
            parameter.tensor_model_parallel = dim is not None  # Megatron's names
            parameter.partition_dim = -1 if dim is None else dim
            parameter.partition_stride = 1
            self.register_parameter(name, parameter)

    def _part(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's part of the values of a whole parameter. Local."""
        dim = self._split_along[name]
        if dim is None:
            return whole
        mine = shard(whole.shape[dim], self.ctx.size, self.ctx.rank)
        return whole[(slice(None),) * dim + (mine,)]

    @torch.no_grad()
    def _take_of_root(self, name: str, whole: Tensor) -> None:
        """Take this rank's part of values that rank 0 has. Collective over the context."""
        values = whole.detach().to("cpu", copy=True).contiguous()
        self.ctx.comm.bcast_into(values.view(torch.uint8).numpy(), 0)
        local(getattr(self, name)).copy_(self._part(values, name))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Accept whole tensors and shards of this rank as well as DTensors. Local."""
        for name, parameter in self._parameters.items():
            given: Any = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and type(given) in (Tensor, torch.nn.Parameter):
                mine = self._part(given, name) if given.shape == parameter.shape else given
                if mine.shape == parameter.to_local().shape:
                    mine, placement = mine.detach().to(parameter.device), parameter.placements[0]
                    state_dict[prefix + name] = on_mesh(
                        mine, parameter.device_mesh, placement, parameter.shape
                    )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _fitting(mesh: object, ctx: Context) -> DeviceMesh:
    """Return a device mesh of the context's ranks, or raise ArgumentError. Local."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"device_mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1 or mesh.size() != ctx.size or mesh.get_local_rank() != ctx.rank:
        raise ArgumentError(
            f"device_mesh: {mesh}, expected one dimension of the context's {ctx.size} ranks, in their order"
        )
    if mesh.device_type != device_type(ctx):
        raise ArgumentError(
            f"device_mesh: device type is {mesh.device_type!r}, expected {device_type(ctx)!r}, "
            "where the context computes"
        )
    return mesh
