# SPDX-License-Identifier: Apache-2.0
"""cuda.bindings, as far as kernels are compiled and loaded with it: nothing is compiled."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pblasmp.engines.gpu.kernels import compiler
from pblasmp.engines.gpu.kernels.compiler import loaded
from tests.helpers.hardware import SHARED_MEMORY, why_no_room


class FakeNvrtc:
    """NVRTC and the driver. Kernels that other tests have loaded are forgotten, and none have come along.

    Attributes:
        capability: of the GPUs, as two digits.
        known: the capabilities for which NVRTC compiles.
        version: NVRTC's.
        driver_version: the newest CUDA that the driver has.
        refused: machine code that the driver does not take.
        error: what NVRTC says of a text; "": it takes it.
        targets: what each text was compiled for, in order.
        modules: what was loaded, in order.
        rooms: the shared memory that kernels may ask for.
        driver: the module.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loaded.cache_clear()
        patch.setattr(compiler, "SHIPPED", Path("/none"))
        self.capability, self.known, self.version, self.error = 90, [80, 90], (13, 0), ""
        self.driver_version, self.refused = 13000, b""
        self.targets: list[str] = []
        self.modules: list[bytes] = []
        self.rooms: list[int] = []
        self.driver = SimpleNamespace(
            CUdevice_attribute=SimpleNamespace(
                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
            ),
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            cuDeviceGetAttribute=lambda which, device: (
                0, self.capability // 10 if which == 75 else self.capability % 10,
            ),
            cuDriverGetVersion=lambda: (0, self.driver_version),
            cuModuleLoadData=self._load,
            cuModuleGetFunction=lambda module, name: (0, 0x100 + module),
            cuFuncSetAttribute=self._make_room,
        )  # fmt: skip
        nvrtc = SimpleNamespace(
            nvrtcVersion=lambda: (0, *self.version),
            nvrtcGetSupportedArchs=lambda: (0, self.known),
            nvrtcCreateProgram=lambda text, *rest: (0, SimpleNamespace(text=text)),
            nvrtcCompileProgram=self._compile,
            nvrtcGetProgramLogSize=lambda program: (0, len(self.error)),
            nvrtcGetProgramLog=self._write(lambda program: self.error.encode()),
            nvrtcGetCUBINSize=lambda program: (0, len(program.code)),
            nvrtcGetCUBIN=self._write(lambda program: program.code),
            nvrtcGetPTXSize=lambda program: (0, len(program.code)),
            nvrtcGetPTX=self._write(lambda program: program.code),
            nvrtcDestroyProgram=lambda program: (0,),
        )
        patch.setitem(sys.modules, "cuda", SimpleNamespace())
        patch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=self.driver, nvrtc=nvrtc))

    def _load(self, code: bytes) -> tuple[object, int | None]:
        if code == self.refused:
            return SimpleNamespace(name="CUDA_ERROR_INVALID_IMAGE"), None
        self.modules.append(code)
        return 0, len(self.modules)

    def _make_room(self, function: int, attribute: int, nbytes: int) -> tuple[int]:
        """Let a kernel ask for as much shared memory as the GPU has: CUDA_ERROR_INVALID_VALUE for more."""
        self.rooms.append(nbytes)
        return (int(bool(why_no_room(nbytes, SHARED_MEMORY[self.capability]))),)

    def _compile(self, program: SimpleNamespace, count: int, options: list[bytes]) -> tuple[object]:
        assert count == len(options)
        if self.error:
            return (SimpleNamespace(name="NVRTC_ERROR_COMPILATION"),)
        (target,) = (each.split(b"=")[1].decode() for each in options if b"gpu-architecture" in each)
        self.targets.append(target)
        program.code = f"{target} of {hash(program.text)}".encode()
        return (0,)

    @staticmethod
    def _write(found: Callable[[SimpleNamespace], bytes]) -> Callable[[SimpleNamespace, bytes], tuple[int]]:
        """A function of the library, which fills the bytes that it is given."""

        def call(program: SimpleNamespace, room: bytes) -> tuple[int]:
            ctypes.memmove(ctypes.c_char_p(room), found(program), len(room))
            return (0,)

        return call
