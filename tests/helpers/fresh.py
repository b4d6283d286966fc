# SPDX-License-Identifier: Apache-2.0
"""Scripts in a Python that has not imported pblasmp: a fork of the preloaded one, in which it is forgotten."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pblasmp import launch

_FORGET = """
import logging, os, sys
for _name in [_name for _name in sys.modules if _name.partition(".")[0] in {forgotten}]:
    del sys.modules[_name]
logging.Logger.manager.loggerDict.pop("pblasmp", None)
os.environ.update({environment})
"""


def run_fresh(
    script: str, *arguments: str, forgotten: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, with its output and its errors as text. Local.

    Args:
        script: the script, and what it finds in ``sys.argv``.
        forgotten: other packages that it has not imported.
        environment: what it finds in the environment, as it would from its start.
    """
    forget = _FORGET.format(forgotten={"pblasmp", *forgotten}, environment=environment)
    return subprocess.run(
        [*launch.interpreter(), "-c", forget + script, *arguments], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
