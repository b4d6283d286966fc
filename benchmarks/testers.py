# SPDX-License-Identifier: Apache-2.0
"""Run ScaLAPACK's own testers with pblasmp in place of what they test: ``python -m benchmarks.testers``.

With ``--rounds`` it also takes the time of their calls, in turns with ScaLAPACK itself. ``--save`` writes the file from
which the table in the docs is made; with ``--only`` it replaces those testers' results there. All of them take some
minutes a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from reference.testers import RANKS, RESULTS, TESTERS, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="testers whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=0, help="times that ScaLAPACK computes the same calls, too"
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows, bad = [], 0
    for tester in TESTERS:
        if options.only not in tester.program:
            continue
        outcome = run(tester)
        seconds, grids, reference = [], [], []
        for i in range(options.rounds):
            again = run(tester) if i else outcome
            seconds.append(again.seconds)
            grids.append(again.grid_seconds)
            reference.append(run(tester, by_library=True).seconds)
        times = {"seconds": seconds, "grid_seconds": grids, "scalapack_seconds": reference}
        rows.append(asdict(outcome) | times)
        print(
            f"{tester.program:16} passed {outcome.passed} of {outcome.total}; calls by pblasmp {outcome.by_pblasmp}, "
            f"left to ScaLAPACK {outcome.by_library}",
            end="",
        )
        if seconds:
            ratio = median(seconds) / median(reference)
            print(
                f"; {median(seconds):.2f} s, ScaLAPACK {median(reference):.2f} s, ratio {ratio:.2f}", end=""
            )
            print(f"; grids {median(grids):.2f} s", end="")
        print(flush=True)
        bad += outcome.passed < outcome.total or not outcome.total
    if options.save:
        known = json.loads(RESULTS.read_text(encoding="utf-8"))["testers"] if options.only else []
        found = {each["program"]: each for each in (*known, *rows)}
        kept = [found[tester.program] for tester in TESTERS if tester.program in found]
        run_of = {"date": results.today(), "ranks": RANKS, "testers": kept}
        RESULTS.write_text(json.dumps(run_of, indent=1) + "\n", encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
