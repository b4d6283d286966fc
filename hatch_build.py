# SPDX-License-Identifier: Apache-2.0
"""Compiles the core of pblasmp for a wheel or, if the installation is editable, in place.

Without a C compiler, or with PBLASMP_CORE=0, the core is left out: everything works, but small calls take longer.
PBLASMP_WHEEL_PLATFORM says for which platform $CC compiles, by default this one.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreHook(BuildHookInterface):
    """Adds the core to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the core, and have the wheel's name say for which platform it is."""
        folder = Path(self.root, "pblasmp", "_core")
        spec = importlib.util.spec_from_file_location("core_build", folder / "build.py")
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        if version == "editable":
            target = core.LIBRARY
        else:
            self._room = tempfile.TemporaryDirectory()
            target = Path(self._room.name, core.LIBRARY.name)
        why_not = "PBLASMP_CORE=0" if os.environ.get("PBLASMP_CORE") == "0" else core.build(target)
        if why_not:
            self.app.display_warning(f"pblasmp is installed without its compiled core: {why_not}")
            if version == "editable":
                target.unlink(missing_ok=True)
        elif version != "editable":
            platform = os.environ.get("PBLASMP_WHEEL_PLATFORM") or sysconfig.get_platform()
            platform = platform.replace("-", "_").replace(".", "_")
            build_data["force_include"][str(target)] = f"pblasmp/_core/{target.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, *_: Any) -> None:
        """Remove what has been copied into the wheel."""
        if version != "editable":
            self._room.cleanup()
