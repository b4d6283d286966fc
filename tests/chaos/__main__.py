# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.chaos --trials 100 --seed 1``: random faults; the seeds of those that end badly are printed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.chaos.program import KINDS
from tests.chaos.trials import LIMIT, ordered, tried


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random faults of random kinds in random places on 2 to 6 ranks."
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first trial; the next has the next"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds from a fault to the end of the job"
    )
    parser.add_argument("--kind", choices=KINDS, help="of fault: only the trials with this one")
    arguments = parser.parse_args()
    kinds: Counter[str] = Counter()
    bad = []
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        if arguments.kind not in (None, ordered(seed)["kind"]):
            continue
        orders, faults = tried(seed, arguments.limit)
        kinds[orders["kind"]] += 1
        print(("BAD " if faults else "ok  "), orders, *faults, sep="\n    " if faults else " ", flush=True)
        if faults:
            bad.append(seed)
    print(f"{kinds.total()} trials from seed {arguments.seed}: {dict(kinds)}; bad seeds: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
