# SPDX-License-Identifier: Apache-2.0
"""Random values of split tensors: each rank keeps its part of the numbers that one process would draw.

The CPU's generator has to draw all numbers in order, so every rank draws them all, but holds few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, _random
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ArgumentError
from ..tensor_parallel import shard

_AT_ONCE = 2**18  # numbers drawn at a time
_TOGETHER = 16  # torch.Tensor.normal_ on the CPU draws in groups of 16


def fill_part(
    part: Tensor, shape: Sequence[int], dim: int | None, mine: slice, draw: Callable[[Tensor], object]
) -> None:
    """Fill a part of a tensor with the numbers that ``draw`` gives to the whole one. Local.

    Args:
        part: (..., stop - start, ...), on any device.
        shape: of the whole tensor.
        dim: the dimension that is split; None if the part is the whole tensor.
        mine: the indices along ``dim`` that the part has.
        draw: fills a contiguous tensor of the CPU in place, in order, as ``uniform_`` and ``normal_`` do.
    """
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if not rows * width:
        return
    step = _TOGETHER // math.gcd(width, _TOGETHER)
    block = max(1, _AT_ONCE // width // step) * step
    first = 0
    while first < rows:
        last = first + block if first + block + step <= rows else rows
        numbers = torch.empty((last - first, *shape[1:]), dtype=part.dtype, device="cpu")
        draw(numbers)
        if dim:
            part[first:last].copy_(numbers[(slice(None),) * dim + (mine,)])
        else:
            kept = mine if dim == 0 else slice(0, rows)
            start, stop = max(first, kept.start), min(last, kept.stop)
            if start < stop:
                part[start - kept.start : stop - kept.start].copy_(numbers[start - first : stop - first])
        first = last


_FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class _Draws(TorchDispatchMode):
    """Lets ``uniform_`` and ``normal_`` of one rank's part draw the numbers of the whole tensor."""

    def __init__(self, spec: Any, generator: torch.Generator | None) -> None:
        super().__init__()
        self._spec, self._generator = spec, generator

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how, (placement,) = dict(kwargs or {}), self._spec.placements
        if self._generator is not None:
            how["generator"] = self._generator
        if func not in _FILLS or not isinstance(placement, Shard):
            return func(*args, **how)
        part, *options = args
        mesh, shape = self._spec.mesh, self._spec.shape
        mine = shard(shape[placement.dim], mesh.size(), mesh.get_local_rank())
        fill_part(part, shape, placement.dim, mine, lambda numbers: func(numbers, *options, **how))
        return part


class _Tracker(_random.OffsetBasedRNGTracker):
    """What DTensors ask how ranks draw: PyTorch has an answer for GPUs, this one adds the CPU meshes of contexts."""

    def __init__(self, others: Any) -> None:
        self._others, self._use_distribute_region = others, True

    def _of_gpus(self, spec: Any) -> Any:
        if self._others is None:
            self._others = _random.OffsetBasedRNGTracker(spec.mesh)
        return self._others

    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> AbstractContextManager[Any]:
        if spec.mesh in _meshes:
            return _Draws(spec, generator)
        if spec.mesh.device_type == "cpu":
            return nullcontext()
        region: AbstractContextManager[Any] = self._of_gpus(spec)._distribute_region(spec, generator)
        return region

    def _compute_rng_offsets(self, spec: Any) -> Any:
        return self._of_gpus(spec)._compute_rng_offsets(spec)


class _Streams(TorchDispatchMode):
    """Fills a part of a tensor when ``uniform_`` or ``normal_`` fills the whole one, which is on the meta device."""

    def __init__(self, fill: Callable[[Callable[[Tensor], object]], None]) -> None:
        super().__init__()
        self._fill, self.drawn = fill, False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FILLS:
            return func(*args, **(kwargs or {}))
        whole, *options = args
        self._fill(lambda numbers: func(numbers, *options, **(kwargs or {})))
        self.drawn = True
        return whole


@torch.no_grad()
def initialize(parameter: Tensor, function: Callable[..., object], /, *args: Any, **how: Any) -> Tensor:
    """Fill a split parameter with its part of what ``function`` gives to the whole one, and return it. Local.

    ``function(tensor, *args, **how)`` is of ``torch.nn.init`` or one like it. It draws on the CPU, so the numbers are
    those of one process with the same seed, on CPUs and GPUs and on any number of ranks, whose generators have to be in
    step. What only fills by ``uniform_`` or ``normal_`` draws some numbers at a time; anything else, such as
    ``orthogonal_``, gets a whole tensor for a moment.

    Args:
        parameter: of a layer, or any DTensor on a mesh of one dimension; a plain tensor is one part.
        function: fills a tensor in place.
        *args, **how: passed on.

    Raises:
        ArgumentError: the parameter is on a mesh of several dimensions.
    """
    part, dim, mine = parameter, None, slice(None)
    if isinstance(parameter, DTensor):
        if len(parameter.placements) != 1:
            raise ArgumentError(
                f"parameter: on {parameter.device_mesh}, expected one dimension: initialize before fully_shard"
            )
        part, (placement,), mesh = parameter.to_local(), parameter.placements, parameter.device_mesh
        if isinstance(placement, Shard):
            dim = placement.dim
            mine = shard(parameter.shape[dim], mesh.size(), mesh.get_local_rank())
    if part.is_meta or not parameter.numel():
        return parameter
    streams = _Streams(lambda draw: fill_part(part, parameter.shape, dim, mine, draw))
    with streams:
        function(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), *args, **how)
    if not streams.drawn:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        function(whole, *args, **how)
        part.copy_(whole if dim is None else whole[(slice(None),) * dim + (mine,)])
    return parameter


_meshes: set[DeviceMesh] = set()


def draw_whole_on(mesh: DeviceMesh | None) -> None:
    """Let ``torch.nn.init`` fill DTensors of a CPU mesh with the whole tensor's numbers. Local.

    Without it every rank draws the numbers of its part from its own generator: the same ones on ranks seeded alike.
    """
    if mesh is None or mesh.device_type != "cpu":
        return
    _meshes.add(mesh)
    if not isinstance(_random._rng_tracker, _Tracker):
        _random._rng_tracker = _Tracker(_random._rng_tracker)
