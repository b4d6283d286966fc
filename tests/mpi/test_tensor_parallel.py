# SPDX-License-Identifier: Apache-2.0
"""The four tensor-parallel products on ranks, against NumPy on whole matrices."""

import gc
import itertools
import math
import tracemalloc
import weakref

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers import inside
from tests.helpers.cases import TYPES, check_array, numbers, only_last, pick, refuses
from tests.helpers.mpi import needs_torch, on_ranks, run_on_one_node
from tests.helpers.pairs import pairs
from tests.helpers.slow import only_long
from tests.helpers.tensor_cases import FORMS, Case, check_gelu, other_split, shard, sizes

SIZES = (1, 2, 3, 4)


def small(rng, shape, dtype):
    """Numbers of which many products have exact sums in every type, in any order."""
    return rng.integers(-2, 3, shape).astype(dtype)


@on_ranks(*SIZES, timeout=120)
def test_every_type_and_size(comm, ctx):
    """By one after the other of the algorithms that take it."""
    rng = np.random.default_rng(61)
    every = pairs(FORMS, TYPES, (False, True), list(sizes(comm)))
    several_pieces = (600, 300, 64), (3, 600 * comm.size + 1, 2)
    large = pairs(FORMS, ("float32", "bfloat16"), (False, True), several_pieces)
    for turn, (form, dtype, transposed, (t, n, k)) in enumerate((*every, *large)):
        split = other_split if form == "matmul_allgather" and turn % 2 else shard
        draw = small if k == 64 else numbers
        case = Case(rng, comm, form, dtype, t, n, k, split=split, transposed=transposed, draw=draw)
        alpha, beta, bias = pick(rng, (1, 2, -1, 0)), pick(rng, (0, 1, 2)), bool(rng.integers(2))
        if alpha == 0:
            case.local_x = np.full_like(case.local_x, np.nan)  # which is not read
        activation = "relu" if case.out_dtype.kind != "c" and rng.integers(3) == 2 else None
        how = {"alpha": alpha, "beta": beta, "activation": activation}
        how |= {"bias": case.local_bias} if bias else {}
        if beta:
            how["c"] = case.local_c.copy()
        given = pick(rng, ("new", "out", "c"))
        if given == "out":
            how["out"] = np.full_like(case.local_c, 99)
        elif given == "c" and beta:
            how["out"] = how["c"]
        found = pb.algorithms(form, case.local_x, case.local_w, ctx, transposed=transposed, **how)
        names = ["auto", *(name for name, verdict in found.items() if verdict)]
        y = case(ctx, algo=names[turn % len(names)], **how)
        expected = case.expected(alpha, beta, bias=bias)
        what = (
            f"{form} {dtype} {transposed=} {t}x{n}x{k} {alpha=} {beta=} {bias=} {activation} {given} {turn}"
        )
        assert "out" not in how or y is how["out"], what
        check_array(y, np.maximum(expected, 0) if activation else expected, what)
        if beta and how["c"] is not how.get("out"):
            check_array(how["c"], case.local_c, f"{what}: C")


