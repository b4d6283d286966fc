# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's own testers, as Debian has compiled them, with pblasmp preloaded: some of ``benchmarks.testers``."""

import os

import pytest

from pblasmp.errors import LibraryNotFoundError
from reference import testers
from tests.helpers.slow import draws, only_long

SHORT = [
    tester
    for tester in testers.TESTERS
    if tester.program in ("PBLAS/dpb3tst", "xdqr", *only_long("xcllt", "xdinv"))
]
CALL_LEVEL_1 = ("xdqr",)
"""Those that also test routines that are not here: what these call of levels 1 and 2 is left to ScaLAPACK."""


@pytest.mark.parametrize("tester", SHORT, ids=lambda tester: tester.program)
def test_all_pass(tester):
    try:
        testers.fetch()
        ranks = (
            testers.RANKS if tester.program != "xdqr" else draws(2, long=testers.RANKS)
        )  # first, all but one rest
        outcome = testers.run(tester, ranks, grids=draws(1, long=2))
    except LibraryNotFoundError as missing:
        if os.environ.get("PBLASMP_SCALAPACK") == "required":
            raise
        pytest.skip(str(missing))
    assert outcome.passed == outcome.total > 0
    assert outcome.by_pblasmp > 0
    assert (outcome.by_library > 0) == (tester.program in CALL_LEVEL_1)
