# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: machines are shared. In continuous integration the examples are the same in every run.
settings.register_profile("pblasmp", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("pblasmp")
