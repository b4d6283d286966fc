# SPDX-License-Identifier: Apache-2.0
"""The tree of errors, their relation to Python's and NumPy's, and their words."""

import copy
import inspect
import operator
import pickle
from functools import partial

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import blas, errors, linalg, pblas

BUILT_IN = {
    "ArgumentError": ValueError,
    "RankMismatchError": ValueError,
    "UnsupportedError": NotImplementedError,
    "LibraryNotFoundError": OSError,
    "StatusError": RuntimeError,
    "ClosedError": RuntimeError,
}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: pb.Context(grid="1x2"),
        lambda: pb.Context(None, "host", None),
        lambda: pb.DistributedMatrix(local=1),
    ],
)
def test_wrong_arguments_name_the_public_class(wrong):
    with pytest.raises(TypeError, match=r"^(Context|DistributedMatrix)\.__init__\(\)"):
        wrong()


def test_the_tree_is_complete():
    assert set(errors.__all__) == {
        "PblasmpError",
        "LayoutError",
        "ArgumentTypeError",
        "FactorizationError",
        *BUILT_IN,
    }
    assert errors.PblasmpError.__bases__ == (Exception,)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_error_is_also_the_built_in_it_resembles(name):
    error = getattr(errors, name)
    assert error.__bases__ == (errors.PblasmpError, BUILT_IN[name])
    assert getattr(pb, name) is error
    for caught in (error, errors.PblasmpError, BUILT_IN[name]):
        with pytest.raises(caught, match=r"^what was wrong$"):
            raise error("what was wrong")
    assert pb.LayoutError.__bases__ == (pb.ArgumentError,)
    assert pb.ArgumentTypeError.__bases__ == (pb.ArgumentError, TypeError)
    others = {x for x in BUILT_IN if x != name}
    assert not any(issubclass(error, getattr(errors, other)) for other in others)


def test_programs_written_for_numpy_catch_singular_matrices():
    with pytest.raises(np.linalg.LinAlgError, match=r"^singular$") as caught:
        raise pb.FactorizationError.at(3, "singular")
    assert caught.value.index == 3
    assert isinstance(caught.value, ArithmeticError)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_travel_between_processes(name):
    error = getattr(errors, name)("line 1\nline 2: µs × 2")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(error, protocol))
        assert type(twin) is type(error)
        assert (str(twin), twin.args) == (str(error), error.args)
    assert str(copy.copy(error)) == str(error)


SQUARE = pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, 1))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda ctx, a: pb.Grid(0, 2), pb.LayoutError),
        (lambda ctx, a: pb.Grid("two", 2), pb.ArgumentTypeError),
        (lambda ctx, a: pb.MatrixDescriptor((4, 4), (0, 2), (1, 1)), pb.LayoutError),
        (lambda ctx, a: pb.MatrixDescriptor((4, 4), (2, 2), (1, 1), dtype="int8"), pb.ArgumentError),
        (lambda ctx, a: SQUARE[::2], pb.ArgumentError),
        (lambda ctx, a: SQUARE.owner(4, 0), pb.ArgumentError),
        (lambda ctx, a: pb.MatmulProblem(SQUARE, SQUARE, None), pb.ArgumentTypeError),
        (lambda ctx, a: pb.MatmulProblem(SQUARE, SQUARE, SQUARE, op_a="X"), pb.ArgumentError),
        (lambda ctx, a: pb.MatmulProblem(SQUARE, SQUARE, SQUARE[0:2, 0:2]).validate(), pb.LayoutError),
        (lambda ctx, a: pb.Level3Problem("gemm", SQUARE, SQUARE), pb.ArgumentError),
        (lambda ctx, a: pb.Epilogue(activation="swish"), pb.ArgumentError),
        (lambda ctx, a: pb.Scales(mode="row"), pb.ArgumentError),
        (lambda ctx, a: pb.draw(3), pb.ArgumentTypeError),
        (lambda ctx, a: ctx.random((4, 4), seed=-1), pb.ArgumentError),
        (lambda ctx, a: ctx.random((4, 4), seed="x"), pb.ArgumentTypeError),
        (lambda ctx, a: ctx.zeros((4, 4), grid=(1, 2)), pb.LayoutError),
        (lambda ctx, a: ctx.zeros("4x4"), pb.ArgumentTypeError),
        (lambda ctx, a: ctx.load(__file__), pb.ArgumentError),
        (lambda ctx, a: a + ctx.zeros((3, 3)), pb.ArgumentError),
        (lambda ctx, a: a.norm("nuclear"), pb.ArgumentError),
        (lambda ctx, a: bool(a), pb.ArgumentTypeError),
        (lambda ctx, a: a @ a.local, pb.ArgumentTypeError),
        (lambda ctx, a: pb.matmul(a, a.local), pb.ArgumentTypeError),
        (lambda ctx, a: pb.matmul(a, a, alpha="2"), pb.ArgumentTypeError),
        (lambda ctx, a: pb.matmul(a, a, beta=1), pb.ArgumentError),
        (lambda ctx, a: pb.matmul(a, ctx.zeros((3, 3))), pb.LayoutError),
        (lambda ctx, a: pb.allgather_matmul(a.local, a.local, None), pb.ArgumentTypeError),
        (lambda ctx, a: pb.allgather_matmul(a.local, a.local[:, :3], ctx), pb.ArgumentError),
        (lambda ctx, a: pb.Context(engine="gpu"), pb.ArgumentError),
    ],
)  # fmt: skip
def test_which_error(call, kind):
    """Layouts have their own class, and a wrong type is a TypeError, too."""
    with pb.Context(engine="host") as ctx, pytest.raises(kind) as caught:
        call(ctx, ctx.zeros(SQUARE))
    assert type(caught.value) is kind


