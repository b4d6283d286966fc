# SPDX-License-Identifier: Apache-2.0
"""What happens to an exception that nobody catches."""

from __future__ import annotations

import sys

import pytest

from pblasmp.comm import failures
from pblasmp.comm.agreement import _mark
from pblasmp.comm.communicator import _Serial


class Told:
    def __init__(self):
        self.errors = []

    def _fail(self, error):
        self.errors.append(error)


@pytest.fixture
def shown(monkeypatch):
    """The exceptions that the hook of before is given."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    monkeypatch.setattr(failures, "_watched", [])
    monkeypatch.setattr(failures, "_previous_hook", None)
    return errors


def uncaught(error):
    sys.excepthook(type(error), error, None)
    return error


def test_every_context_is_told_and_it_is_shown(shown):
    contexts = [Told(), Told()]
    for context in contexts:
        failures.watch(context, _Serial())
    error = uncaught(ValueError("mine"))
    assert [context.errors for context in contexts] == [[error], [error]]
    assert shown == [error]  # once, however many contexts there are


def test_it_is_shown_by_one_rank(shown):
    failures.watch(Told(), _Serial())
    error = ValueError("mine")
    _mark(error).shown_here = False
    uncaught(error)
    assert shown == []


def test_a_context_decides_who_shows_it(shown):
    class Elsewhere(Told):
        def _fail(self, error):
            _mark(error).shown_here = False

    context = Elsewhere()
    failures.watch(context, _Serial())
    uncaught(ValueError("mine"))
    assert shown == []


def test_contexts_that_are_gone_are_forgotten(shown):
    context = Told()
    failures.watch(context, _Serial())
    failures.watch(Told(), _Serial())
    failures.watch(Told(), _Serial())
    assert len([ref for ref, _ in failures._watched if ref() is not None]) == 1
    assert len(failures._watched) <= 2
    uncaught(ValueError("mine"))
    assert len(context.errors) == 1


def test_a_hook_of_the_users_in_between_is_kept(shown):
    failures.watch(Told(), _Serial())
    theirs = []
    ours = sys.excepthook
    sys.excepthook = lambda *args: (theirs.append(args[1]), ours(*args))
    error = uncaught(ValueError("mine"))
    assert theirs == shown == [error]
