# SPDX-License-Identifier: Apache-2.0
"""Tests of pblasmp.torch are left out if PyTorch is not installed: pip install 'pblasmp[torch]'."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