def test_what_has_lines_is_printed_in_one():
    assert errors.short_repr(np.ones((2, 2))) == "array([[1., 1.], [1., 1.]])"
    assert errors.short_repr("a  b\n") == "'a  b\\n'"


def _is_error(value):
    return isinstance(value, type) and issubclass(value, BaseException)


def _calls_with(value, ctx, a):
    """Yield the name of each public function and method with that of one argument, and a call with the value in it."""
    known = {"block": 2, "shape": (4, 4), "function": np.sqrt, "count": 1}
    skipped = {"Context", "DistributedMatrix", "Plan", "draw", "close", "release", "know", "known_call"}
    for where in (ctx, a, blas, linalg, pb, pblas):
        for name in getattr(where, "__all__", dir(where)):
            call = getattr(where, name)
            if name[0] == "_" or name in skipped or not callable(call) or _is_error(call):
                continue
            parameters = inspect.signature(call).parameters.values()
            parameters = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
            given = {x.name: known.get(x.name, a) for x in parameters if x.default is x.empty}
            for one in parameters:
                how = given | {one.name: value}
                first = [how.pop(x.name) for x in parameters if x.kind is x.POSITIONAL_ONLY]
                yield f"{name}, {one.name}", partial(call, *first, **how)


def _operators(value, a):
    for symbol in ("add", "sub", "mul", "truediv", "pow", "iadd", "isub", "imul", "itruediv"):
        yield symbol, partial(getattr(operator, symbol), a, value)
        yield f"r{symbol}", partial(getattr(operator, symbol), value, a)
    for index in (value, (slice(0, 2), value), (slice(value), 0), (slice(None, None, value), 0)):
        yield "index", partial(operator.getitem, a, index)


def test_messages_take_integers_of_any_length():
    """Integers that Python does not print."""

    def tried(name, call):
        try:
            call()
        except pb.PblasmpError:
            return ""
        except Exception as error:  # noqa: BLE001
            return (
                ""
                if isinstance(error, TypeError) and "unsupported operand" in str(error)
                else f"{name}: {error!r}"
            )

    with pb.Context(engine="host") as ctx:
        a, huge = ctx.scatter(np.eye(4), block=2), 10**5000
        calls = [*_operators(huge, a), *_operators(-huge, a)]
        calls += [*_calls_with(huge, ctx, a), *_calls_with((-huge, 1), ctx, a)]
        assert [text for call in calls if (text := tried(*call))] == []
