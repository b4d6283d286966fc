# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels: machine code of a wheel, or compiled by NVRTC and kept on disk, queued with little work of the host.

Addresses may be stand-ins for real ones, so that work is prepared once and then placed wherever operands are. A
stand-in has the number of some memory in its highest byte, which no real address uses, and is as far behind the
stand-in of that memory's beginning as the real address is behind the real one.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import ArgumentError, StatusError
from ....trust import make_private, open_trusted
from ...direct.asked import host_address

ALIGNED = 16  # bytes: kernels that copy so many at a time are chosen by addresses
_SHIFT = 56
_OFFSET = (1 << _SHIFT) - 1


def stand_in(number: int, address: int = 0) -> int:
    """Return the stand-in for an address in memory ``number``, from 1 to 255, aligned alike. Local."""
    return (number << _SHIFT) + address % ALIGNED


def stood_for(values: Iterable[tuple[int, Any]]) -> list[tuple[int, int, int]]:
    """Return which of numbered values are stand-ins: their numbers, those of their memory, and how far they are in it.

    Local.
    """
    return [(at, x >> _SHIFT, x & _OFFSET) for at, x in values if type(x) is int and x > _OFFSET]


_ARGUMENT = 8  # bytes: each argument that the driver reads begins at a multiple
_BEGINNING = 64  # bytes, of the first argument: descriptors of TMA begin at a multiple
_OPTIONS = ("-std=c++17",)  # of NVRTC

SHIPPED = Path(__file__).with_name("shipped")
"""Machine code in wheels: for each target an archive, whose comment is the version of NVRTC that compiled it."""

Grid = tuple[int, int]


@cache
def cuda(name: str) -> str:
    """Return the text of a file of CUDA of this folder, and of those that it includes, each once. Local."""
    seen = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        read = Path(__file__).with_name(name).read_text()
        return re.sub(r'^#include "(.*)"\n', lambda found: text(found[1]), read, flags=re.MULTILINE)

    return text(name)


def with_macros(code: str, macros: Mapping[str, Any]) -> str:
    """Return a text in CUDA C++ with these macros before it. Local."""
    return "\n".join([*(f"#define {macro} {value}" for macro, value in macros.items()), code])


