# SPDX-License-Identifier: Apache-2.0
"""Run pytest in children of a process that has loaded all but this repository, which halves a mutant's time.

Each line of the input has arguments of pytest, a file for its output, a mark for the environment, and a limit on CPU
seconds. Two lines of the output answer it: the child's process number, then its exit status.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys

HEAVY = ("numpy", "scipy.linalg", "ml_dtypes", "pydantic", "click", "rich.console", "pytest")


def main() -> None:
    sys.path[0] = os.getcwd()  # noqa: PTH109 (where the copy of the repository is)
    for name in HEAVY:  # hypothesis is not one of them: pytest rewrites it
        importlib.import_module(name)
    import pytest

    for order in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            with contextlib.ExitStack() as stack:
                arguments, output, mark, limit = json.loads(order)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # also if nobody ends it
                os.environ["PBLASMP_MUTANT"] = mark
                file = stack.enter_context(open(output, "w"))  # noqa: PTH123
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                status = pytest.main(arguments)
                sys.stdout.flush()
            sys.exit(status)  # exit hooks are a part of what is tested
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
