# SPDX-License-Identifier: Apache-2.0
"""Versions and paths of everything that a product depends on, for bug reports and ``pblasmp info``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import _core
from .errors import LibraryNotFoundError
from .launch import python_command
from .launchers import find_launcher, kind_of_library
from .resources import usable_cores

Facts = dict[str, Any]

_GPU_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-cublasmp-cu12", "nvidia-cublasmp-cu13", "nccl4py"),
    *("nvidia-cusolvermp-cu12", "nvidia-cusolvermp-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvshmem4py-cu12", "nvshmem4py-cu13", "cuda-pathfinder"),
)

_SETTINGS = ("NCCL_", "UCX_", "FI_", "MPIR_CVAR_", "OMPI_MCA_", "CUDA_VISIBLE_DEVICES", "PBLASMP_")

_ANSWER_SECONDS = 60

_ASK_BLAS = """
import threadpoolctl
keys = ("internal_api", "version", "filepath", "num_threads", "architecture")
def loaded():
    rows = [row for row in threadpoolctl.threadpool_info() if row["user_api"] == "blas"]
    return [{key: row[key] for key in keys if key in row} for row in rows]
import numpy
answer = {"numpy": {"version": numpy.__version__, "path": numpy.__file__, "blas": loaded()}}
import scipy, scipy.linalg.blas
new = [row for row in loaded() if row not in answer["numpy"]["blas"]] or answer["numpy"]["blas"]
answer["scipy"] = {"version": scipy.__version__, "path": scipy.__file__, "blas": new}
"""
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
answer = {
    "mpi4py": {"version": mpi4py.__version__, "path": mpi4py.__file__},
    "MPI library": {
        "version": " ".join(MPI.Get_library_version().strip("\\0 ").split("\\n")[0].split()),
        "path": ", ".join(sorted(paths)),
    },
}
"""
_ASK_CUBLASMP = """
from pblasmp.bindings import Library, version_text
library = Library()
answer = {"cuBLASMp": {"version": version_text(library.version), "path": library.path}}
"""

_ASK_GPUS = """
import ctypes, cupy, sys
runtime, nccl = cupy.cuda.runtime, ctypes.c_int()
def version(number):
    return f"{number // 1000}.{number % 1000 // 10}"
try:
    count = runtime.getDeviceCount()
except runtime.CUDARuntimeError as error:
    from pblasmp.engines.gpu.runtime.device import in_words
    sys.exit("Error: " + in_words(error))
answer = {"CUDA": {"version": version(runtime.runtimeGetVersion()), "driver": version(runtime.driverGetVersion())}}
try:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    path = load_nvidia_dynamic_lib("nccl").abs_path
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(nccl))
    major, rest = divmod(nccl.value, 10000)
    answer["NCCL"] = {"version": f"{major}.{rest // 100}.{rest % 100}", "path": path}
except Exception as error:
    answer["NCCL"] = {"problem": str(error)}
for i in range(count):
    facts = runtime.getDeviceProperties(i)
    reaches = [peer for peer in range(count) if peer != i and runtime.deviceCanAccessPeer(i, peer)]
    answer[f"GPU {i}"] = {
        "version": facts["name"].decode(),
        "path": runtime.deviceGetPCIBusId(i),
        "memory_bytes": facts["totalGlobalMem"],
        "reaches": reaches,
    }
"""
# NCCL takes its plugin by the variable; each version of the interface is a table that begins with the plugin's name.
_ASK_NETWORK = """
import ctypes, os
try:  # MPICH's wheel brings a libfabric of its own
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
except Exception:
    pass
def loaded(*names):
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        with open("/proc/self/maps") as maps:
            stem = os.path.basename(name).partition(".so")[0]
            paths = [line.split(maxsplit=5)[5].strip() for line in maps if "/" + stem in line]
        return library, (paths or [name])[0]
    return None, ""
answer = {}
chosen = os.environ.get("NCCL_NET_PLUGIN", "")
names = ["libnccl-net.so"] if not chosen else [chosen, f"libnccl-net-{chosen}.so"]
library, path = (None, "") if chosen == "none" else loaded(*names)
if library is None:
    why = "NCCL_NET_PLUGIN=none" if chosen == "none" else f"{names[-1]} was not found"
    answer["NCCL network plugin"] = {"version": f"none: {why}; NCCL has InfiniBand and sockets of its own"}
for number in range(20, 3, -1) if library is not None else ():
    try:
        name = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{number}").value or b""
    except ValueError:
        continue
    answer["NCCL network plugin"] = {"version": f"{name.decode(errors='replace')}, v{number}", "path": path}
    break
else:
    if library is not None:
        answer["NCCL network plugin"] = {"problem": "no table of NCCL's network", "path": path}
library, path = loaded("libfabric.so.1", "libfabric.so")
if library is not None:
    library.fi_version.restype = ctypes.c_uint32
    major, minor = divmod(library.fi_version(), 1 << 16)
    answer["libfabric"] = {"version": f"{major}.{minor}", "path": path}
else:
    answer["libfabric"] = {"version": "none: libfabric.so.1 was not found"}
"""
_ASK_ENGINE = """
import os, sys
from pblasmp.launchers import LAUNCHERS
for row in LAUNCHERS:  # one process alone, whatever started this one
    os.environ.pop(row.rank, None)
sys.modules["mpi4py"] = None
import pblasmp as pb
with pb.Context() as ctx:
    answer = {"engine": {"version": ctx.engine.name, "why": ctx.engine.why}}
"""


