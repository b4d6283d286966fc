# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 4 python -m pytest tests/mpi``: all ranks run pytest."""

from tests.helpers.under_mpirun import (  # noqa: F401 - hooks
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
)
