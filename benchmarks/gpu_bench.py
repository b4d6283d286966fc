# SPDX-License-Identifier: Apache-2.0
"""What the sections of gpu_matmul.py share: failures that all ranks agree on, measuring, checking, keeping results."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import time
from collections.abc import Callable
from typing import Any

from benchmarks import results
from benchmarks.gpu_report import NCCL, cell, rows_of, summary
from reference.gpu import Contender, Nvmath, Torch

WARM_UP = 3
STUCK_SECONDS = 90
TOLERANCE = {"bfloat16": 2e-2, "float64": 1e-12}


def together(comm: Any, step: Callable[[], Any]) -> tuple[Any, str]:
    """Return what ``step`` returns, and how it failed on any rank, the same text on all. Collective over comm."""
    value, fault = None, ""
    try:
        value = step()
    except Exception as error:  # noqa: BLE001 - a contender may fail in any way
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    faults = comm.allgather(fault)
    first = next((rank for rank, each in enumerate(faults) if each), None)
    if first is None:
        return value, ""
    where = "" if all(faults) else f" (on rank {first} of {comm.size})"
    return value, faults[first] + where


def agreed(comm: Any, step: Callable[[], Any]) -> Any:
    """Return what ``step`` returns, or raise on every rank when it failed on one. Collective over comm."""
    value, fault = together(comm, step)
    if fault:
        raise RuntimeError(fault)
    return value


class Bench:
    """The ranks, the device, the other contenders that work here, and the results so far. Collective over comm."""

    def __init__(
        self, comm: Any, ctx: Any, device: Any, arguments: argparse.Namespace, started: float
    ) -> None:
        self.comm, self.ctx, self.device, self.arguments = comm, ctx, device, arguments
        self.samples = 5 if arguments.quick else arguments.samples
        self.started = started
        self.known_faults: set[str] = set()
        self.results: dict[str, Any] = {
            "nranks": comm.size,
            "sections": {name: [] for name in arguments.only},
        }
        self.reference: Any = None
        self.about: dict[str, Any] | None = None  # machine and versions: with them ``save`` writes files
        self.torch: Any = self._ready("PyTorch", "torch.distributed", self._torch)
        self.nvmath: Any = None
        if self.torch is not None and not arguments.no_nvmath:  # it works on PyTorch's tensors
            self.nvmath = self._ready("nvmath", "nvmath.distributed", self._nvmath)

    def _torch(self) -> Torch:
        return Torch(
            self.comm, self.device.index, self.device.stream_address, lambda step: agreed(self.comm, step)
        )

    def _nvmath(self) -> Nvmath:
        return Nvmath(self.comm, self.device.index)

    def _ready(self, name: str, module: str, make: Callable[[], Any]) -> Any:
        self.alive()
        contender, fault = together(self.comm, lambda: importlib.import_module(module))
        if not fault:  # every rank has it: what follows is collective
            self.alive()
            contender, fault = together(self.comm, make)
        self.say(f"{name}: {f'failed: {fault}' if fault else 'ready'}")
        return None if fault else contender

    def say(self, text: str) -> None:
        """Print a line of progress, on rank 0."""
        if self.comm.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def alive(self) -> None:
        """Put off the moment when a run that is stuck says where and ends. Local."""
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)

    def late(self) -> bool:
        """Return whether the time is up, the same on every rank."""
        return bool(self.comm.bcast(time.monotonic() - self.started > self.arguments.limit))

    def save(self) -> None:
        """Write what has been measured so far, a file for each section, on rank 0."""
        directory = results.directory_of(self.arguments)
        if self.about is None or directory is None or self.comm.rank != 0:
            return
        hosts = results.between_hosts(self.about)
        for section, rows in self.results["sections"].items():
            if not rows:
                continue
            run = results.Run(
                benchmark=f"gpu_matmul-{hosts}{section}", date=results.today(), commit=results.this_commit(),
                ranks=self.comm.size, gpus=0 if self.arguments.rehearse else self.comm.size, **self.about,
                options=results.options_of(self.arguments), reference="NN" if section == "layouts" else "",
                sample="median of all calls of all ranks" if section == "host" else "all",
                rows=rows_of(section, rows),
            )  # fmt: skip
            results.save(run, directory)

    def measure(
        self, make: Callable[[], Contender], dtype: str, *, reference: bool = False
    ) -> dict[str, Any]:
        """Return the entry of one contender: its times, its error, or why it failed. Collective."""
        self.alive()
        contender, fault = together(self.comm, make)
        if fault:
            return {"failed": fault}
        entry: dict[str, Any] = {}

        def timed() -> list[float]:
            for _ in range(WARM_UP):
                contender.run()
            self.device.wait()
            entry["path"] = contender.path()
            return list(self.device.samples(self.comm, contender.run, self.samples))

        times, fault = together(self.comm, timed)
        if not fault:
            entry.update(summary(self.comm.allgather(times)))
            if reference and contender.result is not None:
                self.reference = contender.result().clone()
            elif contender.result is not None and self.reference is not None:
                error, fault = together(
                    self.comm, lambda: self.torch.error(contender.result(), self.reference)
                )
                if not fault:
                    entry["error"] = max(self.comm.allgather(error), key=lambda e: (e != e, e))
                    entry["wrong"] = not entry["error"] <= TOLERANCE[dtype]
        _, closing = together(self.comm, contender.close)
        fault = fault or closing
        return {"failed": fault} if fault else entry

    def row(self, section: str, case: str, makers: dict[str, Callable[[], Contender]], dtype: str) -> None:
        """Measure all contenders of a case. Collective."""
        entries: dict[str, Any] = {}
        self.reference = None
        for name, make in makers.items():
            entries[name] = self.measure(make, dtype, reference=name == NCCL)
        self.reference = None
        self.record(section, case, entries)

    def record(self, section: str, case: str, entries: dict[str, Any]) -> None:
        """Keep and print the entries of a case; the reason of a failure where it is new."""
        self.results["sections"][section].append({"case": case, "entries": entries})
        self.say(f"{section} {case}: " + " | ".join(f"{n} {cell(e)}" for n, e in entries.items()))
        for name, entry in entries.items():
            if "failed" in entry and entry["failed"] not in self.known_faults:
                self.known_faults.add(entry["failed"])
                self.say(f"  {name}: failed: {entry['failed']}")
        self.save()

    def matrix(self, descriptor: Any, seed: int, *, symmetric: bool = False) -> Any:
        """Return a matrix of random numbers, or of ones. Collective."""
        out = self.ctx.empty(descriptor, symmetric=symmetric)
        self.device.fill(out.local, None if self.arguments.ones else 1000 * seed + self.comm.rank)
        return out

    def planned(self, problem: Any, a: Any, b: Any, out: Any, **options: Any) -> Contender:
        """Return a plan of a product into ``out``, which is poisoned first. Collective."""
        import pblasmp as pb

        self.device.poison(out.local)
        plan = pb.plan(
            pb.matmul, a, b, out=out, op_a=problem.op_a, op_b=problem.op_b, scheme=problem.scheme, **options
        )
        result = None if self.torch is None else lambda: self.torch.view(out.local)
        return Contender(plan, result, plan.close, lambda: plan.report().path)

    def close(self) -> None:
        """End the other contenders. Collective."""
        for contender in (self.nvmath, self.torch):
            if contender is not None:
                self.alive()
                _, fault = together(self.comm, contender.close)
                if fault:
                    self.say(f"closing {type(contender).__name__}: failed: {fault}")
