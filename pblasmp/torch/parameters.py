# SPDX-License-Identifier: Apache-2.0
"""Parameters split over ranks: DTensors, marked as Megatron's tools look for them, and the modules that have them.

Initial values are parts of the numbers that one process would draw: the CPU's generator has to draw all in order, so
every rank draws them all, but holds few at a time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..tensor_parallel import shard
from ..tensor_parallel.call import check_context
from .meshes import device_type, is_of_ranks, local, mesh_of, on_mesh
from .wholes import check_hooks, check_parameters, check_whole, other_holders

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..comm import Agreement
    from ..context import Context

DRAWN_AT_ONCE = 2**18  # numbers
_TOGETHER = 16  # torch.Tensor.normal_ on the CPU draws in groups of 16


def fill_part(
    part: Tensor, shape: Sequence[int], dim: int | None, mine: slice, draw: Callable[[Tensor], object]
) -> None:
    """Fill a part of a tensor, on any device, with the numbers that ``draw`` gives to the whole one. Local.

    ``mine`` are the indices along ``dim`` that the part has; without a ``dim`` it is the whole. ``draw`` fills a
    contiguous tensor of the CPU in place, in order, as ``uniform_`` and ``normal_`` do.
    """
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if not rows * width:
        return
    step = _TOGETHER // math.gcd(width, _TOGETHER)
    block = max(1, DRAWN_AT_ONCE // width // step) * step
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
        ArgumentError: the parameter is no tensor, or on a mesh of several dimensions.
    """
    if not isinstance(parameter, Tensor) or not callable(function):
        given = f"{short_repr(parameter)} and {short_repr(function)}"
        raise ArgumentTypeError(
            f"initialize: expected a parameter and a function that fills tensors, got {given}"
        )
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


_SENT_AT_ONCE = 2**20  # elements, in one message


def agreed(ctx: Context, call: str) -> Agreement:
    """Return the agreement with which ranks make a layer; raise ArgumentError unless ``ctx`` is a context. Local."""
    check_context(ctx, call)
    return ctx.agreement(call)


