# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels that are compiled when they are first needed."""

from __future__ import annotations

from typing import Any

__all__ = ["CompiledKernels"]


class CompiledKernels:
    """Kernels, compiled for the current GPU when they are needed. Local.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[Any, Any] = {}

    def _compiled(self, name: str, code: str, *, room: int = 0, **macros: Any) -> Any:
        """Return a kernel, with so many bytes of shared memory that a launch may ask for."""
        key = (name, *sorted(macros.items()))
        if key not in self._functions:
            options = ("-std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items()))
            kernel = self._cupy.RawModule(code=code, options=options).get_function(name)
            if room:
                kernel.max_dynamic_shared_size_bytes = room
            self._functions[key] = kernel
        return self._functions[key]
