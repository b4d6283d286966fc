# SPDX-License-Identifier: Apache-2.0
"""``pblasmp doctor``: whether ranks start, reach each other and compute right here, and what to do if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from .. import _core
from ..comm import Communicator, machines_of, share_of_cores
from ..context import Context
from ..costs.machines import load_machine
from ..engines.choose import EngineName
from ..engines.gpu.session import session_of
from ..errors import PblasmpError, counted
from ..info import collect
from ..launchers import ranks_here, surroundings
from ..layout import Grid, MatmulProblem
from ..matrix.products import matmul
from ..matrix.verification import verify
from ..planning import algorithms
from ..tuning.speeds import measure_speed
from .noise import Noise, trials, wrong_runs
from .options import DEFAULT_RANKS
from .ranks import FailureError, on_ranks
from .reports import Reporter
from .run import integers
from .seats import Seat, faults_of_seats, lines_of_seats, seats_of_ranks, warn_before_mpi
from .terminal import leading, plain

_ORDER = 384
_SLOW = 0.5  # of the speed in the machine's file
_MORE = {"path": ("mpirun", "MPI library"), "blas": ("numpy", "scipy")}  # what else is printed, of which


_RUNS = {True: 300, False: 5}  # of each call under noise, on GPUs and on CPU ranks
_NOISY = {True: 2048, False: 48}  # the order of matrices


def diagnose(
    ranks: int | None,
    engine: EngineName,
    machine: str | Path | None,
    runs: int | None = None,
    show_seats: Callable[[Sequence[Seat]], None] = lambda _: None,
) -> dict[str, Any]:
    """Return what was found: facts, checks of the ranks, and faults, each with a cure. Collective over ranks.

    Speeds are compared with those of a machine, by its name or file. Each call is repeated ``runs`` times under noise;
    None: 300 times on GPUs, 5 on CPU ranks. ``show_seats`` is told where the ranks are before they compute, as that may
    take long, or not end.
    """
    known = None if machine is None else load_machine(machine)
    found: dict[str, Any] = {"facts": {}, "faults": []}
    warn_before_mpi(ranks_here() or ranks or (1 if surroundings() else DEFAULT_RANKS))

    def hear(where: dict[str, Any]) -> None:
        seats = [Seat(**each) for each in where["seats"]]
        show_seats(seats)
        found["faults"] += faults_of_seats(seats)
        found.update(where)

    try:
        found |= on_ranks(_work, (engine, runs), ranks, hear)
    except (FailureError, PblasmpError) as error:
        printed = getattr(error, "printed", "").splitlines()[:1]  # the first line says what went wrong first
        found["faults"].append((": ".join(["the ranks failed", str(error), *printed]), _cure()))
    if leading():  # it starts processes
        found["facts"] = collect()
        found["faults"] += [] if ranks == 1 else faults_of_facts(found["facts"])  # one rank needs no MPI
    if "ranks" not in found:
        return found
    found["faults"] += [
        (f"{name}: {why}", "report this with the output") for name, why in found["wrong"].items()
    ]
    found["faults"] += list(_of_ranks(found))
    if known is not None:
        here, remark = known.node_of(found["ranks"])
        found["expected"] = {
            "copy": here.copy.bytes_per_second,
            "gemm": here.rate("float32", found["gemm_size"]),
        }
        found["remark"] = remark
        for name, most in found["expected"].items():
            if found["speed"][name] < _SLOW * most:
                share = f"{100 * found['speed'][name] / most:.0f} % of what {known.name} has"
                found["faults"].append(
                    (f"{name}: {share}", "is the machine busy, or are the ranks bound to one core?")
                )
    return found


def _cure() -> str:
    """Return what to do if ranks do not find each other, or cannot compute. Local."""
    around = surroundings()
    if around is not None and around.name == "Slurm":
        return (
            "srun --mpi=list shows which MPIs Slurm starts: MPICH and Intel MPI want pmi2, Open MPI wants pmix, and "
            "mpi4py is to be built with such an MPI; pblasmp info shows what the ranks depend on"
        )
    return "pblasmp info shows what they depend on"


def faults_of_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield faults of what is installed, each with a cure."""
    if why := _core.stale():
        yield f"small calls are slow: {why}", f"python {_core.BUILD}"
    if "problem" in facts["MPI library"]:
        yield f"MPI library: {facts['MPI library']['problem']}", "pip install mpi4py mpich"
    if "problem" in facts["mpirun"]:
        yield (
            f"mpirun: {facts['mpirun']['problem']}",
            "install one MPI only, or name its mpirun in PBLASMP_MPIRUN",
        )


