# SPDX-License-Identifier: Apache-2.0
"""What ``pblasmp info`` and ``doctor`` find of MPI, of what carries messages, and of the core."""

import os
import shutil
import subprocess
import threading

import pytest

from pblasmp import _core, info
from pblasmp._core import build
from pblasmp.cli import doctor


def test_info_tells_what_is_missing_and_what_does_not_fit(monkeypatch, tmp_path):
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    other.chmod(0o755)
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "__version__ = '9'\nclass rc: pass\nclass MPI:\n    Get_library_version = lambda: 'MPICH Version: 5'\n"
    )
    monkeypatch.setenv("PBLASMP_MPIRUN", str(other))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = info.collect()
    assert found["engine"]["version"] == "host"
    assert found["mpirun"]["problem"] == "it belongs to a different MPI from the library, MPICH Version: 5"
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no libmpi')")
    monkeypatch.setenv("PBLASMP_MPIRUN", str(tmp_path / "none"))
    found = info.collect()
    assert found["MPI library"] == {"problem": "no libmpi"}
    assert "none cannot be run" in found["mpirun"]["problem"]


def test_info_asks_all_at_once(monkeypatch):
    """A new Python takes a second, or several where others compute."""
    all_there = threading.Barrier(6, timeout=30)

    def ask(script, topic):
        all_there.wait()
        return {topic: {"version": "1"}}

    monkeypatch.setattr(info, "_ask", ask)
    assert {"BLAS", "MPI library", "cuBLASMp", "GPUs", "network", "engine"} <= info.collect().keys()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_info_tells_what_carries_messages_between_nodes(monkeypatch, tmp_path):
    """NCCL's plugin by its own name, libfabric's version, and the variables that choose."""
    libraries = {
        "libnccl-net-aws": 'struct { const char *name; } ncclNetPlugin_v9 = {"Libfabric"}, ncclNetPlugin_v8 = {"old"};',
        "libnccl-net": "int nothing;",
        "libfabric": "unsigned fi_version(void) { return 1 << 16 | 22; }",
    }
    for name, source in libraries.items():
        suffix = ".so.1" if name == "libfabric" else ".so"
        (tmp_path / f"{name}.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", "-o", tmp_path / f"{name}{suffix}", tmp_path / f"{name}.c"]
        subprocess.run(command, check=True)

    def asked(plugin):
        monkeypatch.setenv("NCCL_NET_PLUGIN", plugin)
        return info._ask(info._ASK_NETWORK, "network")

    (tmp_path / "mpi4py.py").write_text("")  # an MPI may bring its own libfabric
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)
    found = asked("aws")
    assert found["NCCL network plugin"] == {
        "version": "Libfabric, v9",
        "path": str(tmp_path / "libnccl-net-aws.so"),
    }
    assert found["libfabric"] == {"version": "1.22", "path": str(tmp_path / "libfabric.so.1")}
    assert asked("")["NCCL network plugin"]["problem"] == "no table of NCCL's network"
    assert "NCCL_NET_PLUGIN=none" in asked("none")["NCCL network plugin"]["version"]
    assert "libnccl-net-no.so was not found" in asked("no")["NCCL network plugin"]["version"]


def test_info_and_doctor_say_which_core_there_is(monkeypatch, capsys):
    monkeypatch.setattr(info, "_ask", lambda script, topic: {topic: {"version": "1"}})
    monkeypatch.setenv("PBLASMP_CORE", "0")
    without = info.collect()["core"]
    assert without == {"version": "none: PBLASMP_CORE=0"}
    with monkeypatch.context() as there:
        there.setattr(_core, "_core", lambda: None)
        assert info.collect()["core"] == {"version": str(build.LIBRARY)}
    doctor.print_diagnosis({"facts": {"core": without}, "faults": []})
    assert capsys.readouterr().out.splitlines()[0] == "core         none: PBLASMP_CORE=0"