@on_ranks(1, *only_long(2), 3, *only_long(4))
def test_layouts(comm, ctx):
    """Leading dimensions, other splits, other memory, other types, all of X gathered."""
    rng = np.random.default_rng(62)
    p = comm.size
    for form in FORMS:
        case = Case(rng, comm, form, "float32", 2 * p + 1, 5 * p + 2, 3 * p + 1, lead=(2, 3))
        check_array(case(ctx), case.expected(), f"{form}: leading dimensions")
        if form in ("matmul_allreduce", "matmul_allgather"):
            case = Case(rng, comm, form, "float32", 1, 7, 2 * p)
            case.local_x, wanted = case.local_x[0], case.expected()[0]
            check_array(case(ctx), wanted, f"{form}: one token without a dimension")
        case = Case(rng, comm, form, "float64", 4 * p + 2, 3 * p, 5 * p + 1, split=other_split)
        check_array(case(ctx), case.expected(), f"{form}: another split")
        for dtype in ("float16", "bfloat16"):
            case = Case(rng, comm, form, dtype, 2 * p, 3 * p, 4 * p, out_dtype="float32")
            check_array(case(ctx), case.expected(), f"{form}: {dtype} to float32")
            out = np.full(case.local_c.shape, 9, np.float32)
            check_array(case(ctx, dtype=None, out=out), case.expected(), f"{form}: {dtype} to float32 by out")
        case = Case(rng, comm, form, "float32", 2 * p, 3 * p + 1, 4 * p)
        wide = np.zeros((case.local_x.shape[0], case.local_x.shape[1] + 3), np.float32)
        wide[:, 1:-2] = case.local_x
        case.local_x = wide[:, 1:-2]
        case.local_w = np.asfortranarray(case.local_w)
        room = np.zeros((case.local_c.shape[0], case.local_c.shape[1] + 2), np.float32)
        y = case(ctx, out=room[:, :-2])
        check_array(y, case.expected(), f"{form}: padded rows, Fortran-ordered weights")
        assert not room[:, -2:].any(), f"{form}: wrote outside out"
        case = Case(rng, comm, form, "float32", 2 * p, 3 * p, 4 * p, transposed=1)  # as good as True
        case.local_w = np.asfortranarray(case.local_w)
        check_array(case(ctx), case.expected(), f"{form}: Fortran-ordered transposed weights")
        for t in (2 * p, 2 * p + 1):
            check_gelu(ctx, Case(rng, comm, form, "float64", t, 3 * p, 4 * p))
    for t in (3 * p, 3 * p + 1):
        case = Case(rng, comm, "allgather_matmul", "float32", t, 3 * p, 5, lead=(2,))
        y, gathered = case(ctx, return_gathered=True)
        check_array(y, case.expected(), f"gathered, {t}")
        check_array(gathered, case.x, f"gathered, {t}")


@on_ranks(1, 3)
def test_misuse(comm):
    rng = np.random.default_rng(63)
    p = comm.size
    with pb.Context(comm, engine="host") as ctx:
        case = Case(rng, comm, "allgather_matmul", "float32", 2 * p, 3 * p, 4)
        x, w = case.local_x, case.local_w
        wrong = only_last(comm)
        frozen = np.zeros((2 * p, 3), np.float32)
        frozen.flags.writeable = False
        for words, args, how in (
            (["x: the last dimension is 3, expected w's 4 inputs", f"rank {p - 1}" if p > 1 else ""],
             (wrong(x[:, :3].copy(), x), w), {}),
            (["x: local array: expected a NumPy array", "list"], (wrong([1.0], x), w), {}),
            (["x: shape is (4,), expected (tokens, ..., inputs)"], (x[0], w), {}),
            (["w: shape is", "expected 2 dimensions"], (x, w[None]), {}),
            (["w: dtype is float32, expected float64 like x"], (x.astype("f8"), w), {}),
            (["result: dtype is float64, expected float32"], (x, w), {"dtype": "float64"}),
            (["x: shape", "expected C order"], (np.asfortranarray(x), w), {}),
            (["c: beta is 2"], (x, w), {"beta": 2}),
            (["c: shape is (1, 3), expected"], (x, w), {"beta": 2, "c": x[:1, :3].copy()}),
            (["out: shape is (1, 3), expected"], (x, w), {"out": x[:1, :3].copy()}),
            (["out: is read-only"], (x, w), {"out": frozen}),
            (["bias: shape (5,)", "expected contiguous (3,)"], (x, w), {"bias": np.zeros(5, np.float32)}),
            (["bias: shape (3,)", "expected contiguous (3,)"], (x, w), {"bias": np.zeros(6, np.float32)[::2]}),
            (["activation: expected None, 'relu' or 'gelu', got 'tanh'"], (x, w), {"activation": "tanh"}),
            (["activation: expected None"], (x, w), {"activation": np.array(["relu", "gelu"])}),
            (["alpha:", "complex"], (x, w), {"alpha": 1j}),
            (["x: shape", "expected C order"], (np.broadcast_to(x[:1], (2, 4)), w), {}),
            (["algo: expected a string, got ['auto']"], (x, w), {"algo": ["auto"]}),
            (["comm_sms: expected an integer"], (x, w), {"comm_sms": "all"}),
            (["return_gathered: expected True or False, got array("], (x, w), {"return_gathered": np.ones(2)}),
            (["transposed: expected True or False, got array("], (x, w), {"transposed": np.ones(2)}),
            (["out: shape ()"], (x, w), {"out": np.array(2, x.dtype)}),
            (["x: expected an array, got (2, 4): only a plan takes"], (wrong((2, 4), x), w), {}),
        ):  # fmt: skip
            refuses(ctx, pb.ArgumentError, words, pb.allgather_matmul, *args, ctx, **how)
        halves = [each.astype(np.complex64) for each in (x, w)]
        pieces = {"return_gathered": True}
        for words, args, how in (
            (["activation: only for real types"], halves, {"activation": "relu"}),
            (["algo 'shared': it does not return the gathered X"], (x, w), {**pieces, "algo": "shared"}),
            (["compute: the host engine takes only None"], (x, w), {**pieces, "compute": "tf32"}),
        ):  # fmt: skip
            refuses(ctx, pb.UnsupportedError, words, pb.allgather_matmul, *args, ctx, **how)
        for shape in ((-2, 4), (2.0, 4)):
            words = ["x: a dimension of its shape"]
            refuses(ctx, pb.ArgumentError, words, pb.plan, pb.allgather_matmul, shape, w, ctx)
        words = ["ctx: expected a pblasmp.Context, got NoneType"]
        refuses(ctx, pb.ArgumentError, words, pb.matmul_allreduce, x, w, None)
        for product, name in ((pb.allgather_matmul, "comm_dtype"), (pb.matmul_allreduce, "return_gathered")):
            words = [f"unexpected keyword argument {name!r}"]
            refuses(ctx, TypeError, words, pb.plan, product, x, w, ctx, **{name: True})
        room = np.zeros(8 * p * p, np.float32)
        x2, out = room[: 4 * p].reshape(p, 4), room[p : p + 3 * p * p].reshape(p, 3 * p)
        words = ["out: shares memory with x"]
        refuses(ctx, pb.ArgumentError, words, pb.matmul_allgather, x2, w, ctx, out=out)
        words = ["out: shares memory with c"]
        how = {"out": out, "c": room[p + 1 : p + 1 + 3 * p * p].reshape(p, 3 * p), "beta": 1}
        refuses(ctx, pb.ArgumentError, words, pb.matmul_allgather, x[:1].repeat(p, 0), w, ctx, **how)
        if p > 1:
            for words, args, how in (
                (["options", "gave different arguments"], (x, w), {"alpha": comm.rank}),
                (["inputs"], (wrong(x[:, :3].copy(), x), wrong(w[:, :3].copy(), w)), {}),
                (["bias"], (x, w), {"bias": wrong(np.zeros(3, np.float32), None)}),
                (["w's outputs come first"], (x, wrong(np.asfortranarray(w), w)), {}),
            ):  # fmt: skip
                refuses(ctx, pb.RankMismatchError, words, pb.allgather_matmul, *args, ctx, **how)
        check_array(case(ctx), case.expected(), "and it still works")
    with pytest.raises(pb.ClosedError):
        case(ctx)


