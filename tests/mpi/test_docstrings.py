# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of public functions: each has one, and it prints on every rank what it shows."""

from __future__ import annotations

import doctest
import inspect

import numpy as np

import pblasmp as pb
from tests.helpers.mpi import run_on_one_node

WITHOUT = {"draw", "tune", "verify"}
"""Functions at the top without an example: a page of the docs shows what they print."""


def functions():
    """Yield each public function, with its name."""
    for module in (pb, pb.blas, pb.linalg):
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)):
                yield f"{module.__name__}.{name}", function


def run_examples(comm):
    runner, told = doctest.DocTestRunner(verbose=False), []
    with pb.Context(comm, engine="host") as ctx:
        for name, function in functions():
            found = doctest.DocTestParser().get_doctest(
                inspect.getdoc(function), {"pb": pb, "np": np, "ctx": ctx}, name, None, 0
            )
            if found.examples:
                told.clear()
                runner.run(found, out=told.append)
            yield (
                name,
                "".join(told) or (None if found.examples or name.partition(".")[2] in WITHOUT else "none"),
            )
            told.clear()


def test_examples():
    run_on_one_node(run_examples, 2)
