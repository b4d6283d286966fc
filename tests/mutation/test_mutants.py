# SPDX-License-Identifier: Apache-2.0
"""What is changed, and where; and which tests are taken for it."""

from __future__ import annotations

from tests.mutation.mutants import mutants
from tests.mutation.recording import Record

SOURCE = b'''\
"""Text."""
from __future__ import annotations
__all__ = ["f"]
LIMIT = 2 << 20

def f(x: int | None, y=0):
    """Text."""
    if x is not None and not y:
        x.wait()
    for each in range(3):
        if each < y:
            continue
        x.at[each] += 1
    if x:
        raise ValueError(f"{x + 1}")
    return (x +
            y)
'''


def changes():
    return {(mutant.line, " ".join(mutant.before.split()), mutant.text) for mutant in mutants(SOURCE)}


def test_every_kind_of_change():
    assert changes() == {
        (4, "2", "3"),
        (4, "20", "21"),
        (6, "0", "1"),
        (8, "x is not None", "(x is None)"),
        (8, "x is not None and not y", "(x is not None or not y)"),
        (8, "not y", "(y)"),
        (9, "x.wait()", "pass"),
        (10, "3", "4"),
        (11, "each < y", "(each <= y)"),
        (12, "continue", "break"),
        (13, "x.at[each] += 1", "pass"),
        (13, "1", "2"),
        (14, "x", "(not (x))"),
        (15, 'raise ValueError(f"{x + 1}")', "pass"),
        (16, "return (x + y)", "return None"),
        (16, "x + y", "(x - y)"),
    }


def test_a_mutant_is_the_source_with_one_change():
    for mutant in mutants(SOURCE):
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        assert changed.startswith(SOURCE[: mutant.start])
        assert changed.endswith(SOURCE[mutant.end :])


def test_lines_are_those_of_the_statement():
    lines = {(mutant.line, mutant.text): mutant.lines for mutant in mutants(SOURCE)}
    assert lines[4, "3"] is None  # every test that imports it sees it
    assert lines[8, "(y)"] == range(8, 9)
    assert lines[16, "(x - y)"] == range(16, 18)


def test_tests_that_run_a_line_are_found_the_fastest_first(tmp_path):
    (tmp_path / "tests").write_text(
        "1\t2.0\tpassed\tslow\n2\t0.5\tpassed\tfast\n3\t0.1\tfailed\tbad\n4\t1.0\tpassed\tother\n"
    )
    (tmp_path / "lines").write_text(
        "0\tf.py\t7\n1\tf.py\t8\n2\tf.py\t8\n3\tf.py\t8\n4\tf.py\t9\n9\tf.py\t8\n"
    )
    record = Record([tmp_path])
    assert record.tests("f.py", range(8, 9)) == ["fast", "slow"]
    assert record.tests("f.py", None) == ["fast", "other", "slow"]
    assert record.tests("f.py", range(1, 2)) == []
