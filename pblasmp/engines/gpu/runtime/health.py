# SPDX-License-Identifier: Apache-2.0
"""Health: whether a rank's GPU and NCCL still work, waits that check this, and aborting work that cannot end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....comm import Communicator, SideChannel
from ....errors import StatusError
from .device import Device, OnDevice

_POLLS = 64  # of a wait, between two checks for faults
_NOT_READY = 600  # of CUDA's errors
_CAPTURE_ERRORS = range(900, 909)  # errors of recording a graph, not of the GPU
_NCCL_IS_WELL = (0, 7)  # ncclSuccess, ncclInProgress
_FLAGS_SECONDS = 0.1  # that queued work gets to end by flags alone, before NCCL is aborted
_DRAIN_SECONDS = 0.5  # that an error waits for work to end: less than other ranks wait for this one to leave
_ABORT_SECONDS = 10.0
_LOOK_SECONDS = 0.5  # between two looks of the thread that reads notes while this rank waits in a library
_EXIT_SECONDS = 20  # that a process may take to end if its GPU may never finish
_FOREIGN = ("cuda", "cupy", "cupy_backends", "nccl")

_broken: list[Health] = []  # those of this process's broken contexts whose work may not have ended


class Health:
    """A rank's GPU and NCCL for the context's side channel: tells whether they work, and aborts them. Local.

    Args:
        device: this rank's GPU, the current one.

    Attributes:
        queues: each returns streams on which work is queued.
        raisers: each raises flags that other ranks would raise here, on a given stream.
        nccls: the NCCL communicators that this rank is in.
        own: those of them that were made for this context.
        frees: each frees this GPU's memory that only queued work uses, once the context is broken and that has ended.
    """

    def __init__(self, comm: Communicator, device: Device) -> None:
        import cupy

        self._comm, self._device, self._cupy = comm, device, cupy
        self.queues: list[Callable[[], Sequence[Any]]] = []
        self.raisers: list[Callable[[Any], None]] = []
        self._aside = cupy.cuda.Stream(non_blocking=True)  # a stream on which nothing waits
        self._lost: StatusError | None = None
        self._aborting = threading.Lock()  # taken for good by the first thread that aborts
        self.nccls: list[Any] = []
        self.own: list[Any] = []
        self.frees: list[Callable[[], None]] = []
        self._over, self._freed = threading.Event(), threading.Event()

    def current(self) -> OnDevice:
        """Return a block in which this rank's GPU is the current one of this thread. Local."""
        return OnDevice(self._cupy.cuda.runtime, self._device.index)

    @property
    def is_lost(self) -> bool:
        """Whether the GPU is known to be lost."""
        return self._lost is not None

    def wait(self, *queues: Any) -> None:
        """Wait for CuPy's streams or events, as long as the ranks that they may wait for exist. Local.

        Raises:
            ClosedError: the context is broken.
            StatusError: this GPU is lost, or NCCL reports an error; the context is broken from now on.
        """
        channel, polls = self._comm.channel, itertools.count(1)

        def done() -> bool:
            ended = all(queue.done for queue in queues)
            if ended or next(polls) % _POLLS == 0:
                fault = self.fault()
                if fault is not None:
                    raise fault
            return ended

        try:
            channel.until(done, patient=True, for_runs=True)
        except StatusError as error:
            channel.break_(error, "waiting for the GPU")
            raise

    def fault(self) -> StatusError | None:
        """Return why this rank cannot compute any more: its GPU is lost, or NCCL reports an error. Local."""
        if self._lost is None:
            runtime = self._cupy.cuda.runtime
            status = int(runtime.streamQuery(self._aside.ptr))  # persistent errors are returned by every call
            if status not in (0, _NOT_READY, *_CAPTURE_ERRORS):
                what = f"GPU {self._device.bus} of rank {self._comm.rank} cannot be used any more in this process"
                self._lost = StatusError(f"{what}: {runtime.CUDARuntimeError(status)}")
                _ignore_destructors()
        if self._lost is not None:
            return self._lost
        for nccl in self.nccls:
            if error := _nccl_error(nccl):
                return StatusError(f"NCCL on rank {self._comm.rank}: {error}")
        return None

    def abort(self, *, blocked: bool = False) -> None:
        """End this GPU's waits for other ranks, and free what queued work used when it has ended, if it does. Local.

        Flags that would come from other ranks are raised here, and NCCL's communicators are aborted. Queued work runs
        on whatever is in its buffers. A communicator of the caller's is left alone.

        Args:
            blocked: this rank's own thread may be waiting in NCCL.
        """
        if not self._aborting.acquire(blocking=False):
            return
        self._over.set()
        self.nccls.clear()
        _broken.append(self)
        # Destructors, even at the end of the process, would wait for the GPU.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        atexit.register(_end_in_time)
        if self._lost is None:
            ended = threading.Event()
            abort_nccl = partial(self._abort_nccl, blocked=blocked)
            for work in (self._let_go, abort_nccl):
                threading.Thread(target=work, args=[ended], daemon=True).start()
            ended.wait(_DRAIN_SECONDS)

    def begin(self) -> None:
        """Start a thread that also looks for notes, from the making of the session to its end. Local."""
        if self._comm.size > 1:
            channel = weakref.ref(self._comm.channel)
            threading.Thread(target=_rescue, args=[channel, self._over], name="pblasmp", daemon=True).start()

    def end(self) -> None:
        """Stop that thread: the session is over. Local."""
        self._over.set()
        self.nccls.clear()

    def _let_go(self, ended: threading.Event) -> None:
        """Raise this rank's own flags until the queued work has ended."""
        with contextlib.suppress(Exception):  # there is nobody to report an error to
            self._cupy.cuda.Device(self._device.index).use()
            deadline = time.monotonic() + _ABORT_SECONDS
            while not self._is_idle() and time.monotonic() < deadline:
                for raise_flags in self.raisers:
                    raise_flags(self._aside)
                    self._aside.synchronize()
                time.sleep(1e-4)
            if self._is_idle():
                ended.set()

    def _abort_nccl(self, ended: threading.Event, *, blocked: bool) -> None:
        """Abort the communicators; if windows are in use, without closing these first."""
        from nccl.bindings import nccl as bindings

        with contextlib.suppress(Exception):
            self._cupy.cuda.Device(self._device.index).use()
            idle = ended.wait(_FLAGS_SECONDS) and not blocked
            for nccl in reversed(self.own):
                with contextlib.suppress(Exception):
                    if idle:
                        nccl.abort()
                    elif nccl.ptr:
                        bindings.comm_abort(nccl_handle(nccl))
            if ended.wait(_ABORT_SECONDS):
                for free in reversed(self.frees):
                    with contextlib.suppress(Exception):
                        free()
                for kept in (self.frees, self.raisers, self.queues, self.own):
                    kept.clear()  # and with them what they belong to, when the user drops the context
                self._freed.set()

    def has_ended(self) -> bool:
        """Wait until the work of this broken context has ended and its memory is free, or for long. Local.

        Raises:
            StatusError: the GPU is lost.
        """
        if self._lost is not None:
            raise StatusError(str(self._lost))
        return self._freed.wait(_ABORT_SECONDS) or self._is_idle()

    def _is_idle(self) -> bool:
        return all(queue.done for queues in self.queues for queue in queues())