class CompiledKernels:
    """Kernels, compiled for the current GPU when they are needed. Local."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._kernels: dict[Any, Kernel] = {}

    def _compiled(
        self, name: str, parameters: str, *, file: str = "", room: int = 0, meets: bool = False, **macros: Any
    ) -> Kernel:
        """Return a kernel, with so many bytes of shared memory that a launch may ask for.

        It is in the file of its name unless another is given. If its blocks meet, it is launched as a cooperative one:
        none begins before there is room for all, and the driver refuses more than there can be.
        """
        key = (name, *macros.items())
        found = self._kernels.get(key)
        if found is None:
            code = cuda(f"{file or name}.cu")
            runtime = self._cupy.cuda.runtime
            device = runtime.getDevice()
            runtime.setDevice(device)  # a thread that has not used the GPU yet has no context for the driver
            function = loaded(device, with_macros(code, macros), name, room)
            found = self._kernels[key] = Kernel(function, parameters, meets=meets)
        return found


class Kernel:
    """A kernel of CUDA. Local.

    Args:
        function: where it is.
        parameters: their types in the letters of ``struct``: "Q" is an address, "i" an int, "6Q" a structure of six
            words. What a structure has is given one by one.
        meets: whether it is launched as a cooperative one.
    """

    __slots__ = ("_function", "_memory", "_more", "_place", "_places", "_queue", "_starts", "_struct")

    def __init__(self, function: int, parameters: str, *, meets: bool = False) -> None:
        from cupy_backends.cuda.api import driver

        fields = re.findall(r"\d*[a-zA-Z]", parameters)
        sizes = [-(-struct.calcsize(f"={field}") // _ARGUMENT) * _ARGUMENT for field in fields]
        padded = (
            f"{field}{size - struct.calcsize(f'={field}')}x"
            for field, size in zip(fields, sizes, strict=True)
        )
        self._struct = struct.Struct("=" + "".join(padded))
        self._starts = np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        self._function, self._more = function, () if meets else (0,)
        self._queue = driver.launchCooperativeKernel if meets else driver.launchKernel
        memory: Any = np.zeros(self._struct.size + _BEGINNING, np.uint8)
        self._memory: Any = memory[-host_address(memory) % _BEGINNING :]
        self._places = self._starts + np.uint64(host_address(self._memory))
        self._place = host_address(self._places)

    def __call__(
        self, stream: Any, grid: Grid, threads: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        """Queue it on a stream of CuPy, with so many bytes of shared memory. Local."""
        self._struct.pack_into(self._memory, 0, *arguments)  # the driver copies them
        self._queue(self._function, *grid, 1, threads, 1, 1, shared, stream.ptr, self._place, *self._more)

    def launch(
        self, grid: Grid, threads: int, arguments: Sequence[Any], addresses: Sequence[int] = ()
    ) -> Launch:
        """Return what queues it with these arguments any number of times. Local.

        Args:
            grid, threads: how many blocks, and threads of each.
            arguments: of the kernel.
            addresses: which words of the first one are addresses, which may be stand-ins.
        """
        shape = self._function, *grid, 1, threads, 1, 1, 0
        words = np.frombuffer(bytearray(self._struct.pack(*arguments)), np.uint64)
        places = stood_for((at, int(words[at])) for at in addresses)
        return Launch((self._queue, shape, self._starts, places, self._more), words)


class Launch:
    """A kernel with its arguments, to be queued any number of times. See ``Kernel.launch``. Local."""

    __slots__ = ("_addresses", "_how", "_more", "_place", "_places", "_queue", "_shape", "_words")

    def __init__(self, how: tuple[Any, ...], words: Any) -> None:
        self._how, self._words = how, words
        self._queue, self._shape, starts, self._addresses, self._more = how
        self._places = starts + np.uint64(host_address(words))
        self._place = host_address(self._places)

    def __call__(self, stream: Any) -> None:
        """Queue it on a stream of CuPy. Local."""
        self._queue(*self._shape, stream.ptr, self._place, *self._more)

    def at(self, bases: Mapping[int, int], stream: Any) -> None:
        """Queue it once with real addresses, as what ``placed`` returns would be. Local."""
        words = self._words
        for at, number, offset in self._addresses:
            words[at] = bases[number] + offset  # the driver copies them
        self._queue(*self._shape, stream.ptr, self._place, *self._more)

    def placed(self, bases: Mapping[int, int]) -> Launch:
        """Return the same launch with real addresses. Local.

        Args:
            bases: of each memory that a stand-in is in.
        """
        words = self._words.copy()
        for at, number, offset in self._addresses:
            words[at] = bases[number] + offset
        return Launch(self._how, words)


@cache
def loaded(device: int, text: str, name: str, room: int = 0, target: str = "") -> int:
    """Return where a kernel is on a GPU, the current one, whose process keeps it. Local; may take seconds.

    Args:
        device: the GPU's CUDA index.
        text: in CUDA C++, without headers.
        room: bytes of shared memory that a launch may ask for.
        target: "sm_90a", for example; by default the GPU's own.

    Raises:
        StatusError: NVRTC or the driver refuses it.
    """
    from cuda.bindings import driver

    capability = _capability(device)
    code = _shipped(text, target or f"sm_{capability}")
    status, module = (1, None) if code is None else driver.cuModuleLoadData(code)
    if status:
        status, module = driver.cuModuleLoadData(_machine_code(text, target or _target(capability)))
        check_driver((status,))
    status, function = driver.cuModuleGetFunction(module, name.encode())
    check_driver((status,))
    if room:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check_driver(driver.cuFuncSetAttribute(function, attribute, room))
    return int(function)


def _capability(device: int) -> int:
    """Return a GPU's compute capability, 90 for 9.0."""
    from cuda.bindings import driver

    kinds = driver.CUdevice_attribute
    status, major = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    check_driver((status,))
    status, minor = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    check_driver((status,))
    return 10 * int(major) + int(minor)


