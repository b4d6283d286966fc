# SPDX-License-Identifier: Apache-2.0
"""Notes between the ranks of a context: how they travel, what they say, and how they are read."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

MAKING = -1  # the number of the meeting in which a channel is made

BROKEN, WAITS, HERE = "broken", "waits", "here"
LEFT, ALL_LEFT, ASKS, COME = "left", "all left", "asks", "come"


Members = tuple[int, ...]


class NoteTransport(Protocol):
    """How notes travel. Local.

    Attributes:
        any_thread: notes may be read by a thread other than the one that makes the calls.
    """

    any_thread: bool

    def send(self, note: bytes, to: int | None = None) -> None:
        """Send a note to a rank, or to every other one, without waiting."""

    def arrived(self) -> list[bytes]:
        """Return the notes that have arrived since the last call."""


class Meeting(NamedTuple):
    """Where a rank waits for all others: the ``number``-th agreement of a channel, or the making of one.

    Attributes:
        members: the processes that meet there, by numbers that all channels of a process share.
        channel: which channel of these processes.
        number: which of its agreements; -1 stands for the making of the channel.
        call: its name in messages.
    """

    members: Members
    channel: int
    number: int
    call: str


class Stall(NamedTuple):
    """Where a rank of a context whose device computes has waited for long, as rank 0 knows it.

    Attributes:
        agreements: how many agreements it has begun.
        runs: how many runs of plans it has queued.
        call: its name, if the rank waits in the last of these agreements; empty if it waits for the last of these runs.
    """

    agreements: int
    runs: int
    call: str


def read_note(note: bytes) -> tuple[int, str, int, Any] | None:
    """Return a note's channel, kind, rank and value; None if it is none. Local.

    Others than the ranks may write to the place where notes lie: it is data, of which nothing is believed.
    """
    try:
        index, kind, rank, value = json.loads(note)
        if not (_is_count(index) and _is_count(rank)):
            return None
        if kind in (LEFT, ALL_LEFT):
            fits = _is_count(value)
        elif kind == COME:
            number, call = value = tuple(value)
            fits = _is_count(number) and type(call) is str
        elif kind == ASKS:
            number, first = value = tuple(value)
            fits = _is_count(number) and _is_count(first)
        elif kind == HERE:
            agreements, runs, call = value = Stall(*value)
            fits = type(agreements) is int and _is_count(runs) and type(call) is str
        elif kind == WAITS:
            value, fits = _read_meeting(value), True
        else:
            cause, conflict = value
            value = cause, None if conflict is None else _read_meeting(conflict)
            fits = kind == BROKEN and type(cause) is str and cause != ""
    except (ValueError, TypeError, RecursionError):
        return None
    return (index, kind, rank, value) if fits else None


def _read_meeting(value: Any) -> Meeting:
    """Return a place from what JSON makes of it, or raise ValueError or TypeError. Local."""
    members, channel, number, call = value
    if not (
        all(map(_is_count, members)) and _is_count(channel) and type(number) is int and type(call) is str
    ):
        raise ValueError(value)
    return Meeting(tuple(members), channel, number, call)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
