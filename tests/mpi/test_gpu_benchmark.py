# SPDX-License-Identifier: Apache-2.0
"""gpu_matmul.py rehearsed on the host engine: what the host lacks fails, the same on all ranks, and ends nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from pblasmp import launch
from pblasmp.launch import find_launcher
from tests.helpers.mpi import starts_ranks

ROOT = Path(__file__).parents[2]

pytestmark = starts_ranks


def test_rehearsal(tmp_path):
    output = tmp_path / "out.json"
    script = [*launch.interpreter(), str(ROOT / "benchmarks/gpu_matmul.py")]
    options = ["--rehearse", "--quick", "--only", "ag,ar,2d,host", "--no-nvmath", "--json", str(output)]
    mpirun = [str(find_launcher().path), "-n", "2"]
    done = subprocess.run(
        [*mpirun, *script, *options], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(output.read_text())["sections"]
    assert {name: len(rows) for name, rows in sections.items()} == {"ag": 1, "ar": 1, "2d": 2, "host": 4}
    entries = sections["ag"][0]["entries"]
    assert entries["auto"]["us"] > 0
    assert "host engine" in entries["split_p2p"]["failed"]
    assert all(row["entries"]["plan()"]["calls"] == 100 for row in sections["host"])
    assert output.with_suffix(".md").read_text() in done.stdout
