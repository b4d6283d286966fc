# SPDX-License-Identifier: Apache-2.0
"""Random faults of random kinds in random places. ``python -m tests.chaos`` tries many, test_chaos.py a few."""
