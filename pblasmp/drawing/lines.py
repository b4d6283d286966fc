# SPDX-License-Identifier: Apache-2.0
"""Line charts of times over sizes, on logarithmic axes, for sweeps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from .picture import picture_format, save, settings

__all__ = ["Sweep", "draw_lines", "size_text"]


class Sweep(NamedTuple):
    """One chart: sizes in bytes, each with its times in microseconds by contender."""

    title: str
    points: Sequence[tuple[int, Mapping[str, float]]]


def size_text(nbytes: int) -> str:
    """Return "64 KiB" for 65536. Local."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def draw_lines(sweeps: Sequence[Sweep], output: str | PathLike[str]) -> None:
    """Draw each contender's time over the size. Local.

    Args:
        sweeps: one chart each, one above another.
        output: a .png, .svg or .pdf file.

    Raises:
        UnsupportedError: matplotlib is missing, or pictures of this kind cannot be made.
    """
    picture_format(output)
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=(9, 5 * len(sweeps)), layout="constrained")
        axes = figure.subplots(len(sweeps), 1, squeeze=False)
        for ax, sweep in zip(axes[:, 0], sweeps, strict=True):
            for name in dict.fromkeys(name for _, times in sweep.points for name in times):
                here = [(size, times[name]) for size, times in sweep.points if name in times]
                ax.loglog(*zip(*here, strict=True), marker="o", markersize=3, label=name)
            sizes = [size for size, _ in sweep.points]
            ax.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45, fontsize=8)
            ax.minorticks_off()
            ax.set_ylabel("µs")
            ax.set_title(f"{sweep.title} (less is better)", fontsize=11)
            ax.grid(visible=True, alpha=0.3)
            ax.legend(fontsize=8)
    save(figure, output, 130)
