# SPDX-License-Identifier: Apache-2.0
"""The other contenders of gpu_matmul.py: PyTorch (NCCL + cuBLAS) and nvmath-python. Both are optional.

Each works on the same local arrays as pblasmp, as PyTorch tensors over the same memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

_TIMEOUT = timedelta(seconds=60)


class Contender(NamedTuple):
    """Something to time. All of it is collective."""

    run: Callable[[], Any]  # queues one product on the current stream
    result: Callable[[], Any] | None = None  # this rank's part of the last product, as a PyTorch tensor
    close: Callable[[], Any] = lambda: None
    path: Callable[[], str] = lambda: ""


class Torch:
    """PyTorch with its NCCL backend over the ranks of an MPI communicator. Collective over it."""

    def __init__(
        self, comm: Any, device: int, stream: int, agree: Callable[[Callable[[], Any]], Any]
    ) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        torch.cuda.set_device(device)
        if stream:
            torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=torch.device("cuda", device)))

        def store(port: int, master: bool) -> Any:
            return dist.TCPStore(
                "127.0.0.1", port, comm.size, master, timeout=_TIMEOUT, wait_for_workers=False
            )

        first = agree(lambda: store(0, True) if comm.rank == 0 else None)
        port = comm.bcast(first.port if first is not None else None)
        mine = agree(lambda: first if comm.rank == 0 else store(port, False))
        device_id = torch.device("cuda", device)
        agree(
            lambda: dist.init_process_group(
                "nccl",
                store=mine,
                rank=comm.rank,
                world_size=comm.size,
                timeout=_TIMEOUT,
                device_id=device_id,
            )
        )
        self._groups: dict[tuple[int, ...], Any] = {}
        warm = torch.ones(1, device="cuda")
        dist.all_reduce(warm)
        if warm.item() != comm.size:
            raise RuntimeError(f"all_reduce of ones is {warm.item()} on {comm.size} ranks")

    def view(self, array: Any) -> Any:
        """Return a tensor over the memory of a local array (CuPy). Local."""
        torch = self.torch
        if array.dtype.name == "bfloat16":  # through a type that every version exchanges
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
        return torch.from_dlpack(array)

    def error(self, got: Any, expected: Any) -> float:
        """Return the relative error of this rank's part in the Frobenius norm; NaN where anything is NaN. Local."""
        precise = self.torch.float64 if expected.dtype == self.torch.float64 else self.torch.float32
        norm = self.torch.linalg.vector_norm
        expected = expected.to(precise)
        difference = got.to(precise).sub_(expected)
        return float(norm(difference) / norm(expected))

    def _new(self, like: Any, *shape: int) -> Any:
        return self.torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)

    def gemm(self, x: Any, w: Any) -> Contender:
        """The local product X W^T alone, without communication."""
        y = self._new(x, x.shape[0], w.shape[0])
        return Contender(lambda: self.torch.mm(x, w.t(), out=y))

    def ag(self, x: Any, w: Any, ranks: int) -> Contender:
        """All-gather of X, then the product."""
        gathered = self._new(x, ranks * x.shape[0], x.shape[1])
        y = self._new(x, gathered.shape[0], w.shape[0])

        def run() -> None:
            self.dist.all_gather_into_tensor(gathered, x)
            self.torch.mm(gathered, w.t(), out=y)

        return Contender(run, lambda: y)

    def ag_gemm(self, x: Any, w: Any, ranks: int) -> Contender:
        """The local product of the all-gather scheme alone, all of X being here."""
        return self.gemm(x.repeat(ranks, 1), w)

    def rs(self, x: Any, w: Any, ranks: int) -> Contender:
        """The product, then the reduce-scatter of Y."""
        partial = self._new(x, x.shape[0], w.shape[0])
        y = self._new(x, x.shape[0] // ranks, w.shape[0])

        def run() -> None:
            self.torch.mm(x, w.t(), out=partial)
            self.dist.reduce_scatter_tensor(y, partial)

        return Contender(run, lambda: y)

    def ar(self, x: Any, w: Any, ranks: int) -> Contender:  # noqa: ARG002
        """The product, then the all-reduce of Y."""
        y = self._new(x, x.shape[0], w.shape[0])

        def run() -> None:
            self.torch.mm(x, w.t(), out=y)
            self.dist.all_reduce(y)

        return Contender(run, lambda: y)

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._groups:
            self._groups[ranks] = self.dist.new_group(list(ranks))
        return self._groups[ranks]

    def block_cyclic(self, a: Any, b: Any, grid: Any, rank: int, block: int) -> Contender:
        """A gathered along process rows and B along process columns, then a product for every owner of A's columns.

        The order of k does not matter inside a product: pieces are multiplied in place.
        """
        p, q = grid.nprow, grid.npcol
        rows = [self._group(tuple(grid.rank(i, j) for j in range(q))) for i in range(p)]
        cols = [self._group(tuple(grid.rank(i, j) for i in range(p))) for j in range(q)]
        prow, pcol = grid.coords(rank)
        all_a, all_b = self._new(a, q, *a.shape), self._new(b, p, *b.shape)
        blocks = all_b.view(p, -1, block, b.shape[1])
        d = self._new(a, a.shape[0], b.shape[1])

        def run() -> None:
            self.dist.all_gather_into_tensor(all_a, a, group=rows[prow])
            self.dist.all_gather_into_tensor(all_b, b, group=cols[pcol])
            for column in range(q):
                owner, which = owner_blocks(p, q, column)
                piece = blocks[owner][which].reshape(-1, b.shape[1])
                if column == 0:
                    self.torch.mm(all_a[column], piece, out=d)
                else:
                    d.addmm_(all_a[column], piece)

        return Contender(run, lambda: d)

    def block_cyclic_gemm(self, shape: tuple[int, int], k: int, dtype: Any, ops: str) -> Contender:
        """The local product of the block-cyclic GEMM alone, all of A's rows and B's columns being here."""
        (m, n), random = shape, partial(self.torch.randn, dtype=dtype, device="cuda")
        a = random(m, k) if ops[0] == "N" else random(k, m).t()
        b = random(k, n) if ops[1] == "N" else random(n, k).t()
        d = self._new(a, m, n)
        return Contender(lambda: self.torch.mm(a, b, out=d))

    def close(self) -> None:
        """End the process group. Collective."""
        self.dist.destroy_process_group()


class Nvmath:
    """nvmath-python's distributed matmul, on its own NCCL communicator. Collective over an MPI communicator."""

    def __init__(self, comm: Any, device: int) -> None:
        import nvmath.distributed as nvd
        from nvmath.distributed.linalg import advanced

        self._nvd, self._advanced = nvd, advanced
        nvd.initialize(device, comm, backends=["nccl"])

    def scheme(self, name: str, x: Any, w: Any) -> Contender:
        """AG, RS or AR of row-major X and W: column-major, D = Y^T is op(A) B with A = W^T stored and B = X^T."""
        import numpy as np

        slab = self._nvd.distribution.Slab
        along = {"ag": (slab.Y, slab.Y, slab.X)}.get(name, (slab.X, slab.X, slab.Y))
        qualifiers = np.zeros((3,), dtype=self._advanced.matrix_qualifiers_dtype)
        qualifiers[0]["is_transpose"] = True
        epilog = self._advanced.MatmulEpilog.ALLREDUCE if name == "ar" else None
        return self._contender(w.t(), x.t(), along, qualifiers, epilog, register=name == "ag")

    def block_cyclic(self, a: Any, b: Any, grid: Any, block: int) -> Contender:
        """The block-cyclic product of row-major A and B, as column-major D^T = B^T A^T on the transposed grid."""
        distribution = self._nvd.distribution
        layout = distribution.ProcessGrid.Layout
        turned = distribution.ProcessGrid(
            shape=(grid.npcol, grid.nprow),
            layout=layout.COL_MAJOR if grid.order == "row" else layout.ROW_MAJOR,
        )
        along = [distribution.BlockCyclic(turned, (block, block)) for _ in range(3)]
        return self._contender(b.t(), a.t(), along, None, None, register=False)

    def _contender(
        self, a: Any, b: Any, along: Any, qualifiers: Any, epilog: Any, *, register: bool
    ) -> Contender:
        # Registering B helps the all-gather alone, and only memory of ncclMemAlloc can be.
        os.environ["NVMATH_DIST_MATMUL_REGISTER_BUFFERS"] = str(int(register))
        product = self._advanced.Matmul(a, b, distributions=along, qualifiers=qualifiers)
        product.plan(epilog=epilog)
        last: list[Any] = []

        def run() -> None:
            last[:] = [product.execute()]

        def result() -> Any:
            return last[0].t()

        return Contender(run, result, product.free)

    def close(self) -> None:
        """End nvmath's runtime. Collective."""
        self._nvd.finalize()


def owner_blocks(p: int, q: int, column: int) -> tuple[int, slice]:
    """Return which of B's blocks of rows multiply what process column ``column`` holds of A, on a p × q grid.

    A's columns and B's rows are cut into the same blocks, dealt to q process columns and p process rows.

    Returns:
        The process row that has them, and the slice of its blocks. q must be a multiple of p.
    """
    if q % p:
        raise ValueError(f"a grid of {p} x {q}: expected columns that are a multiple of rows")
    return column % p, slice(column // p, None, q // p)
