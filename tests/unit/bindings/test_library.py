# SPDX-License-Identifier: Apache-2.0
"""What the bindings pass to C, and what they make of what comes back."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

from pblasmp.bindings import FUNCTIONS, Function, Library, LoggerCallback, MatmulAttribute, Status, ctype
from pblasmp.errors import StatusError, UnsupportedError
from tests.helpers.recorder import Recorder

WITH_STATUS = [name for name, row in FUNCTIONS.items() if row.returns == "cublasMpStatus_t"]


def distinct_arguments(row: Function) -> list[int]:
    """One value per argument, none equal and each as wide as its type carries."""
    base = {1: 10, 4: 0x7000_0000, 8: 0x7000_0000_0000_0000}
    return [base[ctypes.sizeof(ctype(a.type))] + k for k, a in enumerate(row.arguments)]


@pytest.mark.parametrize("name", WITH_STATUS)
def test_every_argument_arrives_and_every_status_is_raised(
    name: str, library: Library, recorder: Recorder
) -> None:
    row = FUNCTIONS[name]
    values: list[object] = list(distinct_arguments(row))
    sent = dict(zip((a.name for a in row.arguments), values, strict=True))
    for k, argument in enumerate(row.arguments):
        if argument.type == "const char*":
            values[k] = text = ctypes.c_char_p(b"a.log")
            sent[argument.name] = ctypes.cast(text, ctypes.c_void_p).value
    for status in list(Status)[1:]:
        recorder.clear()
        recorder.fail(status)
        with pytest.raises(StatusError) as caught:
            getattr(library, name)(*values)
        (call,) = recorder.calls
        assert (call.name, call.symbol, list(call.arguments.items())) == (name, name, list(sent.items()))
        message = str(caught.value)
        for part in (name, f"CUBLASMP_STATUS_{status.name} ({status:d})", "0.10.0", library.path):
            assert part in message
        assert "CUBLASMP_LOG_LEVEL=5" in message
        assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_unknown_status(library: Library, recorder: Recorder) -> None:
    recorder.fail(42)
    with pytest.raises(StatusError, match=r"cublasMpLoggerSetLevel returned an unknown status \(42\)"):
        library.cublasMpLoggerSetLevel(5)


def test_results_come_back(library: Library, recorder: Recorder) -> None:
    handle, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cublasMpCreate(ctypes.byref(handle), 77) is None
    library.cublasMpSetStream(handle, 99)
    library.cublasMpGetStream(handle, ctypes.byref(stream))
    assert stream.value == 99
    assert [library.cublasMpNumroc(10, 3, p, 1, 2) for p in (0, 1)] == [4, 6]
    assert library.cublasMpGetStatusString(Status.NOT_SUPPORTED) == b"the text of NOT_SUPPORTED"
    library.cublasMpDestroy(handle.value)
    assert [call.arguments.get("stream") for call in recorder.calls][:2] == [77, 99]
    recorder.assert_clean()


def test_null_and_negative(library: Library, recorder: Recorder) -> None:
    library.cublasMpLoggerSetCallback(None)
    library.cublasMpLoggerSetMask(-1)
    assert [call.arguments for call in recorder.calls] == [{"callback": 0}, {"mask": -1}]


def test_logger_callback(library: Library, recorder: Recorder) -> None:
    seen = []
    callback = LoggerCallback(lambda level, function, message: seen.append((level, function, message)))
    library.cublasMpLoggerSetCallback(callback)
    LoggerCallback(recorder.calls[0]["callback"])(5, b"cublasMpMatmul", b"Using NO_OVERLAP")
    assert seen == [(5, b"cublasMpMatmul", b"Using NO_OVERLAP")]


@pytest.mark.parametrize("attribute", MatmulAttribute)
def test_attribute_types(attribute: MatmulAttribute, library: Library, recorder: Recorder) -> None:
    desc, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.cublasMpMatmulDescriptorCreate(ctypes.byref(desc), 68)
    value, back = (ctype(attribute.c_type)(start) for start in (3, 0))
    library.cublasMpMatmulDescriptorSetAttribute(desc, attribute, ctypes.byref(value), ctypes.sizeof(value))
    assert recorder.calls[-1].data == bytes(value)
    library.cublasMpMatmulDescriptorGetAttribute(
        desc, attribute, ctypes.byref(back), ctypes.sizeof(back), ctypes.byref(size)
    )
    assert (back.value, size.value) == (3, ctypes.sizeof(back))
    library.cublasMpMatmulDescriptorDestroy(desc)
    recorder.assert_clean()


def test_prepared_call(library: Library, recorder: Recorder) -> None:
    row = FUNCTIONS["cublasMpMatmul"]
    values: list[object] = list(distinct_arguments(row))
    a = values[6] = ctypes.c_void_p(1234)
    values[15] = None  # c
    call = library.prepare(row.name, *values)
    for pointer in (1234, 5678):
        a.value = pointer
        recorder.fail(Status.NOT_SUPPORTED)
        with pytest.raises(StatusError, match=r"cublasMpMatmul returned CUBLASMP_STATUS_NOT_SUPPORTED \(7\)"):
            call()
    first, second = ([*c.arguments.values()] for c in recorder.calls)
    expected = [*distinct_arguments(row)]
    expected[6], expected[15] = 1234, 0
    assert first == expected
    expected[6] = 5678
    assert second == expected


def test_prepared_call_succeeds(library: Library, recorder: Recorder) -> None:
    library.prepare("cublasMpLoggerSetLevel", 3)()
    assert recorder.calls[0].arguments == {"level": 3}


@pytest.mark.parametrize("arguments", [(), (1, 2), ("three",)])
def test_prepared_call_refuses_wrong_arguments(arguments: tuple[object, ...], library: Library) -> None:
    with pytest.raises(TypeError):
        library.prepare("cublasMpLoggerSetLevel", *arguments)


def test_raw_call_returns_the_status(library: Library, recorder: Recorder) -> None:
    recorder.fail(Status.INTERNAL_ERROR)
    raw = library.raw("cublasMpLoggerSetLevel")
    assert (raw(3), raw(4)) == (6, 0)
    assert [call["level"] for call in recorder.calls] == [3, 4]


def test_old_names(stand_in: Callable[..., str]) -> None:
    aliases = {row.name: row.alias for row in FUNCTIONS.values() if row.alias}
    assert aliases == {
        "cublasMpSetStream": "cublasMpStreamSet",
        "cublasMpGetStream": "cublasMpStreamGet",
        "cublasMpMatmulDescriptorSetAttribute": "cublasMpMatmulDescriptorAttributeSet",
        "cublasMpMatmulDescriptorGetAttribute": "cublasMpMatmulDescriptorAttributeGet",
    }
    for version in (700, 800):
        with Recorder(stand_in(version)) as recorder:
            library = Library(recorder.path)
            for name, alias in aliases.items():
                recorder.clear()
                recorder.fail(Status.INTERNAL_ERROR)
                with pytest.raises(StatusError, match=name):
                    getattr(library, name)(*distinct_arguments(FUNCTIONS[name]))
                assert recorder.calls[0].symbol == (alias if version < 800 else name)


@pytest.mark.parametrize("version", [201, 300, 400])
def test_too_old(version: int, stand_in: Callable[..., str]) -> None:
    path = stand_in(version)
    with pytest.raises(UnsupportedError, match=rf"{path} is cuBLASMp 0.{version // 100}.*CAL, not NCCL"):
        Library(path)


def test_newer_than_the_table(stand_in: Callable[..., str]) -> None:
    assert callable(Library(stand_in(1100)).cublasMpMatmul)


def test_version_query_fails(recorder: Recorder) -> None:
    recorder.fail(Status.NOT_INITIALIZED)
    with pytest.raises(StatusError, match="cublasMpGetVersion returned CUBLASMP_STATUS_NOT_INITIALIZED"):
        Library(recorder.path)


def test_attributes(library: Library) -> None:
    assert library.cublasMpGemm is library.cublasMpGemm
    assert repr(library) == f"<cuBLASMp 0.10.0 at {library.path}>"
    with pytest.raises(AttributeError, match="cublasMpGem"):
        _ = library.cublasMpGem


def test_nothing_is_loaded_by_the_import() -> None:
    code = """
import sys, pathlib, pblasmp.bindings
maps = pathlib.Path("/proc/self/maps").read_text()
loaded = [name for name in ("cublas", "nccl", "nvshmem", "libcuda") if name in maps]
print(loaded, {"cuda", "mpi4py"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] set()"
