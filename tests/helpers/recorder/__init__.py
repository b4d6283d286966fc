# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libcublasmp.so.0 that records what it is called with, and plays any version and any failure.

path = build(tmp_path, version=1000)
with Recorder(path) as recorder:
    library = Library(path)
    ...
    assert recorder.names == ["cublasMpGetVersion", "cublasMpCreate", ...]
    recorder.assert_clean()
"""

from .build import build
from .recorder import Call, Recorder

__all__ = ["Call", "Recorder", "build"]
