# SPDX-License-Identifier: Apache-2.0
"""What differs between the environments of ranks: homes, variables, NumPy's error state, warnings that are errors.

No rank may fail alone because of it after the ranks have agreed: either nothing happens or all raise one error.
"""

import gc
import itertools
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import threadpoolctl

import pblasmp as pb
from pblasmp import resources
from pblasmp.comm import wrap
from pblasmp.comm.mpi_communicator import MpiCommunicator
from pblasmp.runtime import runtime
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node
from tests.helpers.slow import only_long

HUGE = np.array([[1e300, -1e300, np.nan, 1e-300], [np.inf, 0.0, 1e200, -np.inf]])


def values(ctx, dtype="float64"):
    """Numbers that overflow, underflow and are invalid, on the last rank alone."""
    array = np.ones((8, 8))
    array[-2:, -4:] = HUGE
    return ctx.scatter(array, block=2, dtype=dtype)


def calls(ctx, folder):
    """Calls by name in which NumPy would find floating-point errors on some ranks."""
    a = values(ctx)
    path = folder / "a.npy"
    x = ctx.from_function(lambda i, j: 1e300 * (i + j + 1), (8, 8), block=2)
    return {
        "scatter": lambda: values(ctx, "float32"),
        "astype": lambda: a.astype("float32"),
        "astype float16": lambda: a.astype("float16"),
        "astype bfloat16": lambda: a.astype("bfloat16"),
        "times": lambda: a * 1e300,
        "in place": lambda: a.copy().__imul__(1e300),
        "by zero": lambda: x / (x - x),
        "difference": lambda: a - a,
        "sum of matrices": lambda: a + a.redistribute(block=4),
        "redistribute": lambda: a.redistribute(block=3, dtype="float32"),
        "product": lambda: a @ a,
        "scaled": lambda: pb.matmul(a, a, alpha=1e300),
        "gelu": lambda: pb.matmul(a, a, epilogue=pb.Epilogue("gelu")),
        "symm": lambda: pb.blas.symm(a, a, alpha=1e200),
        "syrk": lambda: pb.blas.syrk(a, alpha=1e200),
        "her2k": lambda: pb.blas.her2k(values(ctx, "complex128"), values(ctx, "complex128")),
        "geadd": lambda: pb.blas.geadd(a, a, alpha=1e200, beta=1e200),
        "trsm": lambda: pb.blas.trsm(a, x),
        "norm": a.norm,
        "sum": lambda: a.sum(axis=0),
        "trace": a.trace,
        "gather": lambda: values(ctx, "float32").gather(),
        "save": lambda: a.save(path),
        "load": lambda: ctx.load(path, block=3, dtype="float32"),
        "tensor-parallel": lambda: pb.matmul_allreduce(np.full((8, 4), 1e200), np.full((8, 4), 1e200), ctx),
    }


ELEMENTWISE = (  # computed or converted while the ranks agree
    "astype", "astype float16", "astype bfloat16", "times", "in place", "by zero", "difference", "sum of matrices",
    "load",
)  # fmt: skip


@on_ranks(4)
def test_floating_point_errors_are_raised_by_all_ranks_or_by_none(comm, ctx, directory):
    """The last rank raises floating-point errors: all ranks raise NumPy's error of an elementwise call, or none."""
    names = list(calls(ctx, Path(directory)))
    for name in names:
        with np.errstate(all="raise" if comm.rank == comm.size - 1 else "ignore"):
            before, raised = np.geterr(), ""
            try:
                calls(ctx, Path(directory))[name]()
            except FloatingPointError as error:
                raised = str(error)
            everyone = set(comm.allgather(raised))
            right = len(everyone) == 1 and (name in ELEMENTWISE or everyone == {""}) and np.geterr() == before
            assert right, f"{name}: {everyone}, the state is now {np.geterr()}"

    def divided(i, j):
        return 1 / (i + j)

    with np.errstate(
        all="raise" if comm.rank == 0 else "ignore"
    ):  # the user's own function keeps the user's state
        words = ["divide by zero", "on rank 0"]
        make = ctx.from_function
        refuses(ctx, FloatingPointError, words, make, divided, (8, 8), block=2)