_QUESTIONS = (  # scripts, and what each of them is about
    (_ASK_BLAS, "BLAS"), (_ASK_MPI, "MPI library"), (_ASK_CUBLASMP, "cuBLASMp"), (_ASK_GPUS, "GPUs"),
    (_ASK_NETWORK, "network"), (_ASK_ENGINE, "engine"),
)  # fmt: skip


def collect() -> dict[str, Facts]:
    """Return the facts about each component, by its name. Local.

    Each value is a dict with ``version``, ``path`` and further facts, or with ``problem``: why nothing is known.
    Libraries are loaded in separate processes, all at once, so that this one is not affected.
    """
    from . import __version__

    with ThreadPoolExecutor(len(_QUESTIONS)) as asking:
        blas, mpi, *others = asking.map(_ask, *zip(*_QUESTIONS, strict=True))
    found: dict[str, Facts] = {
        "pblasmp": {"version": __version__, "path": str(Path(__file__).parent)},
        "core": {"version": f"none: {missing}" if (missing := _core.why_not()) else str(_core.LIBRARY)},
        "Python": {"version": platform.python_version(), "path": sys.executable},
        "machine": {"system": platform.platform(), "cores": usable_cores()},
        **blas,
        **mpi,
        "mpirun": _mpirun(),
    }
    for answer in others:
        found |= answer
    if problem := _unlike(found["mpirun"].get("family"), found["MPI library"]):
        found["mpirun"]["problem"] = problem
    versions = {name: version for name in _GPU_PACKAGES if (version := _version(name))}
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    found["settings"] = settings or {"version": "none"}
    return found | {"GPU packages": versions or {"problem": "none installed"}}


def launcher_problem(kind: str) -> str:
    """Return why a launcher of this kind cannot start ranks of mpi4py's MPI library, "" if it can. Local."""
    return _unlike(kind, _ask(_ASK_MPI, "MPI library")["MPI library"])


def _unlike(launcher: str | None, library: Facts) -> str:
    version = library.get("version", "")
    fits = launcher in (None, "other", kind_of_library(version) or launcher)
    return "" if fits else f"it belongs to a different MPI from the library, {version}"


def _ask(script: str, topic: str) -> dict[str, Facts]:
    """Run a script that sets ``answer`` in a new process; if it fails, return the problem under ``topic``."""
    command = python_command(f"{script}\nimport json; print(json.dumps(answer))")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {topic: {"problem": f"no answer in {_ANSWER_SECONDS} s"}}
    if done.returncode == 0:
        answer: dict[str, Facts] = json.loads(done.stdout.splitlines()[-1])
        return answer
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return {topic: {"problem": lines[-1].partition("Error: ")[2] or lines[-1]}}


def _mpirun() -> Facts:
    try:
        launcher = find_launcher()
    except LibraryNotFoundError as error:
        return {"problem": str(error)}
    return {"version": launcher.version, "path": str(launcher.path), "family": launcher.kind}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
