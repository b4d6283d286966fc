# SPDX-License-Identifier: Apache-2.0
"""What keeps the memory and the time of reading a TOML file within a small multiple of its size.

Python's ``tomllib`` keeps every beginning of a dotted key, about a kilobyte for each table, and reads numbers with a
regular expression that remembers each digit. So what no descriptor file has is refused before it is parsed.
"""

from __future__ import annotations

import re

__all__ = ["MOST_BYTES", "excess"]

MOST_BYTES = 1 << 22
_MOST_PARTS = 8  # of a dotted key
_MOST_KEYS = 4000
_MOST_LISTS = 100_000
_LONGEST_WORD = 10_000  # characters

_ESCAPES = re.compile(r'\\["\\]')  # outside of a string there are none, and in '...' they do not matter
# An end that is missing is a fault that tomllib finds; here a string then goes to the end of the line or text, so that
# no character is looked at twice.
_STRINGS = re.compile(
    r'"""[\s\S]*?(?:"{3,5}|\Z)'
    r"|'''[\s\S]*?(?:'{3,5}|\Z)"
    r'|"[^"\n]*"?'
    r"|'[^'\n]*'?"
    r"|\#[^\n]*|[ \t\r]+"
)
_WORDS = re.compile(r"[^\n,=\[\]{}]+")
_HEADERS = re.compile(r"^\[[^,\n]*$", re.MULTILINE)


def excess(text: str) -> str:
    """Return what a TOML text has more of than any descriptor file; an empty string if nothing. Local."""
    text = _ESCAPES.sub("", text)
    bare = _STRINGS.sub(lambda found: "s" if found[0][0] in "\"'" else "", text)
    keys = bare.count("=") + sum(1 for _ in _HEADERS.finditer(bare))
    if keys > _MOST_KEYS:
        return f"it has {keys} keys, expected at most {_MOST_KEYS}"
    lists = bare.count("[") + bare.count("{")
    if lists > _MOST_LISTS:
        return f"it has {lists} lists and tables, expected at most {_MOST_LISTS}"
    for found in _WORDS.finditer(bare):
        word = found[0]
        if word.count(".") >= _MOST_PARTS:
            return f"a dotted key has {word.count('.') + 1} parts, expected at most {_MOST_PARTS}"
        if len(word) > _LONGEST_WORD:
            return f"a key or a number has {len(word)} characters, expected at most {_LONGEST_WORD}"
    return ""
