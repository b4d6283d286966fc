# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: 8-bit products whose scales follow from the largest values of the steps before.

Source: Transformer Engine's recipe of the same name and its documentation; "FP8 Formats for Deep Learning"
(Micikevicius et al., 2022).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ArgumentError, short_repr
from ..layout.grid import integer, one_of

GRADIENT = 2  # the row of the gradient in a history; x and w are before it

_FORMATS = {
    "hybrid": (torch.float8_e4m3fn, torch.float8_e5m2),
    "e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
}
"""Of x and w, and of gradients."""
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class DelayedScaling(torch.nn.Module):
    """Products in 8 bits whose scales follow from the largest absolute values (amax) of earlier steps. Local.

    For ``scales=`` of the layers and functions; arguments and defaults are Transformer Engine's. A layer takes a copy,
    so that one recipe serves many layers; a function uses and updates what it is given. Scales and histories are the
    same on every rank of the context. They are updated in training mode, if gradients are enabled; in ``eval()`` and
    under ``torch.no_grad()`` they stay as they are.

    Args:
        margin: values are scaled to 2^margin below the largest of their 8-bit format.
        fp8_format: "hybrid": e4m3 forward, e5m2 for gradients; or "e4m3" for both.
        amax_history_len: how many steps are remembered.
        amax_compute_algo: "max": the scale follows from the largest amax remembered; "most_recent": from the newest.

    Attributes:
        amax_history: (3, amax_history_len), of x, w and the gradient of y, newest first; a buffer, so that checkpoints
            contain it. 0 if nothing was recorded.

    Raises:
        ArgumentError: an argument has another value.
    """

    amax_history: Tensor

    def __init__(
        self,
        *,
        margin: int = 0,
        fp8_format: Literal["hybrid", "e4m3"] = "hybrid",
        amax_history_len: int = 1024,
        amax_compute_algo: Literal["max", "most_recent"] = "max",
    ) -> None:
        super().__init__()
        self.margin = integer(margin, "margin", 0, ArgumentError)
        if self.margin > 64:
            raise ArgumentError(f"margin: expected an integer from 0 to 64, got {margin}")
        if not one_of(fp8_format, tuple(_FORMATS)):
            raise ArgumentError(f"fp8_format: expected 'hybrid' or 'e4m3', got {short_repr(fp8_format)}")
        if not one_of(amax_compute_algo, ("max", "most_recent")):
            raise ArgumentError(
                f"amax_compute_algo: expected 'max' or 'most_recent', got {short_repr(amax_compute_algo)}"
            )
        self.fp8_format, self.amax_compute_algo = fp8_format, amax_compute_algo
        length = integer(amax_history_len, "amax_history_len", 1, ArgumentError)
        self.register_buffer("amax_history", torch.zeros(GRADIENT + 1, length))
        self._fresh()

    def _fresh(self) -> None:
        """Forget what is known about the history: it may have been replaced. Local."""
        self.agreed = ""  # the name of the context whose ranks have found their histories to be equal
        self._recorded = False  # whether an amax of x and of w is known to be there

    @property
    def operands(self) -> torch.dtype:
        """The type of x and w in 8 bits."""
        return _FORMATS[self.fp8_format][0]

    @property
    def gradients(self) -> torch.dtype:
        """The type of gradients in 8 bits."""
        return _FORMATS[self.fp8_format][1]

    @property
    def scale(self) -> Tensor:
        """What the next x, w and gradient are multiplied by, three values; 1 if nothing was recorded."""
        how = self.margin, self.amax_compute_algo
        history = self.amax_history
        forward = units_of(history[:GRADIENT], self.operands, *how)
        return 1 / torch.cat([forward, units_of(history[GRADIENT:], self.gradients, *how)])

    def has_recorded(self) -> bool:
        """Return whether x and w have been recorded; compiled code may say False though they have been. Local."""
        if not self._recorded and not torch.compiler.is_compiling():
            self._recorded = bool((self.amax_history[:GRADIENT, 0] > 0).all())
        return self._recorded

    def extra_repr(self) -> str:
        """Return the options as text, for printing."""
        return (
            f"margin={self.margin}, fp8_format={self.fp8_format!r}, "
            f"amax_history_len={self.amax_history.shape[1]}, amax_compute_algo={self.amax_compute_algo!r}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedScaling:  # noqa: ARG002
        """Move the history, and keep it in float32: ``model.bfloat16()`` is for parameters. Local."""
        moved, mine = fn(self.amax_history), self.amax_history
        self.amax_history = (
            torch.zeros_like(mine, device=moved.device) if mine.is_meta else mine.to(moved.device)
        )
        return self

    def reset(self) -> None:
        """Forget what was recorded. Local."""
        self.amax_history.zero_()
        self._fresh()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a history of any length; a checkpoint without one, of a model without scales, changes nothing. Local."""
        key, mine = f"{prefix}amax_history", self.amax_history
        given = state_dict.get(key)
        if given is None:
            state_dict[key] = mine
        elif isinstance(given, Tensor) and given.shape[:-1] == mine.shape[:-1]:
            state_dict[key] = fitted = torch.zeros_like(mine)
            length = min(mine.shape[1], given.shape[1])
            fitted[:, :length] = given[:, :length]
        self._fresh()
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if given is None:
            del state_dict[key]


def units_of(history: Tensor, kind: torch.dtype, margin: int, algo: str, own: Tensor | None = None) -> Tensor:
    """Return the value of one unit of each 8-bit tensor, for rows of a history. Local.

    A history is (tensors, steps), newest first. ``own`` are the tensors' own amax, for rows in which nothing was
    recorded; without it their unit is 1. If it is infinite, the unit is NaN, and so is the product.
    """
    amax = history[:, 0] if algo == "most_recent" else history.amax(1)
    if own is not None:
        amax = torch.where(amax > 0, amax, own)
    units = (amax * (2.0**margin / torch.finfo(kind).max)).clamp(_SMALLEST, _LARGEST)
    units = torch.where(amax > 0, units, 1.0)
    return units if own is None else torch.where(own.isinf(), torch.nan, units)
