# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public functions: each names what is like it, and has an example that prints what it shows."""

import doctest
import inspect
import re
import sys

import numpy as np

import pblasmp as pb
from pblasmp import pblas
from tests.helpers.mpi import on_ranks, run_on_one_node


def functions():
    """Yield each public function, with its name."""
    for module in (pb, pb.blas, pb.linalg):
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)):
                yield f"{module.__name__}.{name}", function


@on_ranks(2, runner=run_on_one_node)
def test_examples(ctx):
    runner, told = doctest.DocTestRunner(verbose=False), []
    for name, function in functions():
        found = doctest.DocTestParser().get_doctest(
            inspect.getdoc(function), {"pb": pb, "np": np, "ctx": ctx}, name, None, 0
        )
        if found.examples:
            told.clear()
            runner.run(found, out=told.append)
        assert not told, name
        assert found.examples, name
        told.clear()


def test_related_functions():
    """Names of functions alone, as in "plan, which ...", are those of the same module or of the top."""
    for name, function in functions():
        _, found, text = inspect.getdoc(function).partition("See Also:\n")
        assert found, name
        words = re.split(r"[\s,;.]+", re.sub(r"``.*?``", "", text.partition("\n\n")[0]))
        assert all(hasattr(pblas, each) for each in re.findall(r"``pblasmp\.pblas\.(\w+)``", text)), name
        module = sys.modules[name.rpartition(".")[0]]
        assert {word for word in words if "_" in word} <= {
            *module.__all__,
            *pb.__all__,
            "local_shape",
            "cond_estimate",
        }
