# SPDX-License-Identifier: Apache-2.0
"""Tests of pblasmp.torch are left out if PyTorch is not installed: pip install 'pblasmp[torch]'."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]

# Ranks compile by themselves: a pool of processes on each rank, which import PyTorch, costs more than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
