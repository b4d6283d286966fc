# SPDX-License-Identifier: Apache-2.0
"""What a rank queues on its GPU (runtime/nccl.py)."""

from types import SimpleNamespace

import pytest

from pblasmp.engines.gpu.runtime.nccl import Nccl


def test_a_message_that_fails_ends_its_group():
    """NCCL would take all later work of this thread for a part of it."""
    done: list[str] = []

    def send(*_: int) -> None:
        raise ZeroDivisionError

    nccl = SimpleNamespace(
        group_start=lambda: done.append("start"), send=send, group_end=lambda: done.append("end")
    )
    with pytest.raises(ZeroDivisionError):
        Nccl.exchange_at(SimpleNamespace(calls=nccl, handle=3), 0, 1, 64, 8, 1)
    assert done == ["start", "end"]