@on_ranks(1, *only_long(2), 3, *only_long(4))
def test_plans(comm, ctx):
    rng = np.random.default_rng(64)
    p = comm.size
    for form, (t, n, k) in itertools.product(
        FORMS, ((2 * p, 3 * p, 4 * p), (2 * p + 1, 3 * p + 1, 4 * p + 1))
    ):
        case, other = (Case(rng, comm, form, "float32", t, n, k) for _ in range(2))
        with pb.plan(form, case.local_x, case.local_w, ctx) as plan:
            y = plan()
            check_array(y, case.expected(), f"{form}, {t}: first run")
            case.local_x += 1  # the planned array itself
            case.x += 1
            again = plan()
            assert again is y
            check_array(y, case.expected(), f"{form}, {t}: new data")
            check_array(plan(other.local_x, other.local_w), other.expected(), f"{form}, {t}: other arrays")
            check_array(plan(), other.expected(), f"{form}, {t}: which stay")
            mine = np.zeros_like(y)
            y = plan(case.local_x, case.local_w, out=mine)
            check_array(y, case.expected(), f"{form}, {t}: out")
            assert y is mine, f"{form}, {t}: out"
            buffer = plan.input_buffer()
            buffer[...] = other.local_x
            check_array(plan(w=other.local_w), other.expected(), f"{form}, {t}: input buffer")
            words = ["the plan is for"]
            wider = np.zeros((case.local_x.shape[0] + 1, case.local_x.shape[1]), np.float32)
            refuses(ctx, pb.ArgumentError, words, plan, wider)
            doubles = case.local_x.astype("f8"), case.local_w.astype("f8")
            refuses(ctx, pb.ArgumentError, ["dtype"], plan, *doubles)
            check_array(plan(), other.expected(), f"{form}, {t}: the last ones are still there")
            report = str(plan.report())
            assert form in report
            assert "engine     host" in report
        wide = np.zeros((*case.local_x.shape[:-1], k + 3), np.float32)
        wide[..., 1 : case.local_x.shape[-1] + 1] = case.local_x
        with pb.plan(form, wide[..., 1 : case.local_x.shape[-1] + 1], case.local_w, ctx) as plan:
            check_array(plan(), case.expected(), f"{form}, {t}: rows of a wider x")
            plan.input_buffer()[...] = other.local_x
            check_array(plan(w=other.local_w), other.expected(), f"{form}, {t}: and its buffer")
        refuses(ctx, pb.ClosedError, ["this plan is closed"], plan)
        with pb.plan(
            form, case.local_x.shape, case.local_w, ctx, bias=case.local_bias, beta=1, c=case.local_c
        ) as plan:
            plan.input_buffer()[...] = case.local_x
            check_array(plan(), case.expected(1, 1, bias=True), f"{form}, {t}: from a shape")
    for n in (p + 1, 2 * p - 1):  # one row of weights is in any order: those of the other ranks decide
        case = Case(rng, comm, "allgather_matmul", "float32", 2 * p, n, 4)
        weights = np.asfortranarray(case.local_w)
        with pb.plan(pb.allgather_matmul, case.local_x, weights, ctx) as plan:
            y = plan(case.local_x, weights.copy(order="F"))
            check_array(y, case.expected(), f"weights in Fortran order, {n}")
    case = Case(rng, comm, "allgather_matmul", "float32", 2 * p + 1, 3 * p, 5)
    with pb.plan(pb.allgather_matmul, case.local_x, case.local_w, ctx, return_gathered=True) as plan:
        y, gathered = plan()
        check_array(y, case.expected(), "gathered by a plan")
        check_array(gathered, case.x, "gathered by a plan")


