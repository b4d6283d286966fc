# SPDX-License-Identifier: Apache-2.0
"""gpu_matmul.py rehearsed on the host engine: what the host lacks fails, the same on all ranks, and ends nothing."""

import subprocess
from pathlib import Path

from benchmarks.results import runs
from pblasmp import launch
from pblasmp.launch import find_launcher
from tests.helpers.mpi import starts_ranks

ROOT = Path(__file__).parents[2]

pytestmark = starts_ranks


def test_rehearsal(tmp_path):
    script = [*launch.interpreter(), str(ROOT / "benchmarks/gpu_matmul.py")]
    options = [
        "--rehearse",
        "--quick",
        "--only",
        "allgather_matmul,matmul_allreduce,2d,host",
        "--no-nvmath",
        "--results",
        str(tmp_path),
    ]
    mpirun = [str(find_launcher().path), "-n", "2"]
    done = subprocess.run(
        [*mpirun, *script, *options], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {run.benchmark: run for run in runs(tmp_path).values()}
    assert {name: len(run.rows) for name, run in found.items()} == {
        "gpu_matmul-allgather_matmul": 1, "gpu_matmul-matmul_allreduce": 1, "gpu_matmul-2d": 2, "gpu_matmul-host": 4,
    }  # fmt: skip
    row = found["gpu_matmul-allgather_matmul"].rows[0]
    assert len(row["seconds"]["pblasmp"]) == 5
    assert "host engine" in row["failed"]["split_p2p"]
    assert all(row["seconds"]["plan()"] for row in found["gpu_matmul-host"].rows)
