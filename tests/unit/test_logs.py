# SPDX-License-Identifier: Apache-2.0
"""The log: silent unless asked, one rank speaks unless all shall."""

import pytest

from tests.helpers.fresh import run_fresh

SCRIPT = """
import pblasmp as pb
pb.Context(engine="host").close()
from pblasmp.logs import logger
logger.debug("details")
"""
LAST = "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s %(rank)s %(message)s')"


def run(script, **environment):
    done = run_fresh(f"sys.modules['mpi4py'] = None\n{script}", **environment)
    return done.returncode, done.stderr


def test_silent_unless_asked():
    assert run(SCRIPT) == (0, "")
    assert run(SCRIPT, PBLASMP_LOG="") == (0, "")


def test_levels():
    engine = "pblasmp INFO: engine host on 1 rank: requested\n"
    assert run(SCRIPT, PBLASMP_LOG="info") == (0, engine)
    assert run(SCRIPT, PBLASMP_LOG="DEBUG") == (0, engine + "pblasmp DEBUG: details\n")


def test_a_program_that_configures_logging_gets_it():
    assert run(f"{LAST}\n{SCRIPT}") == (0, "pblasmp None engine host on 1 rank: requested\n")


@pytest.mark.parametrize(
    ("setting", "rank", "speaks"), [("debug", 0, True), ("debug", 1, False), ("debug,all", 1, True)]
)
def test_one_rank_speaks_unless_all_shall(setting, rank, speaks):
    script = "from pblasmp.logs import logger; logger.info('hello')"
    ranks = (
        {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "1", "RANK": str(rank)},
    )
    for environment in ranks:
        expected = f"pblasmp INFO rank {rank}: hello\n" if speaks else ""
        assert run(script, PBLASMP_LOG=setting, **environment) == (0, expected)


def test_a_setting_that_means_nothing():
    status, err = run(SCRIPT, PBLASMP_LOG="loud")
    assert status == 1
    assert "ArgumentError: PBLASMP_LOG: expected info or debug" in err