def await_broken(rank: int) -> None:
    """Wait until the GPU has no work of this process's broken contexts: a kernel of theirs may need all of it. Local.

    Raises:
        StatusError: it does not end, or the GPU is lost.
    """
    for health in [*_broken]:
        if not health.has_ended():
            raise StatusError(
                f"rank {rank}: on its GPU, work of a broken context of this process waits for ever:"
                " only a new process can use it"
            )
        _broken.remove(health)


def _rescue(channel: weakref.ref[SideChannel], over: threading.Event) -> None:
    """Look for notes while this rank's own thread may wait in NCCL or cuBLASMp for a rank that broke the context.

    NCCL connects two ranks when the first message is queued, and then waits for the other rank.
    """
    while not over.wait(_LOOK_SECONDS):
        found = channel()
        if found is None or found.rescue():
            return


def nccl_handle(communicator: Any) -> Any:
    """Return what nccl4py's bindings take for its communicator: an object, or before 0.6 an address. Local."""
    from nccl.bindings import nccl

    return getattr(nccl, "Comm", int)(communicator.ptr)


def _nccl_error(nccl: Any) -> str:
    """Return the asynchronous error of NCCL, or an empty string. Local."""
    if not hasattr(nccl, "get_async_error"):  # not one of nccl4py's communicators
        return ""
    try:
        result = nccl.get_async_error()
        if int(result) in _NCCL_IS_WELL:
            return ""
        return f"{getattr(result, 'name', result)}, found by ncclCommGetAsyncError"
    except Exception as error:  # noqa: BLE001 - such as a communicator that somebody has destroyed
        return f"{type(error).__name__}: {error}"


def _end_in_time() -> None:
    """Have a signal end this process, in case a library's destructor waits for the GPU. Local."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)


def _ignore_destructors() -> None:
    """Suppress messages about CUDA objects that cannot be destroyed: the loss of the GPU has been reported."""
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type.__module__.partition(".")[0] not in _FOREIGN:
            before(unraisable)

    sys.unraisablehook = hook
