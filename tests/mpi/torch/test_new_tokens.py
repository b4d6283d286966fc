# SPDX-License-Identifier: Apache-2.0
"""Products of PyTorch's tensors with ever new numbers of tokens, whatever tensors came before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, only_long

FORMS = "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"
KINDS = "plain", "plain", "plain", "parameter", "needs a gradient", "turned", "with gaps", "negated"
INPUTS, OUTPUTS = 6, 4  # of each rank


def tensor(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of whole numbers of some kind."""
    x = torch.from_numpy(rng.integers(-3, 4, shape)).to(dtype)
    if kind == "turned":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "with gaps":
        return torch.cat([x, x], -1)[..., : shape[-1]]
    if kind == "negated":
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    return torch.nn.Parameter(x) if kind == "parameter" else x.requires_grad_(kind != "plain")


@on_ranks(*only_long(1), 2, 3)
def test_any_tensor_after_any_other(comm: Any, ctx: pb.Context) -> None:
    """Each is read as it is: none is taken for one like the last one. Also few tokens, none, and uneven numbers."""
    rng, size = np.random.default_rng(89), comm.size
    mine = np.random.default_rng(comm.rank)
    for form in FORMS:
        sums = form in ("matmul_reduce_scatter", "matmul_allreduce")
        w = tensor(mine, (OUTPUTS, INPUTS), "plain", torch.float64)
        ws = [torch.from_numpy(each) for each in comm.allgather(w.numpy())]
        for turn in range(draws(24, long=800)):
            kind, tokens = KINDS[rng.integers(len(KINDS))], int(rng.integers(0, 12))
            tokens = max(tokens, int(kind == "negated"))
            lead = (tokens,) if rng.integers(3) else (tokens, 2)
            dtype = torch.float32 if turn % 5 == 4 else torch.float64
            if form == "allgather_matmul" and kind == "plain" and rng.integers(4) == 0:
                lead = (tokens + comm.rank % 2, *lead[1:])  # not as many on all ranks
            numbers = rng if form == "matmul_allgather" else mine  # the same everywhere, or not
            x = tensor(numbers, (*lead, INPUTS), kind, dtype)
            what = f"{form} {turn}: {kind} {tuple(x.shape)} {dtype}"
            y = getattr(pt, form)(x, w.to(dtype), ctx).detach()
            xs = [
                torch.from_numpy(each).double() for each in comm.allgather(x.detach().resolve_neg().numpy())
            ]
            if sums:
                expected = sum(each @ of.T for each, of in zip(xs, ws, strict=True))
                if form == "matmul_reduce_scatter":
                    block = -(-len(expected) // size)
                    expected = expected[comm.rank * block : (comm.rank + 1) * block]
            elif form == "allgather_matmul":
                expected = torch.cat(xs) @ ws[comm.rank].T
            else:
                expected = torch.cat([xs[comm.rank] @ of.T for of in ws], -1)
            assert y.dtype == dtype, what
            assert torch.equal(y.double(), expected), what