@on_ranks(*only_long(1), 2)
def test_plans_are_kept_but_not_arrays(comm, ctx):
    """The plain functions plan once for each shape, keep a few plans, and no array of the user's."""
    rng = np.random.default_rng(65)
    made, take_over = [], ctx.take_over
    ctx.take_over = lambda plan: made.append(type(plan)) or take_over(plan)
    case = Case(rng, comm, "allgather_matmul", "float32", 8, 8, 8)
    for _ in range(3):
        case(ctx)
    assert len(made) == 1, f"one plan for three calls: {len(made)} plans"
    gone = [weakref.ref(x) for x in (case.local_x, case.local_w, case(ctx))]
    check_array(case(ctx), case.expected(), "arrays are let go")
    case.local_x, case.local_w = (x.copy() for x in (case.local_x, case.local_w))
    gc.collect()
    assert not any(x() is not None for x in gone), "arrays are let go"
    of_a_model(rng, comm, ctx, made)
    few = 8
    inside.keep_at_most(ctx, few << 17)  # of plans that count 128 KiB each
    for n in range(1, 20):
        other = Case(rng, comm, "allgather_matmul", "float32", 4, n, 4)
        check_array(other(ctx), other.expected(), f"many shapes, {n} outputs")
    assert inside.plans_open(ctx) <= few, "many shapes"
    made.clear()
    check_array(case(ctx), case.expected(), "one that was closed")
    assert made, "one that was closed"


def of_a_model(rng, comm, ctx, made):
    """8 products for 20 sequence lengths, in every step of training: each is planned once."""
    weights = [(form, n, k) for form in FORMS for n, k in ((4, 8), (8, 4))]
    cases = [Case(rng, comm, form, "float32", t, n, k) for t in range(2, 42, 2) for form, n, k in weights]
    made.clear()
    for _ in range(2):
        for each in cases:
            check_array(each(ctx), each.expected(), f"{each.form} of {each.x.shape[0]} tokens")
    assert len(made) == len(cases)
    assert ctx.kept.evictions == 0


