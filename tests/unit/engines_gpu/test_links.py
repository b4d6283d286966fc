# SPDX-License-Identifier: Apache-2.0
"""What a GPU's links are called, asked of a management library that is played."""

from __future__ import annotations

from typing import Any

import pytest

from pblasmp.engines.gpu import gpu_engine as engine_module
from pblasmp.engines.gpu.runtime.device import links_of

_NOT_SUPPORTED = 3


class Nvml:
    """NVML: with so many NVLinks active out of six, on PCIe of a generation and width; some calls fail."""

    def __init__(
        self, active: int = 0, pcie: tuple[int, int] = (5, 16), fails: str = "", lacks: str = ""
    ) -> None:
        self.active, self.pcie, self.fails, self.lacks, self.open = active, pcie, fails, lacks, 0
        self.asked: list[bytes] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name == self.lacks:
                raise AttributeError(name)
            if name == self.fails:
                return lambda *_: 999
        return super().__getattribute__(name)

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, device: Any) -> int:  # noqa: N802
        self.asked.append(bus)
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: Any, active: Any) -> int:  # noqa: N802
        if link.value >= 6:
            return _NOT_SUPPORTED
        active._obj.value = link.value < self.active
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device: Any, number: Any) -> int:  # noqa: N802
        number._obj.value = self.pcie[0]
        return 0

    def nvmlDeviceGetMaxPcieLinkWidth(self, device: Any, number: Any) -> int:  # noqa: N802
        number._obj.value = self.pcie[1]
        return 0


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (Nvml(active=4), "4 NVLinks"),
        (Nvml(), "PCIe 5 x16"),
        (Nvml(pcie=(4, 8), fails="nvmlDeviceGetNvLinkState"), "PCIe 4 x8"),
        (Nvml(fails="nvmlDeviceGetMaxPcieLinkWidth"), ""),
        (Nvml(fails="nvmlDeviceGetHandleByPciBusId_v2"), ""),
        (Nvml(lacks="nvmlDeviceGetNvLinkState"), ""),
        (Nvml(fails="nvmlInit_v2"), ""),
        (Nvml(lacks="nvmlInit_v2"), ""),
    ],
)
def test_links(nvml, expected):
    assert links_of("0000:1B:00.0", nvml) == expected
    assert nvml.open == 0
    assert set(nvml.asked) <= {b"0000:1B:00.0"}


def test_times_are_kept_by_links(ctx, monkeypatch):
    assert ctx.engine.machine == "fake GPU"  # nobody says
    for links, expected in (("18 NVLinks", "fake GPU, 18 NVLinks"), ("", "fake GPU")):
        monkeypatch.setattr(engine_module, "links_of", lambda bus, links=links: links)
        vars(ctx.engine).pop("machine", None)
        assert ctx.engine.machine == expected
