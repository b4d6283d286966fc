# SPDX-License-Identifier: Apache-2.0
"""Signals at any moment end the command line: a few of what ``python -m tests.chaos.signals`` does at length."""

import os
import random
import signal
import subprocess
import sys

from pblasmp import launch
from pblasmp.cli import signals
from tests.chaos.signals import campaign
from tests.helpers.mpi import ROOT, starts_ranks
from tests.helpers.slow import draws

pytestmark = starts_ranks


def test_random_signals():
    seed = random.randrange(1 << 30)
    _, faults = campaign(draws(1, long=24), seed)
    assert not faults, f"seed {seed}"


SWALLOWED = """
import os, signal, sys, time, weakref
from pblasmp.cli.signals import end_on_signals, settle
sys.unraisablehook = lambda what: print("told:", what.exc_value, flush=True)
end_on_signals()
class Thing: pass
def callback(_):
    try:
        os.kill(os.getpid(), {number})
        time.sleep(20)
    finally:
        print("raised", flush=True)  # and dropped by Python after this
def fail(_):
    raise ValueError("of somebody else")
try:
    thing = Thing(); reference = weakref.ref(thing, callback); del thing
    thing = Thing(); reference = weakref.ref(thing, fail); del thing
    time.sleep(20)
except BaseException as error:
    os.kill(os.getpid(), {number})  # a second one does not disturb the cleaning
    time.sleep(0.3)
    settle()
    thing = Thing(); reference = weakref.ref(thing, fail); del thing
    print(type(error).__name__, getattr(error, "code", "-"))
"""


def test_a_signal_that_python_swallows_comes_again_and_nothing_is_printed_about_it():
    for number, expected in ((signal.SIGINT, "KeyboardInterrupt -"), (signal.SIGTERM, "SystemExit 143")):
        done = subprocess.run(
            [sys.executable, "-c", SWALLOWED.format(number=int(number))],
            cwd=ROOT, capture_output=True, text=True, timeout=15, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == ["raised", *["told: of somebody else"] * 2, expected]


IN_AN_IMPORT = """
import os, sys, time
from pathlib import Path
from pblasmp.cli.signals import end_on_signals, settle
Path("slow.py").write_text("import os, time; os.kill(os.getpid(), {number}); time.sleep(0.3); whole = True")
sys.path.insert(0, "")
end_on_signals()
try:
    import slow
    time.sleep(20)
except BaseException as error:
    settle()
    print(type(error).__name__, getattr(error, "code", "-"), sys.modules["slow"].whole)
"""


def test_a_signal_in_an_import_waits_for_its_end(tmp_path):
    for number, expected in ((signal.SIGINT, "KeyboardInterrupt -"), (signal.SIGTERM, "SystemExit 143")):
        done = subprocess.run(
            [sys.executable, "-c", IN_AN_IMPORT.format(number=int(number))],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=15, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{expected} True\n")


REPLACED = """
import os, time
from pblasmp.cli import commands, main
def run(**_):
    try:
        os.kill(os.getpid(), {number})
        time.sleep(20)
    except BaseException:
        pass
    raise RuntimeError("a library's own")
commands.cli.main = run
main()
"""


def test_a_signal_that_a_library_makes_its_own_error_of_is_a_signal():
    for number, printed in ((signal.SIGINT, "pblasmp: interrupted\n"), (signal.SIGTERM, "")):
        done = subprocess.run(
            [*launch.interpreter(), "-c", REPLACED.format(number=int(number))],
            cwd=ROOT, capture_output=True, text=True, timeout=15, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr, done.stdout) == (128 + number, printed, "")


def test_the_alarm_clock_is_given_back():
    before = signal.getsignal(signal.SIGALRM), [signal.getsignal(number) for number in signals.NUMBERS]
    timer = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        signals.end_on_signals()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signals.settle()
        assert signal.getsignal(signal.SIGALRM) == before[0]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 400
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in zip(signals.NUMBERS, before[1], strict=True):
            signal.signal(number, handler)


SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "pblasmp.cli.commands":
            print("imports", flush=True)
            time.sleep(20)
sys.meta_path.insert(0, Slow())
from pblasmp.cli import main
main()
"""


def test_a_signal_while_the_command_line_is_imported_ends_it_at_once():
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGHUP is ignored under nohup
        with subprocess.Popen(
            [sys.executable, "-c", SLOW], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "imports\n"
            process.send_signal(number)
            assert (process.wait(5), process.stderr.read()) == (-number, "")