@on_ranks(*only_long(1), 2, runner=run_on_one_node)
def test_no_operand_is_copied(comm, ctx):
    """A product into ``out`` takes no memory but messages, and what 16-bit types are multiplied in."""
    rng = np.random.default_rng(66)
    for form, transposed in itertools.product(FORMS, (False, True)):
        case = Case(rng, comm, form, "float64", 512, 512, 512, transposed=transposed)
        out = np.empty_like(case.local_c)
        case(ctx, out=out)  # buffers are made
        gc.collect()
        tracemalloc.start()
        case(ctx, out=out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        least = min(case.local_x.nbytes, case.local_w.nbytes, out.nbytes)
        check_array(out, case.expected(), f"{form} {transposed=}")
        assert peak < least / 4, f"{form} {transposed=}: operands have {least} bytes and more"


@needs_torch
@on_ranks(1, 3)
def test_tensors_of_pytorch(comm, ctx):
    """PyTorch in, PyTorch out, over the same memory."""
    import torch

    rng = np.random.default_rng(67)
    for form, dtype in itertools.product(FORMS, TYPES):
        case = Case(rng, comm, form, dtype, 5, 7, 2 * comm.size + 1)
        expected = case.expected(bias=case.dtype.kind == "f")

        def tensor(array):
            array = np.ascontiguousarray(array)
            if array.dtype.name != "bfloat16":
                return torch.from_numpy(array)
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)

        case.local_x, case.local_w = tensor(case.local_x), tensor(case.local_w)
        how = {"bias": tensor(case.local_bias)} if case.dtype.kind == "f" else {}
        y = case(ctx, **how)
        assert isinstance(y, torch.Tensor), f"{form} {dtype}"
        assert str(y.dtype) == f"torch.{dtype}", f"{form} {dtype}"
        back = y.view(torch.int16).numpy().view(case.dtype) if dtype == "bfloat16" else y.numpy()
        check_array(back, expected, f"{form} {dtype}")
        out = torch.empty_like(y)
        if dtype in ("float16", "bfloat16"):
            wide = case(ctx, dtype=torch.float32)
            expected = case.expected().astype(np.float32)
            check_array(wide.numpy(), expected, f"{form} {dtype} to PyTorch's float32")
        same = case(ctx, out=out, **how) is out
        assert same, f"{form} {dtype} into out"
        assert torch.equal(out, y), f"{form} {dtype} into out"
        plan = pb.plan(form, tuple(case.local_x.shape), case.local_w, ctx, **how)
        with plan:
            plan.input_buffer().copy_(case.local_x)
            assert torch.equal(plan(), y), f"{form} {dtype} by a plan: wrong"
    x = torch.zeros(4, 3, dtype=torch.complex64)
    words = ["x: a lazy conjugate"]
    refuses(
        ctx,
        pb.ArgumentError,
        words,
        pb.matmul_allgather,
        x.conj(),
        torch.zeros(2, 3, dtype=torch.complex64),
        ctx,
    )
    words = ["w: dtype int64 is not supported"]
    ints = torch.zeros(4, 3, dtype=torch.int64)
    refuses(ctx, pb.ArgumentError, words, pb.matmul_allgather, ints, ints, ctx)


@on_ranks(1, *only_long(2), 3, *only_long(4))
def test_repeated_calls(comm, ctx):
    """A call that all ranks repeat takes one vote; where one rank's arrays are others, all are read anew."""
    rng, p = np.random.default_rng(66), comm.size
    wrong = only_last(comm)

    def counted(call, **how):
        before = inside.votes(ctx)
        return call(ctx, **how), inside.votes(ctx) - before

    for form in FORMS:
        even, uneven = (
            Case(rng, comm, form, "float32", n * p, n * p, n * p, **how)
            for n, how in ((3, {}), (4, {"split": other_split}))
        )
        how = {"bias": even.local_bias}
        for turn in range(3):
            for name, case, more in (("even", even, {}), ("uneven", uneven, {}), ("bias", even, how)):
                y, count = counted(case, **more)
                check_array(y, case.expected(bias=bool(more)), f"{form} {name}, turn {turn}")
                assert (count <= 1) == (turn > 0), f"{form} {name}, turn {turn}: {count} votes"
                case.x += 1  # the arrays are read each time
                case.local_x += 1
        for turn in range(2):
            out, c = np.zeros_like(y), even.local_c.copy()
            for name, result in (("out", out), ("out and c", c)):
                y, count = counted(even, out=result, c=c, beta=2)
                what = f"{form} with {name}, turn {turn}"
                check_array(y, even.expected(beta=2), what)
                assert y is result, what
                assert not turn or count <= 1, f"{what}: {count} votes"
        words, how = ["out: shares memory with c"], {"beta": 2}
        room = np.zeros(c.size + 1, np.float32)
        how["out"], how["c"] = room[:-1].reshape(c.shape), room[1:].reshape(c.shape)
        args = (even.local_x, even.local_w)
        if c.size > 1:
            refuses(ctx, pb.ArgumentError, words, getattr(pb, form), *args, ctx, **how)
        if p > 1:
            words = ["the ranks gave different arguments", "bias:"]
            how = {"bias": wrong(even.local_bias, None)}
            refuses(ctx, pb.RankMismatchError, words, getattr(pb, form), *args, ctx, **how)
            words = ["the last dimension is", f"on rank {p - 1}"]
            narrow = wrong(even.local_x[..., 1:].copy(), even.local_x)
            refuses(ctx, pb.ArgumentError, words, getattr(pb, form), narrow, args[1], ctx)
            y, count = counted(even)
            check_array(y, even.expected(), f"{form}: afterwards")
            assert not (count > 1), f"{form}: afterwards"
    x, w = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
    check_array(pb.matmul_allgather(x, w, ctx, alpha=1), np.full((2, 4 * p), 3, np.float32), "a number")
    words = ["alpha: expected a number"]
    refuses(ctx, pb.ArgumentError, words, pb.matmul_allgather, x, w, ctx, alpha=np.True_)


