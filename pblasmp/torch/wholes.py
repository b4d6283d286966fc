# SPDX-License-Identifier: Apache-2.0
"""What a whole layer must be so that a split one loses nothing of it, and parameters that several layers share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError, ArgumentTypeError

_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))


def check_whole(module: Any, kind: type[torch.nn.Module], name: str) -> None:
    """Raise ArgumentError unless a layer has the parameters of ``kind``, nothing besides, and computes what it does.

    Local. The kind is torch.nn.Linear or torch.nn.Embedding.
    """
    if (
        type(module).forward is not kind.forward
        or type(module).__call__ is not torch.nn.Module.__call__
        or "forward" in vars(module)
    ):
        raise ArgumentTypeError(
            f"{name}: expected a torch.nn.{kind.__name__}, got {type(module).__name__}, which overrides forward"
        )
    faults = list(_faults(module, kind))
    if faults:
        raise ArgumentError(f"{name}: of this {type(module).__name__} {'; '.join(faults)}")


def _faults(module: Any, kind: type[torch.nn.Module]) -> Iterator[str]:
    expected = {"weight", "bias"} if kind is torch.nn.Linear else {"weight"}
    held = {name for name, value in module._parameters.items() if value is not None}
    children = [name for name, child in module._modules.items() if child is not None]
    given = module._parameters
    computed = sorted(x for x in expected if x not in given or getattr(module, x) is not given[x])
    if computed:
        others = sorted(held - expected)
        found = f" from {', '.join(others)}" if others else ""
        yield (
            f"{' and '.join(computed)} is computed{found}, not a parameter: make it one again before, as "
            "torch.nn.utils.parametrize.remove_parametrizations, prune.remove, remove_weight_norm and "
            "remove_spectral_norm do"
        )
    elif held - expected:
        yield f"the parameters {', '.join(sorted(held - expected))} would be lost: remove them before"
    children = [name for name in children if name != "parametrizations"]
    if children:
        yield (
            f"the children {', '.join(children)} would be lost: merge them into weight before, or keep them in a "
            "module around the layer"
        )
    own = [(name, given[name]) for name in sorted(held & expected)]
    for name, parameter in own:
        if type(parameter) is not torch.nn.Parameter:
            lazy = torch.nn.parameter.is_lazy(parameter)
            yield (
                f"{name} is a {type(parameter).__name__}, expected a plain torch.nn.Parameter"
                + (": call the layer once before, which makes it one" if lazy else "")
            )
    if not computed and len({(each.dtype, each.device) for _, each in own}) > 1:
        found = ", ".join(f"{name} is {each.dtype} on {each.device}" for name, each in own)
        yield f"{found}: expected one type and one device"


def check_parameters(module: torch.nn.Module, name: str, *, in_place: bool) -> None:
    """Raise ArgumentError if hooks of a module's parameters would be lost, or with ``in_place`` gradients. Local."""
    for each, parameter in module._parameters.items():
        if parameter is None:
            continue
        held: Any = parameter
        if held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"{name}: the hooks of {each} of this {type(module).__name__} would be lost: register them on the "
                "split parameter"
            )
        if in_place and held.grad is not None:
            raise ArgumentError(
                f"{name}: the gradient of {each} of this {type(module).__name__} would be lost: call "
                "zero_grad() before"
            )


def check_hooks(module: torch.nn.Module, name: str) -> None:
    """Raise ArgumentError if a module has hooks or buffers, which a new layer would not have. Local."""
    found = [each.strip("_").replace("_", " ") for each in _HOOKS if getattr(module, each)]
    buffers = [each for each, value in module._buffers.items() if value is not None]
    found += [f"buffers {', '.join(buffers)}"] if buffers else []
    if found:
        raise ArgumentError(
            f"{name}: the {' and '.join(found)} of this {type(module).__name__} would be lost: the styles of "
            "pblasmp.torch, which split a layer in place, keep them; or register them on the new layer"
        )


def check_keeps(
    module: torch.nn.Module, split: torch.nn.Module, kind: type[torch.nn.Module], name: str
) -> None:
    """Raise ArgumentError if what a subclass of ``kind`` or its user has added would be hidden by ``split``. Local."""
    plain = vars(kind(1, 1, device="meta")).keys()
    added = vars(module).keys() - plain
    for base in type(module).__mro__[: type(module).__mro__.index(kind)]:
        added |= {each for each in vars(base) if not each.startswith("__")} - {"extra_repr"}
    ours = vars(split).keys() - vars(torch.nn.Module()).keys()
    for base in type(split).__mro__[: type(split).__mro__.index(torch.nn.Module)]:
        ours |= vars(base).keys()
    hidden = sorted(added & ours)
    if hidden:
        raise ArgumentError(
            f"{name}: {', '.join(hidden)} of this {type(module).__name__} would be hidden by the "
            f"{type(split).__name__}'s: use other names"
        )


class _Tie(NamedTuple):
    """A split parameter that has taken the place of a whole one, perhaps in several modules."""

    parameter: torch.nn.Parameter
    dim: int | None
    style: str


_ties = WeakTensorKeyDictionary()
"""By a whole parameter, what has taken its place; as long as anything holds the whole one."""


def tied(
    whole: torch.nn.Parameter, split: torch.nn.Parameter, dim: int | None, style: str
) -> torch.nn.Parameter:
    """Return the parameter that takes a whole one's place: ``split``, or the one that already has. Local.

    ``split`` is split along ``dim``, None if every rank has all of it; the style asks. ArgumentError if another module
    shares the whole one, and there it is split along another dimension or over other ranks.
    """
    tie = _ties.get(whole)
    if tie is None:
        tie = _ties[whole] = _Tie(split, dim, style)
    if tie.dim != dim:
        ways = [
            "whole on every rank" if each is None else f"split along dimension {each}"
            for each in (tie.dim, dim)
        ]
        raise ArgumentError(
            f"{style}: a parameter of shape {tuple(whole.shape)} is tied to another module's, {ways[0]} by "
            f"{tie.style}; here it would be {ways[1]}. Tied parameters are split alike, as those of an Embedding by "
            "RowwiseParallel and of its head by ColwiseParallel"
        )
    if _mesh(tie.parameter) != _mesh(split):
        raise ArgumentError(
            f"{style}: a parameter of shape {tuple(whole.shape)} is tied to another module's, which is split over "
            f"{_mesh(tie.parameter)}; here it would be split over {_mesh(split)}"
        )
    return tie.parameter


def _mesh(parameter: torch.nn.Parameter) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def other_holders(whole: torch.nn.Parameter) -> list[str]:
    """Return the kinds of the modules that still have a parameter which was replaced in another module. Local."""
    return [
        type(found).__name__
        for found in gc.get_objects()
        if issubclass(type(found), torch.nn.Module)
        and any(parameter is whole for parameter in vars(found).get("_parameters", {}).values())
    ]