def _of_ranks(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield faults of how the ranks are placed, each with a cure."""
    if found["cores"] < found["ranks_of_node"]:
        cure = "give the launcher more cores, or do not bind ranks (--bind-to none)"
        yield f"{found['ranks_of_node']} ranks of a node share {counted(found['cores'], 'core')}", cure
    if found["why_not_shared"]:
        cure = "ranks in different containers cannot share memory: use one container per node"
        yield f"the ranks of a node share no memory: {found['why_not_shared']}", cure


def _work(options: tuple[EngineName, int | None], reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    engine, runs = options
    reporter.found(seats_of_ranks(engine != "host", reporter))
    with Context(engine=engine) as ctx, reporter.errors():
        grid, gpus = Grid.squarest(ctx.size), ctx.engine.traits.on_gpus
        problem = MatmulProblem.gemm(_ORDER, _ORDER, _ORDER, grid, 64, dtype="float32")
        a, b = (ctx.from_function(integers(seed, x), x) for seed, x in enumerate((problem.a, problem.b)))
        wrong: dict[str, str] = {}
        checked = []
        for name, verdict in algorithms(problem, ctx).items():
            if not verdict:
                continue
            reporter.step(f"a product by {name}")
            d = matmul(a, b, algo=name)
            checked.append(name)
            if not verify(a, b, None, d):
                wrong[name] = "the product is wrong"
        runs = _RUNS[gpus] if runs is None else runs
        calls = 0
        where = places(ctx.comm, gpus=gpus)
        one_a_core = ctx.rank % where["ranks_of_node"] < where["cores"]  # more would only take time
        with Noise(ctx, neighbor=one_a_core) as noise:
            for trial in trials(ctx, _NOISY[gpus]) if runs else ():
                reporter.step(f"under noise: {trial.name}")
                found = wrong_runs(ctx, trial, noise, runs)
                calls += not isinstance(found, str)
                if found and not isinstance(found, str):
                    wrong[trial.name] = (
                        f"wrong in {found} of {counted(runs, 'run')} while other work runs beside them"
                    )
        reporter.step("copies and local products")
        size, speed = measure_speed(ctx.engine, ctx.comm)
        return {
            **where,
            "engine": ctx.engine.name, "why": ctx.engine.why, "machine": ctx.engine.machine,
            "why_not_shared": "" if gpus else ctx.engine.transport.why_not_shared,
            "why_no_windows": session_of(ctx.engine).gpu.why_no_windows if gpus else "",
            "checked": checked, "wrong": wrong,
            "noise": {"calls": calls, "runs": runs},
            "speed": speed, "gemm_size": size,
        }  # fmt: skip


def places(comm: Communicator, *, gpus: bool) -> dict[str, int]:
    """Return how many ranks and nodes there are, and what ranks of this one compute with. Collective over ``comm``.

    Nodes are machines, whatever PBLASMP_RANKS_PER_NODE says. GPUs leave the cores to others: one each is enough.
    """
    locations = comm.locations()
    nodes = machines_of(locations)
    here = next(ranks for ranks in nodes if comm.rank in ranks)
    share = share_of_cores([locations[rank] for rank in here])
    return {
        "ranks": comm.size, "nodes": len(nodes), "ranks_of_node": 1 if gpus else len(here),
        "cores": 1 if gpus else max(1, int(share * len(here))),
    }  # fmt: skip


def _words(fact: str | list[dict[str, Any]]) -> str:
    """Return a path, or the BLAS libraries that a package has loaded, in words. Local."""
    if isinstance(fact, str):
        return fact
    names = "internal_api", "version", "architecture", "filepath"
    return ", ".join(" ".join(str(each[name]) for name in names if each.get(name)) for each in fact)


def print_seats(seats: Sequence[Seat]) -> None:
    """Print who is where, from the process that prints for all. Local."""
    if leading():
        for line in lines_of_seats(seats):
            click.echo(f"{'node':<12} {plain(line)}")


def print_diagnosis(found: dict[str, Any]) -> None:
    """Print what was found, and the verdict last. Local."""
    facts = found["facts"]
    for name in ("core", "mpirun", "MPI library", "numpy", "scipy", "cuBLASMp"):
        if name in facts:
            each = facts[name]
            more = [_words(each[key]) for key in ("path", "blas") if key in each and name in _MORE[key]]
            click.echo(
                f"{name:<12} {plain(', '.join([str(each.get('version') or each.get('problem')), *more]))}"
            )
    for name, each in facts.items():
        if name.startswith("GPU ") and "reaches" in each:
            click.echo(f"{name:<12} {each['version']}, reaches {each['reaches'] or 'no other'}")
    if "ranks" in found:
        ranks, nodes = (
            f"one {what}" if found[f"{what}s"] == 1 else f"{found[f'{what}s']} {what}s"
            for what in ("rank", "node")
        )
        where = f"{ranks} on {nodes}"
        click.echo(f"{'ranks':<12} {where}, engine {found['engine']} ({plain(found['why'])})")
        if found["engine"] == "host":
            click.echo(f"{'binding':<12} the ranks of a node may run on {counted(found['cores'], 'core')}")
        if why := found.get("why_no_windows"):
            click.echo(f"{'windows':<12} none: {plain(why)}")
        click.echo(
            f"{'products':<12} right by {', '.join(x for x in found['checked'] if x not in found['wrong'])}"
        )
        noise = found["noise"]
        if noise["calls"]:
            repeated = f"{noise['calls']} calls, each made {counted(noise['runs'], 'time')}"
            click.echo(f"{'noise':<12} {repeated} while other work runs, with late ranks")
        for name, unit in (("copy", "GB/s"), ("gemm", "GFLOP/s")):
            beside = f", expected {found['expected'][name] / 1e9:.1f}" if "expected" in found else ""
            click.echo(f"{name:<12} {found['speed'][name] / 1e9:.1f} {unit} per rank{beside}")
    for fault, cure in found["faults"]:
        click.echo(f"{click.style('fault', fg='red')}        {plain(fault)}\n  cure       {plain(cure)}")
    count = len(found["faults"])
    click.echo("everything works" if not count else "one fault" if count == 1 else f"{count} faults")