def _target(capability: int) -> str:
    """Return what kernels are compiled for: if NVRTC does not know the GPU yet, the driver finishes them."""
    from cuda.bindings import nvrtc

    status, known = nvrtc.nvrtcGetSupportedArchs()
    _check_nvrtc(status)
    if capability in known:
        return f"sm_{capability}"
    return f"compute_{max(each for each in known if each < capability)}"


def _shipped(text: str, target: str) -> bytes | None:
    """Return the machine code of a text that came along; None if none did, or if the driver is too old for it."""
    from cuda.bindings import driver

    with (
        suppress(OSError, KeyError, zipfile.BadZipFile),
        zipfile.ZipFile(SHIPPED / f"{target}.zip") as archive,
    ):
        status, version = driver.cuDriverGetVersion()
        check_driver((status,))
        major, _ = archive.comment.split(b".")
        if version // 1000 >= int(major):
            return archive.read(_name_of(text))
    return None


def ship(codes: Mapping[str, bytes], target: str, folder: Path) -> Path:
    """Write machine code of texts into a folder as the file that wheels bring, and return its path. Local.

    Args:
        codes: by text, what ``compiled`` has returned.
        target: what they were compiled for.
        folder: where the file goes.
    """
    file = folder / f"{target}.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = "{}.{}".format(*_nvrtc_version()).encode()
        for name, code in sorted((_name_of(text), code) for text, code in codes.items()):
            archive.writestr(zipfile.ZipInfo(name), code, zipfile.ZIP_DEFLATED)
    return file


def _name_of(text: str) -> str:
    return hashlib.sha256(f"{_OPTIONS}\n{text}".encode()).hexdigest()


def _machine_code(text: str, target: str) -> bytes:
    """Return what a text is compiled to, from the user's files if it was compiled before."""
    folder = kernel_folder()
    if folder is None:
        return compiled(text, target)
    told = hashlib.sha256(f"{_nvrtc_version()} {target}\n{text}".encode()).hexdigest()
    file = folder / f"pblasmp-{told}.cubin"
    with suppress(OSError, ArgumentError), open_trusted(file) as opened:
        return opened.read()
    code = compiled(text, target)
    with suppress(OSError):
        make_private(folder)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
            new.write(code)
        Path(new.name).replace(file)  # another process may have been as fast
    return code


def kernel_folder() -> Path | None:
    """Return the folder of CuPy in which compiled kernels are kept; None: they are kept in memory. Local."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return None
    try:
        return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    except RuntimeError:  # no home directory
        return None


def compiled(text: str, target: str) -> bytes:
    """Return machine code, or for a target "compute_…" PTX.

    Raises:
        StatusError: NVRTC refuses it; the error has its log.
    """
    from cuda.bindings import nvrtc

    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"pblasmp.cu", 0, [], [])
    _check_nvrtc(status)
    options = [each.encode() for each in (f"--gpu-architecture={target}", *_OPTIONS)]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if failed:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise StatusError(f"NVRTC: {failed.name}: {log.decode(errors='replace').strip()}")
    kind = "CUBIN" if target.startswith("sm_") else "PTX"
    status, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    _check_nvrtc(status)
    code = b" " * size
    _check_nvrtc(*getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
    _check_nvrtc(*nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def _nvrtc_version() -> list[int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    _check_nvrtc(status)
    return [int(major), int(minor)]


def _check_nvrtc(status: Any) -> None:
    if status:
        raise StatusError(f"NVRTC: {status.name}")


def check_driver(result: tuple[Any, ...]) -> None:
    """Raise StatusError if a call of CUDA's driver reports an error. Local."""
    status = result[0]
    if status:
        raise StatusError(f"CUDA driver: {status.name}")
