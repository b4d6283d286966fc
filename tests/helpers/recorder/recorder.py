# SPDX-License-Identifier: Apache-2.0
"""What the stand-in library does when called: it records, tracks the handles it gives, fails on demand."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pblasmp.bindings import FUNCTIONS, MatmulAttribute, Status, ctype

if TYPE_CHECKING:
    from typing_extensions import Self

HOOK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))
KINDS = {
    "cublasMpHandle_t": "handle",
    "cublasMpGrid_t": "grid",
    "cublasMpMatrixDescriptor_t": "matrix descriptor",
    "cublasMpMatmulDescriptor_t": "matmul descriptor",
}
FREE = {MatmulAttribute[f"{name}_POINTER"] for name in ("BIAS", "A_SCALE", "B_SCALE", "D_SCALE", "AMAX_D")}
INDICES = {"ia", "ja", "ib", "jb", "ic", "jc", "id", "jd"}


@functools.cache
def _types(name: str) -> dict[str, str]:
    """The types of a function's arguments."""
    return {argument.name: argument.type for argument in FUNCTIONS[name].arguments}


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: The function, by its newest name.
        symbol: The function, by the name that was looked up.
        arguments: By name, each as an integer.
        status: What was returned.
        data: The bytes that an attribute of a matmul descriptor was set to.
    """

    name: str
    symbol: str
    arguments: dict[str, int]
    status: int
    data: bytes

    def __getitem__(self, argument: str) -> int:
        return self.arguments[argument]


@dataclass
class Recorder:
    """The other side of a library made by ``build``; a context manager, one at a time per library.

    Attributes:
        path: The library.
        workspace: The device and host bytes that every query of a workspace answers.
        calls: Every call since the last ``clear``, in order.
        faults: Misuse seen: dead or NULL handles, indices below 1, grids released before what is on them, a
            workspace not asked for or too small, attributes of a wrong size.
        alive: What was made and not released: (kind, handle or address) to the ("grid", handle) it is on.
    """

    path: str
    workspace: tuple[int, int] = (4096, 512)
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    alive: dict[tuple[str, int], tuple[str, int] | None] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._library = ctypes.CDLL(self.path)
        self._hook = HOOK(self._called)
        self._library.recorder_set_hook(self._hook)
        self._symbols = {
            name: row.name for row in FUNCTIONS.values() for name in (row.name, row.alias) if name
        }
        self._failing: dict[int, int] = {}
        self._state: dict[tuple[str, int], int] = {}
        self._attributes: dict[int, dict[int, bytes]] = {}
        self._queries: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._buffers: dict[int, Any] = {}
        self._next = 0x1000
        return self

    def __exit__(self, *exception: object) -> None:
        self._library.recorder_set_hook(None)

    @property
    def names(self) -> list[str]:
        """The functions called, in order."""
        return [call.name for call in self.calls]

    def clear(self) -> None:
        """Forget the calls so far and any failure asked for; what is alive stays alive."""
        self.calls.clear()
        self._failing.clear()

    def fail(self, status: int, at: int = 0) -> None:
        """Let the call that ``at`` others precede return ``status`` and do nothing (but a release)."""
        self._failing[len(self.calls) + at] = status

    def assert_clean(self) -> None:
        """Nothing was misused, nothing is left alive."""
        assert not self.faults, self.faults
        assert not self.alive, f"leaked: {sorted(self.alive)}"

    def _called(self, symbol: bytes, values: Any) -> int:
        row = FUNCTIONS[self._symbols[symbol.decode()]]
        types = _types(row.name)
        arguments = dict(zip(types, values[: len(types)], strict=True))
        self._check(row.name, arguments, types)
        short = row.name.removeprefix("cublasMp")
        status = self._failing.pop(len(self.calls), 0) if row.returns == "cublasMpStatus_t" else 0
        data = b""
        if short == "MatmulDescriptorSetAttribute" and not status:
            data = ctypes.string_at(arguments["buf"], arguments["sizeInBytes"])
        self.calls.append(Call(row.name, symbol.decode(), arguments, status, data))
        if short == "Numroc":
            return self._numroc(**arguments)
        if short == "GetStatusString":
            return self._status_string(**arguments)
        if short.endswith("Destroy") or short in ("Free", "BufferDeregister"):
            self._release(short, arguments, types)
        elif not status:
            self._perform(short, arguments, types, data)
        return status

    def _check(self, name: str, arguments: dict[str, int], types: dict[str, str]) -> None:
        optional = {"grid"} if "lld" in arguments else set()
        if "descD" in arguments and not arguments["c"]:
            optional = {"descC"}
        for argument, value in arguments.items():
            kind = KINDS.get(types[argument])
            if kind and (kind, value) not in self.alive and (value or argument not in optional):
                self.faults.append(f"{name}: {argument} {value:#x} is no live {kind}")
            if argument in INDICES and value < 1 and arguments.get(f"desc{argument[1].upper()}"):
                self.faults.append(f"{name}: {argument} is {value}, below 1")

    def _perform(self, short: str, arguments: dict[str, int], types: dict[str, str], data: bytes) -> None:
        if short.endswith("Create"):
            (out,) = (
                name for name, type_ in types.items() if type_.removesuffix("*") in KINDS and "*" in type_
            )
            self._next += 0x10
            owner = arguments.get("grid") if out != "grid" else None
            self._make(KINDS[types[out].removesuffix("*")], self._next, owner)
            self._write(arguments[out], types[out], self._next)
        elif short == "Malloc":
            buffer = ctypes.create_string_buffer(max(arguments["size"], 1))
            self._buffers[ctypes.addressof(buffer)] = buffer
            self._make("memory", ctypes.addressof(buffer), arguments["grid"])
            self._write(arguments["ptr"], "void**", ctypes.addressof(buffer))
        elif short == "BufferRegister":
            self._make("registration", arguments["ptr"], arguments["grid"])
        elif short == "MatmulDescriptorSetAttribute":
            self._set_attribute(arguments, data)
        elif short == "MatmulDescriptorGetAttribute":
            stored = self._attributes.get(arguments["matmulDesc"], {}).get(arguments["attr"], b"")
            ctypes.memmove(arguments["buf"], stored, min(len(stored), arguments["sizeInBytes"]))
            self._write(arguments["sizeWritten"], "size_t*", len(stored))
        elif short[:3] in ("Set", "Get") and "handle" in arguments:
            _, target = arguments
            if short.startswith("Set"):
                self._state[short[3:], arguments["handle"]] = arguments[target]
            else:
                self._write(
                    arguments[target], types[target], self._state.get((short[3:], arguments["handle"]), 0)
                )
        elif "workspaceSizeInBytesOnDevice" in arguments:
            self._workspace(short, arguments)

    def _workspace(self, short: str, arguments: dict[str, int]) -> None:
        """Answer a query, or hold a routine against the query that must have come before it."""
        device, host = arguments["workspaceSizeInBytesOnDevice"], arguments["workspaceSizeInBytesOnHost"]
        ignored = {"alpha", "beta", "a", "b", "c", "d", "d_work", "h_work"}
        same = {k: v for k, v in arguments.items() if k not in ignored and not k.startswith("workspace")}
        attributes = {  # as with a to d, it is enough that there is an array
            name: name not in FREE and data
            for name, data in self._attributes.get(arguments.get("matmulDesc", 0), {}).items()
        }
        key = (
            short.removesuffix("_bufferSize"),
            *same.items(),
            *sorted(attributes.items()),
            arguments.get("c") == 0,
        )
        if short.endswith("_bufferSize"):
            self._queries[key] = self.workspace
            self._write(device, "size_t*", self.workspace[0])
            self._write(host, "size_t*", self.workspace[1])
        elif key not in self._queries:
            self.faults.append(f"cublasMp{short}: its workspace was not asked for with these arguments")
        elif device < self._queries[key][0] or host < self._queries[key][1]:
            self.faults.append(f"cublasMp{short}: workspace {device}, {host}, needs {self._queries[key]}")
        elif not (arguments["d_work"] or device == 0) or not (arguments["h_work"] or host == 0):
            self.faults.append(f"cublasMp{short}: workspace is NULL")

    def _set_attribute(self, arguments: dict[str, int], data: bytes) -> None:
        attribute = MatmulAttribute(arguments["attr"])
        size = ctypes.sizeof(ctype(attribute.c_type))
        if len(data) != size:
            self.faults.append(f"attribute {attribute.name} takes {size} bytes, got {len(data)}")
        self._attributes.setdefault(arguments["matmulDesc"], {})[attribute] = data

    def _make(self, kind: str, value: int, grid: int | None) -> None:
        if (kind, value) in self.alive:
            self.faults.append(f"{kind} {value:#x} made twice")
        self.alive[kind, value] = ("grid", grid) if grid else None

    def _release(self, short: str, arguments: dict[str, int], types: dict[str, str]) -> None:
        if short.endswith("Destroy"):
            ((name, value),) = arguments.items()
            key = KINDS[types[name]], value
        else:
            key = "memory" if short == "Free" else "registration", arguments["ptr"]
            if self.alive.get(key) != ("grid", arguments["grid"]):
                self.faults.append(f"cublasMp{short}: {arguments['ptr']:#x} is no live {key[0]} of that grid")
        children = [kind for (kind, _), owner in self.alive.items() if owner == key]
        self.faults += [f"{key[0]} released before its {kind}" for kind in children]
        self.alive.pop(key, None)
        if short == "Free":
            self._buffers.pop(arguments["ptr"], None)

    def _write(self, address: int, pointer: str, value: int) -> None:
        ctype(pointer.removesuffix("*")).from_address(address).value = value

    def _numroc(self, n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
        mine = (iproc - isrcproc) % nprocs
        return sum(min(nb, n - start) for start in range(mine * nb, n, nb * nprocs))

    def _status_string(self, status: int) -> int:
        text = f"the text of {Status(status).name}".encode()
        self._buffers[-1 - status] = buffer = ctypes.create_string_buffer(text)
        return ctypes.addressof(buffer)
