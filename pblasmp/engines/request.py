# SPDX-License-Identifier: Apache-2.0
"""The request to an engine: a problem, how to compute it, and the arrays of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..dtypes import ELEMENT_TYPES, as_dtype, plain, scalar
from ..epilogue import Epilogue, Scales
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout import Level3Problem, MatmulProblem, ParallelProblem
from ..layout.factor_problem import FactorProblem
from ..layout.grid import integer

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_BUILT_IN = {bool, int, float, complex, str, np.str_, type, type(None)}
_NUMBERS = {np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
_DTYPES = {type(row.dtype) for row in ELEMENT_TYPES.values()}
CONSTANTS = frozenset(_BUILT_IN | _NUMBERS | _DTYPES)
"""Types of options that cannot change between two calls, as a tensor of one number could.

Types derived from them are not: how their values are hashed and compared is the user's code. np.timedelta64 is none
either: it has no hash.
"""

LocalArray = Any  # numpy.ndarray on the host engine, cupy.ndarray on cublasmp
Problem = MatmulProblem | Level3Problem | ParallelProblem
AnyProblem = Problem | FactorProblem


@dataclass(frozen=True, slots=True)
class Options:
    """How a product is to be computed. ``Options.of`` checks what users give.

    Attributes:
        alpha, beta: scalars, float or complex as D's type.
        algo: "auto" or the name of an algorithm.
        compute: what products are summed in: None (the type itself, float32 for 16-bit types), or an engine's name.
        comm_dtype: type in which partial sums travel; None is the algorithm's own choice.
        comm_sms: streaming multiprocessors left to communication; None leaves it to the library.
    """

    alpha: complex = 1
    beta: complex = 0
    algo: str = "auto"
    compute: str | None = None
    comm_dtype: np.dtype | None = None
    comm_sms: int | None = None

    @classmethod
    def of(
        cls,
        dtype: np.dtype,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        real: str = "",
        algo: str = "auto",
        compute: str | None = None,
        comm_dtype: DTypeLike | None = None,
        comm_sms: int | None = None,
    ) -> Options:
        """Return the options that a user asks for. Local.

        Args:
            dtype: the result's element type.
            real: which of "alpha" and "beta" must be real whatever the type is.
            alpha, beta, algo, compute, comm_dtype, comm_sms: see the attributes.

        Raises:
            ArgumentError: an option has the wrong type or is out of range.
        """
        scalars: dict[str, Any] = {}
        for name, value in (("alpha", alpha), ("beta", beta)):
            number = scalar(value, dtype, name)
            if name in real.split():
                if complex(number).imag != 0:
                    raise ArgumentError(f"{name}: {short_repr(value)} is complex, but it must be real here")
                number = complex(number).real
            scalars[name] = number
        _check_type("algo", algo, str, "a string")
        if compute is not None:
            _check_type("compute", compute, str, "None or a string")
        return cls(
            **scalars,
            algo=plain(algo),
            compute=plain(compute),
            comm_dtype=None if comm_dtype is None else as_dtype(comm_dtype),
            comm_sms=None if comm_sms is None else integer(comm_sms, "comm_sms", 1, ArgumentError),
        )

    def facts(self) -> dict[str, Any]:
        """Return by name what must be the same on every rank. Local."""
        return {
            "alpha": self.alpha, "beta": self.beta, "algo": self.algo, "compute": self.compute,
            "comm_dtype": self.comm_dtype, "comm_sms": self.comm_sms,
        }  # fmt: skip


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {short_repr(value)}")


@dataclass(eq=False)
class Operands:
    """The arrays of one run on this rank, with epilogue and scales. Nothing prepared outlives them.

    Attributes:
        a, b, c, d: local arrays; None if there is no such operand.
        epilogue: bias, activation and their gradients, with this engine's arrays.
        scales: of 8-bit operands and results, with this engine's arrays.
        gathered: an array for all of X, from AllGather + GEMM; None if it is not wanted.
        pivots: of LU factors, from 0.
        tau: of reflectors, their factors.
    """

    a: LocalArray
    b: LocalArray | None
    c: LocalArray | None
    d: LocalArray
    epilogue: Epilogue | None = None
    scales: Scales | None = None
    gathered: LocalArray | None = None
    pivots: NDArray[np.int64] | None = None
    tau: NDArray[Any] | None = None

    @property
    def follows(self) -> str:
        """The name of the epilogue; empty if there is none."""
        return "" if self.epilogue is None else self.epilogue.name


class Task(NamedTuple):
    """What a call asks of the engine, apart from arrays: what the ranks have agreed on.

    Attributes:
        nearest: the problem in the layouts that operands are moved to first; None: they stay where they are.
        reasons: why operands are moved, for the report.
    """

    problem: AnyProblem
    options: Options
    nearest: MatmulProblem | Level3Problem | None = None
    reasons: tuple[str, ...] = ()

    @property
    def computed(self) -> AnyProblem:
        """The problem that an algorithm computes."""
        return self.nearest or self.problem
