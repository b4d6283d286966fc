# SPDX-License-Identifier: Apache-2.0
"""``python -m pblasmp``: the command pblasmp."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