class ParallelModule(torch.nn.Module):
    """A module whose parameters are split over the ranks of a context. Making one is collective over the context.

    PyTorch replaces parameters, and with them whatever is kept on them: what is known of a parameter is kept here, and
    Megatron's attributes are set again after each change.

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
        self.ctx = ctx
        self.made_by: tuple[Any, ...] | None = None  # the style that split it, and how
        self._replaced: dict[str, weakref.ref[torch.nn.Parameter]] = {}  # the whole ones, until the first use
        self._split_along = {name: given[1] for name, given in parameters.items() if given is not None}
        call = type(self).__name__
        with agreed(ctx, call):
            if device is None:
                gpu = getattr(ctx.engine, "device", None)
                device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu.index)
                if torch.get_default_device().type == "meta":  # with torch.device("meta")
                    device = torch.device("meta")
            fitting = None if device_mesh is None else _fitting(device_mesh, ctx)
        mesh = fitting or mesh_of(ctx)
        draw_whole_on(mesh)
        with ctx.agreement(call):  # there may be no memory
            for name, given in parameters.items():
                self.register_parameter(name, given and self._new(*given, device, dtype, mesh))

    def _new(
        self, shape: Sequence[int], dim: int | None, device: Any, dtype: Any, mesh: DeviceMesh | None
    ) -> torch.nn.Parameter:
        """Return a parameter without values: this rank's part. Local."""
        mine = list(shape)
        if dim is not None:
            part = shard(shape[dim], self.ctx.size, self.ctx.rank)
            mine[dim] = part.stop - part.start
        values = torch.empty(mine, device=device, dtype=dtype)
        placement = Replicate() if dim is None else Shard(dim)
        return torch.nn.Parameter(on_mesh(values, mesh, placement, shape))

    def _held(self, name: str) -> Any:
        """Return a parameter, or what PyTorch has put in its place. Local.

        As an attribute it is looked for among all others first, which takes as long as a call of a plan reads arrays.
        """
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    # -- what PyTorch does to parameters

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As of torch.nn.Module. Local."""
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        """Set Megatron's attributes of parameters. Local."""
        for name, dim in self._split_along.items():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter.tensor_model_parallel = dim is not None
                parameter.partition_dim = -1 if dim is None else dim
                parameter.partition_stride = 1

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Accept whole tensors and shards of this rank as well as DTensors. Local."""
        for name, parameter in self._parameters.items():
            given: Any = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and type(given) in (Tensor, torch.nn.Parameter):
                mine = self._part(given, name) if given.shape == parameter.shape else given
                if mine.shape == parameter.to_local().shape:
                    mine, placement = mine.detach(), parameter.placements[0]
                    if not local_metadata.get("assign_to_params_buffers"):
                        mine = mine.to(parameter.device)
                    state_dict[prefix + name] = on_mesh(
                        mine, parameter.device_mesh, placement, parameter.shape
                    )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        self._mark()

    def _check_ties(self) -> None:
        """Raise ArgumentError if a parameter was tied to a module's that has not been split. Collective if it fails."""
        if not self._replaced or torch.compiler.is_compiling():
            return
        held, self._replaced = self._replaced, {}
        for name, reference in held.items():
            whole = reference()
            others = other_holders(whole) if whole is not None else []
            if others:
                with self.ctx.agreement("pblasmp.torch"):
                    raise ArgumentError(
                        f"{name} of a {type(self).__name__} was tied to that of {', '.join(others)}, which is not "
                        "split: name that module in the plan, too"
                    )

    # -- values

    _whole_kind: type[torch.nn.Module]
    """What it is a part of: torch.nn.Linear or torch.nn.Embedding."""

    @classmethod
    def _whole_name(cls) -> str:
        return cls._whole_kind.__name__.lower()

    @classmethod
    def _check_whole(cls, whole: object, *, anew: bool = False) -> None:
        """Raise ArgumentError unless it is PyTorch's, with nothing that a layer made ``anew`` would lose. Local."""
        if not isinstance(whole, cls._whole_kind):
            kind = cls._whole_kind.__name__
            raise ArgumentTypeError(
                f"{cls._whole_name()}: expected a torch.nn.{kind}, got {type(whole).__name__}"
            )
        check_whole(whole, cls._whole_kind, cls._whole_name())
        if anew:
            check_parameters(whole, cls._whole_name(), in_place=False)
            check_hooks(whole, cls._whole_name())

    @classmethod
    def _of_whole(
        cls, whole: Any, ctx: Context, options: dict[str, Any], check: Callable[[object], None] | None = None
    ) -> Self:
        """Return this rank's shard of rank 0's whole module. Collective over the context.

        ``check`` raises ArgumentError if the module does not fit; by default it is what a new layer asks for.
        """
        check = check or partial(cls._check_whole, anew=True)
        if not root_has_values(ctx, f"{cls.__name__}.from_{cls._whole_name()}", whole, check):
            options["device"] = options.get("device") or torch.device("meta")
        made: Any = cls
        made = made(
            ctx=ctx,
            dtype=whole.weight.dtype,
            **{cls._whole_name(): whole},
            **cls._options_of_whole(whole),
            **options,
        )
        for name, parameter in made._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(getattr(whole, name).requires_grad)
        made.train(whole.training)
        return made  # type: ignore[no-any-return]

    @classmethod
    def _options_of_whole(cls, whole: Any) -> dict[str, Any]:
        """Return the options that follow from a whole module. Local."""
        raise NotImplementedError

    def _load_whole(self, whole: Any) -> None:
        """Take this rank's shard of the values of rank 0's whole module. Collective over the context."""
        call = f"load_{self._whole_name()}"
        with self.ctx.agreement(call) as facts:
            facts.update(layer=repr(self), dtype=str(self.weight.dtype))
            self._check_whole(whole)
            facts["meta"] = self.weight.is_meta
            given, mine = _described(whole), _described(self)
            if given != mine:
                raise ArgumentError(f"{self._whole_name()}: {given}, expected {mine}")
        if root_has_values(self.ctx, call, whole, self._check_whole) and not self.weight.is_meta:
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._take_of_root(name, getattr(whole, name))

    def _may_draw(self) -> bool:
        """Return whether there are values to draw: it is not on the meta device. Collective over the context."""
        with self.ctx.agreement("reset_parameters") as facts:
            facts.update(layer=repr(self), dtype=str(self.weight.dtype), meta=self.weight.is_meta)
        return not self.weight.is_meta

    def _mine(self, name: str, shape: Sequence[int]) -> tuple[int | None, slice]:
        """Return the dimension along which a parameter of this shape is split, and this rank's indices. Local."""
        dim = self._split_along[name]
        return dim, slice(None) if dim is None else shard(shape[dim], self.ctx.size, self.ctx.rank)

    def _part(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's part of the values of a whole parameter. Local."""
        dim, mine = self._mine(name, whole.shape)
        return whole if dim is None else whole[(slice(None),) * dim + (mine,)]

    @torch.no_grad()
    def _take_of_root(self, name: str, whole: Tensor) -> None:
        """Take this rank's part of values that rank 0 has; each rank gets only that. Collective over the context."""
        comm, dim = self.ctx.comm, self._split_along[name]
        part = local(getattr(self, name))
        if dim is None:
            values = torch.empty(part.shape, dtype=part.dtype, device="cpu")
            if not comm.rank:
                values.copy_(whole)
            comm.bcast_into(_bytes(values), 0)
            part.copy_(values)
            return
        if comm.rank:
            for rows in _rows_at_once(part):
                values = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
                self._wait(comm.irecv(_bytes(values), 0))
                rows.copy_(values)
            return
        part.copy_(self._part(whole, name))
        for rank in range(1, comm.size):
            theirs = whole.detach()[(slice(None),) * dim + (shard(whole.shape[dim], comm.size, rank),)]
            for rows in _rows_at_once(theirs):
                sent = rows.to("cpu").contiguous()
                self._wait(comm.isend(_bytes(sent), rank))

    def _wait(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self.ctx.comm.wait(request)

    @contextmanager
    def _generator_of_root(self) -> Iterator[torch.Generator]:
        """Draw with rank 0's generator of the CPU on every rank; generators in step stay so. Collective."""
        mine = torch.get_rng_state()
        state = mine.clone()
        self.ctx.comm.bcast_into(state.numpy(), 0)
        generator = torch.Generator()
        generator.set_state(state)
        yield generator
        if torch.equal(mine, state):
            torch.set_rng_state(generator.get_state())

    @torch.no_grad()
    def _draw(self, name: str, draw: Callable[[Tensor], object]) -> None:
        """Let ``draw`` fill a parameter: this rank's part of what it would give to the whole one. Local."""
        parameter = getattr(self, name)
        fill_part(local(parameter), parameter.shape, *self._mine(name, parameter.shape), draw)


def _described(module: Any) -> str:
    """Return sizes and types of a layer, whole or split, in words. Local."""
    (n, k), no_bias = module.weight.shape, getattr(module, "bias", module) is None
    return f"{n}x{k} {module.weight.dtype}{' without bias' if no_bias else ''}"


def root_has_values(ctx: Context, call: str, whole: torch.nn.Module, check: Callable[[object], None]) -> bool:
    """Return whether rank 0's whole module has values: it is not on the meta device. Collective over the context.

    What ``check`` raises on a rank is raised on every rank.
    """
    with agreed(ctx, call):
        check(whole)
    weight: Any = whole.weight
    empty: bool = ctx.comm.bcast(weight.is_meta)
    return not empty


def _bytes(values: Tensor) -> Any:
    return values.view(torch.uint8).numpy()


def _rows_at_once(values: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor, some at a time, unless it is empty. Local."""
    if values.numel():
        yield from values.split(max(1, _SENT_AT_ONCE * values.shape[0] // values.numel()))


def _fitting(mesh: object, ctx: Context) -> DeviceMesh:
    """Return a device mesh of the context's ranks, or raise ArgumentError. Local."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"device_mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if not is_of_ranks(mesh, ctx):
        raise ArgumentError(
            f"device_mesh: {mesh}, expected one dimension of the context's {ctx.size} ranks, in their order"
        )
    if mesh.device_type != device_type(ctx):
        raise ArgumentError(
            f"device_mesh: device type is {mesh.device_type!r}, expected {device_type(ctx)!r}, "
            "where the context computes"
        )
    return mesh
