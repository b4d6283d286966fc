# SPDX-License-Identifier: Apache-2.0
"""The products of layers: which dimensions of their arrays are split, and how they go back.

T tokens, K inputs, N outputs, P ranks; w is outputs × inputs, as torch.nn has it. The gradient of x comes from
another product, with the same weights transposed; ``FORMS`` has all of them:

    forward                                              gradient of x
    allgather_matmul         gather x, multiply          matmul_reduce_scatter
    matmul_reduce_scatter    multiply, sum, scatter      allgather_matmul
    matmul_allreduce         multiply, sum               local: every rank has the whole gradient of y
    matmul_allgather         multiply, gather y          matmul_allreduce
    split_matmul_allreduce   own part of x, as above     matmul_allgather
    matmul_local             multiply                    matmul_allreduce
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..context import Context
from ..engines.method import check_parallel
from ..errors import ArgumentTypeError, PblasmpError, UnsupportedError, short_repr


class Form(NamedTuple):
    """A product: which dimension of each array is split (None: every rank has all of it), and how it goes back.

    Attributes:
        x, w, bias, y: the dimensions.
        back: the form that gives the gradient of x.
        call: the product of ``pblasmp`` that it is; None if each rank multiplies alone.
        part_of_x: each rank has all of x, and multiplies its own inputs.
        gathers: what the ranks put together, in parts by ``shard``'s rule: "x", "y" or "".
        scatters: the tokens of y are split over the ranks.
    """

    x: int | None
    w: int
    bias: int | None
    y: int | None
    back: str
    call: Any = None
    part_of_x: bool = False
    gathers: str = ""
    scatters: bool = False


FORMS = {
    "allgather_matmul": Form(0, 0, 0, -1, "matmul_reduce_scatter", "allgather_matmul", gathers="x"),
    "matmul_reduce_scatter": Form(-1, 1, None, 0, "allgather_matmul", "matmul_reduce_scatter", scatters=True),
    "matmul_allreduce": Form(-1, 1, None, None, "matmul_local", "matmul_allreduce"),
    "matmul_allgather": Form(None, 0, 0, None, "matmul_allreduce", "matmul_allgather", gathers="y"),
    "matmul_local": Form(None, 0, 0, -1, "matmul_allreduce"),
    "split_matmul_allreduce": Form(
        None, 1, None, None, "matmul_allgather", "matmul_allreduce", part_of_x=True
    ),
}


def own(total: int, ctx: Context) -> slice:
    """Return which of ``total`` indices this rank has, by ``shard``'s rule; total may be symbolic. Local."""
    block = -(-total // ctx.size)
    return slice(min(total, ctx.rank * block), min(total, (ctx.rank + 1) * block))


def count(total: int, ctx: Context) -> int:
    """Return how many of ``total`` indices this rank has. Local."""
    mine = own(total, ctx)
    extent: int = mine.stop - mine.start
    return extent


def refuse_transforms(call: str) -> None:
    """Raise UnsupportedError inside torch.func's grad, vjp, vmap and the like. Local; the same on every rank."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{call}: torch.func.grad, vjp, jvp and vmap do not go through products of several ranks: use "
            "Tensor.backward or torch.autograd.grad (torch.func.functional_call works)"
        )


def fault_of_algorithms(form: str, ctx: Context, algo: object, backward_algo: object) -> PblasmpError | None:
    """Return an error unless these are names of algorithms for a product of ``FORMS`` and for its backward pass. Local.

    Compiled code only finds out when it multiplies whether the engine has them.
    """
    for argument, name, which in (
        ("algo", algo, FORMS[form]),
        ("backward_algo", backward_algo, FORMS[FORMS[form].back]),
    ):
        if not isinstance(name, str):
            return ArgumentTypeError(f"{argument}: expected a string, got {short_repr(name)}")
        if name == "auto":
            continue
        if which.call is None:
            way = "forward" if argument == "algo" else "backward"
            return UnsupportedError(
                f"{argument}: expected 'auto', got {short_repr(name)}: in this {way} pass each rank multiplies alone"
            )
        if not torch.compiler.is_compiling():
            try:
                check_parallel(ctx.engine, which.call, name, argument)
            except UnsupportedError as error:
                return error
    return None


def shape_of_product(
    form: str, x: Tensor, outputs: int, ctx: Context, total: int | None
) -> tuple[list[int], list[int]]:
    """Return the shapes of a product's result, and of x gathered; they may be symbolic. Local."""
    kind, lead = FORMS[form], list(x.shape[:-1])
    if kind.gathers == "x":
        lead[0] = lead[0] * ctx.size if total is None else total
    gathered = [*lead, x.shape[-1]]
    if kind.scatters:
        lead[0] = count(lead[0], ctx)
    if kind.gathers == "y":
        outputs = outputs * ctx.size if total is None else total
    return [*lead, outputs], gathered
