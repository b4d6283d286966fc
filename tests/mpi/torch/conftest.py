# SPDX-License-Identifier: Apache-2.0
"""Tests of pblasmp.torch are left out if PyTorch is not installed: pip install 'pblasmp[torch]'."""

import hashlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]

# Ranks compile by themselves: a pool of processes on each rank, which import PyTorch, costs more than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# PyTorch keeps what it compiled for a version of the package. Here the code changes while the version does not.
_texts = sorted((Path(__file__).parents[3] / "pblasmp" / "torch").glob("*.py"))
_code = hashlib.sha256(b"".join(text.read_bytes() for text in _texts)).hexdigest()[:16]
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/pblasmp-{os.getuid()}-{_code}")
