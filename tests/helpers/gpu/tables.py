# SPDX-License-Identifier: Apache-2.0
"""What calls on GPUs are refused for where the tests run, and many cases in one test, some of them so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import pblasmp as pb

from .moves import say

_REFUSED = {  # by environment variable: why what was asked for by name may be refused
    "NCCL_HOSTID": ("NCCL has no window", "GPUs of one NVLink domain", "fused=True asks for"),
    "NCCL_MULTI_RANK_GPU_ENABLE": ("ranks share a GPU",),
}


def why_refused_here(error: BaseException) -> str:
    """Return why a call is refused where the tests run, between hosts or with ranks that share a GPU; "" if not. Local.

    Only algorithms asked for by name and fused epilogues count, also where a test expected another refusal.
    The conftest of tests/gpu skips a test that raises such an error.
    """
    words = [word for name, words in _REFUSED.items() if os.environ.get(name) for word in words]
    for each in (error, error.__context__):
        text = str(each) if isinstance(each, pb.UnsupportedError) else ""
        if (text.startswith("algo ") or "fused=True" in text) and any(word in text for word in words):
            return text.splitlines()[0]
    return ""


def check_each(ctx: pb.Context, cases: Iterable[partial[Any]]) -> None:
    """Run cases, which assert after their last collective call; those refused where the tests run count for nothing.

    Collective.

    Raises:
        UnsupportedError: all were refused.
    """
    refused, computed = None, False
    for case in cases:
        say(ctx, f"{case.args} {case.keywords}")
        try:
            case()
            computed = True
        except pb.UnsupportedError as error:  # on every rank
            if not why_refused_here(error):
                raise
            refused = error
    if refused is not None and not computed:
        raise refused
