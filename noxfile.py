# SPDX-License-Identifier: Apache-2.0
"""``nox`` runs the tests without ranks on every Python that is installed, ``nox -s ranks`` those with ranks."""

from __future__ import annotations

import nox

nox.options.sessions = ["unit"]
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


@nox.session(python=PYTHONS)
def unit(session: nox.Session) -> None:
    """The tests that need no MPI launcher, and the type checker."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", "tests/unit", *session.posargs)
    session.run("mypy")


@nox.session(python=PYTHONS)
def ranks(session: nox.Session) -> None:
    """The tests that start MPI ranks."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", "tests/mpi", *session.posargs)
