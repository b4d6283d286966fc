# SPDX-License-Identifier: Apache-2.0
"""What happens to an exception that nobody catches."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pblasmp.comm import failures
from pblasmp.comm.agreement import leave
from pblasmp.comm.choice import Serial
from tests.helpers.threads import on_ranks


class Told:
    def __init__(self):
        self.errors = []

    def fail(self, error):
        self.errors.append(error)


@pytest.fixture
def shown(monkeypatch):
    """The exceptions that the hook of before is given."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    monkeypatch.setattr(failures, "_watched", [])
    monkeypatch.setattr(failures._Hooks, "last", None)
    monkeypatch.setattr(failures._Hooks, "first", None)
    return errors


def uncaught(error):
    sys.excepthook(type(error), error, None)
    return error


def test_every_context_is_told_and_it_is_shown(shown):
    contexts = [Told(), Told()]
    for context in contexts:
        failures.watch(context, Serial())
    error = uncaught(ValueError("mine"))
    assert [context.errors for context in contexts] == [[error], [error]]
    assert shown == [error]  # once, however many contexts there are


def test_at_the_prompt_contexts_outlast_an_exception(shown, monkeypatch):
    """Python shows it by the same hook, and goes on."""
    context = Told()
    failures.watch(context, Serial())
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert (shown, context.errors) == ([uncaught(ValueError("mine"))], [])


def test_hooks_that_call_each_other_end(shown):
    """As PyTorch's, which are set between contexts, each with the one of before."""
    contexts, calls = [Told() for _ in range(3)], []
    for number, context in enumerate(contexts):
        failures.watch(context, Serial())
        before = sys.excepthook
        sys.excepthook = lambda *given, before=before, number=number: (calls.append(number), before(*given))
    error = uncaught(ValueError("mine"))
    assert [context.errors for context in contexts] == [[error]] * 3
    assert (shown, calls) == ([error], [2, 1])
    assert uncaught(ValueError("again")) == shown[-1]


def test_it_is_shown_by_one_rank(shown):
    """It has been shown elsewhere before, or the context finds out."""

    class Leaving(Told):
        def fail(self, error):
            errors = {0: ValueError("of the rank that shows it"), 1: error}
            on_ranks(2, lambda comm: leave(comm, errors[comm.rank]))

    contexts = Told(), Leaving()
    for context in contexts:
        failures.watch(context, Serial())
    error = uncaught(ValueError("mine"))
    uncaught(error)
    assert contexts[0].errors == [error] * 2
    assert shown == []


def test_contexts_that_are_gone_are_forgotten(shown):
    context = Told()
    failures.watch(context, Serial())
    failures.watch(Told(), Serial())
    failures.watch(Told(), Serial())
    assert len([ref for ref, _ in failures._watched if ref() is not None]) == 1
    assert len(failures._watched) <= 2
    uncaught(ValueError("mine"))
    assert len(context.errors) == 1


def test_a_hook_of_the_users_in_between_is_kept(shown):
    failures.watch(Told(), Serial())
    theirs = []
    before = sys.excepthook
    sys.excepthook = lambda *args: (theirs.append(args[1]), before(*args))
    error = uncaught(ValueError("mine"))
    assert theirs == shown == [error]


class Open(Told):
    """A context that notes its closing; an exception may come out of it."""

    closed: list[Open]

    def __init__(self, closed, error=None):
        super().__init__()
        self.closed, self.error = closed, error

    def close(self):
        self.closed.append(self)
        if self.error is not None:
            raise self.error


def test_the_end_closes_what_is_open_the_last_made_first(shown):
    closed, error = [], ValueError("mine")
    contexts = [Open(closed), Open(closed, error), Open(closed)]
    for context in contexts:
        failures.watch(context, Serial())
    failures._close_all()
    assert closed == contexts[::-1]
    assert shown == [error]
    assert [context.errors for context in contexts] == [[error]] * 3


def test_the_exit_hook_is_there_once_and_is_the_last_to_be_registered(shown, monkeypatch):
    hooks = []
    monkeypatch.setattr(failures, "atexit", SimpleNamespace(register=hooks.append, unregister=hooks.remove))
    hooks.append(failures._close_all)  # as of an earlier context
    hooks.append("an engine's")
    failures.watch(Told(), Serial())
    assert hooks == ["an engine's", failures._close_all]


@pytest.mark.parametrize(
    ("size", "closed", "raised", "gone"),
    [
        (2, False, False, False),
        (1, False, False, False),
        (2, True, False, False),
        (2, False, True, False),
        (2, False, False, True),
    ],
)
def test_a_context_that_was_dropped_is_closed_where_others_may_wait_for_it(
    size, closed, raised, gone, shown, monkeypatch
):
    asked = []
    monkeypatch.setattr(failures, "closing", lambda comm, *, here: asked.append((comm, here)))
    comm = SimpleNamespace(
        size=size, channel=SimpleNamespace(closed=closed, raised=raised), gone=lambda: gone
    )
    failures.watch(Told(), comm)  # gone at once
    waited_for = (size, closed, raised, gone) == (2, False, False, False)
    failures._close_all()
    assert asked == ([(comm, False)] if waited_for else [])
    failures.watch(Told(), Serial())
    assert (comm in [each for _, each in failures._watched]) == waited_for
