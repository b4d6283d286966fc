# SPDX-License-Identifier: Apache-2.0
"""The calls that are repeated under noise, on a GPU that is played: each algorithm by its name, 8 bits too."""

from pblasmp.cli.noise import trials, wrong_runs
from tests.helpers.fused_machines import Scaling
from tests.helpers.machine import context


def test_every_trial(alone, stand_in):
    names = []
    with context(stand_in(1000), Scaling) as (ctx, _):
        for trial in trials(ctx, 32):
            names.append(trial.name)
            assert not wrong_runs(ctx, trial, None, 2), trial.name
    assert sum(name.endswith(", push") for name in names if " x e" in name) >= 9
