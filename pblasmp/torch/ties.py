# SPDX-License-Identifier: Apache-2.0
"""Parameters that several modules share, when styles replace them: what was one parameter stays one."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError


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

    Args:
        whole: the parameter that is replaced.
        split: what would take its place in this module.
        dim: the dimension along which ``split`` is split; None if every rank has all of it.
        style: the name of the style that asks.

    Raises:
        ArgumentError: another module shares it, and there it is split along another dimension or over other ranks.
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
