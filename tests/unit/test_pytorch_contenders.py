# SPDX-License-Identifier: Apache-2.0
"""PyTorch's products in benchmarks, without PyTorch: ranks agree on which of them are timed."""

from types import SimpleNamespace

from reference import pytorch


class _OnGpus:
    """A context on GPUs, the only other rank of which answers as it is told."""

    def __init__(self, *others):
        self.engine, self.comm = SimpleNamespace(device=0), self
        self._others = iter(others)

    def allgather(self, mine):
        return [mine, next(self._others)]


def test_bench_leaves_pytorch_out_on_every_rank_or_on_none(monkeypatch):
    """What one rank has and another has not would be timed, collectively, by one of them alone."""
    monkeypatch.setattr(pytorch, "find_spec", lambda _: object())
    ways = {"PyTorch two_shot": lambda: None}
    monkeypatch.setattr(pytorch, "_ways", lambda *_: ways)
    assert pytorch.by_pytorch(_OnGpus(True, ""), "matmul_allreduce", None, None) == (ways, "")
    assert pytorch.by_pytorch(_OnGpus(False), "matmul_allreduce", None, None) == (
        {},
        "PyTorch is not installed on every rank",
    )
    assert pytorch.by_pytorch(_OnGpus(True, "theirs"), "matmul_allreduce", None, None) == ({}, "theirs")
    assert pytorch.by_pytorch(_OnGpus(), "matmul_allgather", None, None) == ({}, "")

    def failing(*_):
        raise RuntimeError("no peer access")

    monkeypatch.setattr(pytorch, "_ways", failing)
    expected = "PyTorch is left out: no peer access"
    assert pytorch.by_pytorch(_OnGpus(True, ""), "matmul_allreduce", None, None) == ({}, expected)
