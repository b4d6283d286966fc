# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's own testers, as Debian has compiled them, with pblasmp preloaded: some of ``benchmarks.testers``."""

from __future__ import annotations

import os

import pytest

from pblasmp.errors import LibraryNotFoundError
from reference import testers

SHORT = {tester.program: tester for tester in testers.TESTERS if tester.program in ("PBLAS/dpb3tst", "xcllt")}


@pytest.mark.parametrize("program", SHORT)
def test_all_pass(program):
    try:
        testers.fetch()
        outcome = testers.run(SHORT[program])
    except LibraryNotFoundError as missing:
        if os.environ.get("PBLASMP_SCALAPACK") == "required":
            raise
        pytest.skip(str(missing))
    assert outcome.passed == outcome.total > 0
    assert outcome.by_pblasmp > 0
    assert outcome.by_library == 0
