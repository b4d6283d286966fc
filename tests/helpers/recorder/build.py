# SPDX-License-Identifier: Apache-2.0
"""Writes the stand-in library in C, from the table of the bindings, and compiles it."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from pblasmp.bindings import FUNCTIONS, Function
from pblasmp.bindings.enums import C_ENUMS

HANDLES = (
    "cublasMpGrid_t",
    "cublasMpHandle_t",
    "cublasMpMatmulDescriptor_t",
    "cublasMpMatrixDescriptor_t",
    "cudaStream_t",
    "ncclComm_t",
)
# Every function hands its name and its arguments, as 64-bit integers, to a hook that the tests set.
PRELUDE = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef int64_t (*hook_t)(const char* symbol, const int64_t* arguments);
typedef void (*cublasMpLoggerCallback_t)(int, const char*, const char*);
static hook_t hook;
void recorder_set_hook(hook_t new_hook) { hook = new_hook; }
"""


def build(
    directory: Path, version: int = 1000, *, omit: Collection[str] = (), flags: Sequence[str] = ()
) -> str:
    """Return the path of a new stand-in in ``directory``.

    Args:
        directory: Where it is made, as libcublasmp.so.0; one folder for each library.
        version: Which cuBLASMp it plays: what it says it is, the functions it has and their names.
        omit: Functions that it lacks although the version has them.
        flags: More flags for the compiler.
    """
    path, compiled = directory / "libcublasmp.so.0", directory / "stand_in.o"
    compiled.write_bytes(_compiled(version, tuple(omit)))
    subprocess.run([_cc(), "-shared", str(compiled), "-o", str(path), *flags], check=True)
    compiled.unlink()
    return str(path)


def _cc() -> str:
    return os.environ.get("CC", "cc")


@functools.cache
def _compiled(version: int, omit: tuple[str, ...]) -> bytes:
    """Return the object file of a version: to compile it takes ten times as long as to link it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "stand_in.o"
        command = [_cc(), "-c", "-fPIC", "-Wall", "-Werror", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=c_source(version, omit), text=True, check=True)
        return path.read_bytes()


def c_source(version: int, omit: Collection[str] = ()) -> str:
    types = [f"typedef int {name};" for name in C_ENUMS] + [f"typedef void* {name};" for name in HANDLES]
    rows = ((row, row.symbol(max(version, 500))) for row in FUNCTIONS.values())
    functions = [c_function(row, symbol, version) for row, symbol in rows if symbol and row.name not in omit]
    return "\n".join([PRELUDE, *types, *functions])


def c_function(row: Function, symbol: str, version: int) -> str:
    parameters = ", ".join(f"{argument.type} {argument.name}" for argument in row.arguments) or "void"
    values = ", ".join(f"(int64_t){argument.name}" for argument in row.arguments) or "0"
    more = f"if (!result) *version = {version};" if symbol == "cublasMpGetVersion" else ""
    return f"""
{row.returns} {symbol}({parameters})
{{
    const int64_t arguments[] = {{{values}}};
    const int64_t result = hook ? hook("{symbol}", arguments) : 0;
    {more}
    return ({row.returns})result;
}}"""