@on_ranks(2)
def test_a_user_without_a_home(comm, directory):
    """One rank's user has no home directory: no file of measurements, and no error."""
    variables = {"XDG_CACHE_HOME": "", "PBLASMP_TUNING": ""}
    for rank in range(comm.size):
        missing = RuntimeError("Could not determine home directory.")
        home = {"side_effect": missing} if comm.rank == rank else {"return_value": Path(directory)}
        with (
            patch.dict("os.environ", variables),
            patch.object(Path, "home", **home),
            pb.Context(comm, engine="host") as ctx,
        ):
            a = ctx.zeros((8, 8), block=2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tuned = pb.tune(pb.matmul, a, a)
            assert bool(tuned.reason) == (rank == 0), f"tuned {rank}"
            if rank == 0:
                assert "set PBLASMP_TUNING" in tuned.reason, "reason"
                words = ["could not be saved", "on rank 0"]
                refuses(ctx, UserWarning, words, pb.tune, pb.matmul, a, a)


@on_ranks(2)
def test_a_warning_that_is_an_error_on_one_rank_is_one_on_all(comm, directory):
    """Rank 0 cannot use the file of measurements and takes warnings as errors: every rank raises that error."""
    file = Path(directory) / "tuning.json"
    if comm.rank == 0:
        file.write_text("{")
    comm.barrier()
    with patch.dict("os.environ", {"PBLASMP_TUNING": str(file)}):
        for _ in range(3):
            with pytest.raises(UserWarning, match=r"(?s)ignored.*on rank 0"):
                pb.Context(comm, engine="host")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pb.Context(comm, engine="host") as ctx:
                assert ctx.comm.allgather(1) == [1] * comm.size, "ignored"


@on_ranks(2)
def test_many_plans_with_warnings_as_errors(comm):
    """With as many plans as make a warning, which is an error here, every rank raises it and the context lives on."""
    with pb.Context(comm, engine="host") as ctx, patch.object(runtime, "MANY_PLANS", 3):
        a = ctx.zeros((8, 8), block=2)
        plans = [pb.plan(pb.matmul, a, a, alpha=float(i)) for i in (2, 3)]
        refuses(ctx, ResourceWarning, ["3 open plans"], pb.plan, pb.matmul, a, a)
        assert plans[0](a, a).norm() == 0, "a later run is wrong"


@on_ranks(2)
def test_an_engine_that_refuses_leaves_no_communicator(comm):
    """Each communicator that an engine makes is freed, also if the engine refuses."""
    made = []

    class Counted(MpiCommunicator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

        def free(self):
            super().free()
            made.remove(self)

    variables = [{"PBLASMP_BLAS": "none"}, {"PBLASMP_BLAS": "none" if comm.rank else "scipy"}]
    variables += [{"PBLASMP_RANKS_PER_NODE": "0"}]
    for variable in variables:
        with (
            patch("pblasmp.comm.mpi_communicator.MpiCommunicator", Counted),
            patch.dict("os.environ", variable),
        ):
            with pytest.raises(pb.PblasmpError, match=next(iter(variable))):
                pb.Context(comm, engine="host")
            assert not made, variable
    with patch("pblasmp.comm.mpi_communicator.MpiCommunicator", Counted):
        with pb.Context(comm, engine="host"):
            assert made, "counted: none were seen"
        assert not made, f"closed: {len(made)} communicators are left"


@on_ranks(2, *only_long(5))
def test_values_of_any_size(comm):
    """What all ranks tell, and what one tells: small values travel with their sizes, others after them."""
    own = wrap(comm)
    sizes = [0, 1, *range(200, 260), 1000, 100_000]
    for size in sizes:
        for large in ({0}, {own.size - 1}, set(range(own.size))):
            values = [bytes([rank]) * (size if rank in large else 3) for rank in range(own.size)]
            assert own.allgather(values[own.rank]) == values, f"{size} on {large}: wrong values"
    for root in (0, own.size - 1):
        for size in sizes:
            value = np.arange(size) if own.rank == root else None
            heard = own.bcast(value, root)
            assert np.array_equal(heard, np.arange(size)), f"{size} from {root}: wrong value"
    own.free()


def threads(comm):
    """A context limits the threads of BLAS, also if another one has been there, and gives them back."""
    found = []
    for _ in range(2):
        before = _threads()
        with pb.Context(comm, engine="host") as ctx:
            found.append((_threads(), {ctx.engine.threads}))
        found.append((_threads(), before))
    assert all(now == expected for now, expected in found), "threads"


def threads_of_several(comm):
    """The limit lasts from the first context to the last one, however each of them ends."""
    with pb.Context(comm, engine="host") as ctx:
        limit = {ctx.engine.threads}
    threadpoolctl.threadpool_limits(3 if limit != {3} else 2, user_api="blas")
    before = _threads()
    assert before
    assert before != limit

    def check_is_back(case):
        gc.collect()
        assert _threads() == before, case

    def contexts(number):
        return [pb.Context(comm, engine="host") for _ in range(number)]

    for order in itertools.permutations(range(3)):
        ctx = contexts(3)
        inside = []
        for i in order:
            inside.append(_threads())
            ctx[i].close()
        check_is_back(f"closed in order {order}")
        assert inside == [limit] * 3, f"while open, order {order}"
    broken, whole = contexts(2)
    try:
        with broken.running("mine"):
            if comm.rank == 1:
                raise MemoryError("mine")
            broken.comm.barrier()
    except (MemoryError, pb.errors.ClosedError):
        pass
    assert _threads() == limit, "one is broken: not limited any more"
    whole.close()
    check_is_back("the broken one is not closed")
    broken.close()
    check_is_back("it is closed")
    ctx = pb.Context(comm, engine="host")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del ctx
        check_is_back("one is dropped")
    alone = comm.Split(comm.rank)
    ctx = pb.Context(alone, engine="host")
    inside = _threads()
    ctx.fail(ValueError("shown at a prompt, which goes on"))
    check_is_back("one has failed")
    alone.Free()
    assert inside == {ctx.engine.threads}, "while one is alone"


@on_ranks(4, runner=run_on_one_node)
def test_parts_of_a_job(comm):
    """Contexts on two halves of the ranks share the cores, as one of all ranks does."""
    half = comm.Split(comm.rank % 2, comm.rank)
    found = []
    for part in (comm, half):
        with pb.Context(part, engine="host") as ctx:
            found.append(
                (ctx.comm.patient, ctx.control.patient, ctx.engine.threads, ctx.engine.operations.workers)
            )
    half.Free()
    cores = resources.machine_cores()
    expected = [(cores < comm.size,) * 2 + (max(1, cores // comm.size),)] * 2
    assert [each[:3] for each in found] == expected, f"share: {found} on {cores} cores"
    workers = [max(1, min(1, cores / comm.size) * size // 1) for size in (comm.size, comm.size // 2)]
    assert [each[3] for each in found] == workers, f"workers: {found} on {cores} cores"


def _threads():
    return {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}


def test_threads_of_blas(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    run_mpi(threads, 2, launch=True)
    run_mpi(threads_of_several, 2, launch=True)