@on_ranks(*only_long(1), 2, *only_long(3), runner=run_on_one_node)
def test_other_numbers_of_tokens(comm, ctx):
    """Another number of tokens takes a single vote if there is memory; ranks that do not have the same find out."""
    rng, p = np.random.default_rng(67), comm.size
    last = comm.rank == p - 1

    def counted(case):
        before = inside.votes(ctx)
        check_array(case(ctx), case.expected(), f"{case.form} of {case.x.shape} on ranks")
        return inside.votes(ctx) - before

    for form, lead in itertools.product(FORMS, ((), (2,))):
        sizes = 4 * p, 3 * p
        for turn, tokens in enumerate((8, 6, 6, 3, 9, 7, 8, 2)):  # more are not shared memory for
            case = Case(rng, comm, form, "float32", tokens * p, *sizes, lead=lead)
            count = counted(case)
            few = form == "allgather_matmul" and tokens * math.prod(lead) < p  # on each rank: it is read
            once = turn not in (0, 4) and not few
            assert p == 1 or (count == 1) == once, f"{form} {lead}, {tokens} tokens: {count} votes"
        uneven = Case(rng, comm, form, "float32", 5 * p, *sizes, lead=lead, split=other_split)
        check_array(uneven(ctx), uneven.expected(), f"{form} {lead}, other splits")
        if p > 1 and form != "allgather_matmul":
            words = "tokens" if form == "matmul_reduce_scatter" else "x's other dimensions"
            words = ["the ranks gave different arguments", f"{words}:"]
            args = case.local_x[: p if last else 2 * p], case.local_w  # new on the last rank
            refuses(ctx, pb.RankMismatchError, words, getattr(pb, form), *args, ctx)
        assert counted(case) <= 1, f"{form} {lead}: afterwards"

    def split(n, comm):  # of tokens: the last rank has fewer
        start = comm.rank * many
        return slice(start, min(n, start + many)) if n == total else shard(n, comm)

    # numbers that all ranks have had, or none has, but not these together
    for many, few in ((8, 6), (8, 6), (8, 8), (6, 6), (8, 6), (5, 4), (5, 5), (4, 4), (5, 4), (5, 4)):
        total = many * (p - 1) + few
        case = Case(rng, comm, "allgather_matmul", "float32", total, *sizes, split=split)
        check_array(case(ctx), case.expected(), f"{many} tokens, {few} on the last rank")
    x, w = np.ones((600, 2), np.float32), np.ones((1, 2), np.float32)
    pb.matmul_allreduce(x, w, ctx)
    before = inside.votes(ctx)
    for tokens in range(599, 39, -1):  # more than are remembered
        pb.matmul_allreduce(x[:tokens], w, ctx)
    count = inside.votes(ctx) - before
    assert p == 1 or count == 560, "many numbers of tokens"


@on_ranks(2, *only_long(3), runner=run_on_one_node)
def test_fewer_tokens_than_ranks(comm, ctx):
    """A call with fewer tokens than ranks is read, whatever calls were made before."""
    rng, p = np.random.default_rng(68), comm.size
    for form in FORMS:
        for tokens in (8 * p, 6 * p, p - 1):
            case, before = Case(rng, comm, form, "float32", tokens, 4 * p, 3 * p), inside.votes(ctx)
            check_array(case(ctx), case.expected(), f"{form} of {tokens} tokens")
        assert inside.votes(ctx) > before + 1, f"{form} of {tokens} tokens was not read"
