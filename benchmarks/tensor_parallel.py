# SPDX-License-Identifier: Apache-2.0
"""Time tensor-parallel products: ``mpirun -n 2 python -m benchmarks.tensor_parallel``.

Every algorithm that applies, next to a GEMM and a separate collective, the GEMM alone and, on GPUs, PyTorch's products
in symmetric memory: what ``pblasmp bench --algo all`` times, and PyTorch. With GPUs of several hosts, also of such as
``tests/gpu/hosts.sh`` makes of one, the files say so.
"""

from __future__ import annotations

import argparse

import pblasmp as pb
from benchmarks import results
from pblasmp.cli.bench import BenchOptions, measure, print_bench
from pblasmp.cli.reports import Reporter
from pblasmp.layout.schemes import FORMS
from reference.pytorch import by_pytorch


def shape(text: str) -> tuple[int, int, int]:
    """Return T, N and K of "1024,512,2048"."""
    t, n, k = map(int, text.split(","))
    return t, n, k


def main() -> None:
    """Time what the command line says, and write a file for each product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-p", "--product", choices=list(FORMS), action="append", dest="products")
    parser.add_argument("--shape", type=shape, action="append", dest="shapes", metavar="T,N,K")
    parser.add_argument("--dtype")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--algo", default="all", help="of pblasmp; by default all, and PyTorch's")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument(
        "--in-a-row", type=int, default=1, metavar="N", help="runs queued in a row for each sample"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes and few samples; writes nothing")
    results.add_option(parser)
    asked = parser.parse_args()
    with pb.Context(engine=asked.engine) as ctx:
        small = ((8 * ctx.size, 16, 8 * ctx.size),) if asked.quick else ()
        options = BenchOptions(
            products=tuple(asked.products or FORMS), shapes=tuple(asked.shapes or small), dtype=asked.dtype,
            samples=2 if asked.quick else asked.samples, engine=asked.engine, algo=asked.algo,
            in_a_row=asked.in_a_row,
        )  # fmt: skip
        found = measure(ctx, options, Reporter(), by_pytorch)
        if ctx.rank == 0:
            print_bench(found)
            about = results.facts(ctx)
            hosts = results.between_hosts(about)
            directory = results.directory_of(asked)
            for form, rows in found["sections"].items():
                wrong = [row["case"] for row in rows if not row["good"]]
                if wrong:
                    raise SystemExit(f"{form}: wrong results for {', '.join(wrong)}")
                run = results.Run(
                    f"tensor_parallel-{hosts}{form}", results.today(), results.this_commit(), ctx.size,
                    0 if ctx.engine.device is None else ctx.size, **about,
                    options={
                        "dtype": found["dtype"], "samples": options.samples, "in_a_row": options.in_a_row,
                        "tuned": bool(ctx.engine.measured.entries),
                    },
                    reference="pblasmp", sample=f"median of {options.samples}", rows=[row_of(row) for row in rows],
                )  # fmt: skip
                if directory is not None:
                    print(results.save(run, directory))


def row_of(row: dict[str, object]) -> dict[str, object]:
    """Return a case as results have it."""
    sizes = zip("TNK", map(int, str(row["case"]).split(",")), strict=True)
    us: dict[str, float] = row["us"]  # type: ignore[assignment]
    seconds = {name: [time * 1e-6] for name, time in us.items()}
    return {"case": dict(sizes), "by": row["algorithm"], "seconds": seconds, "ratios": row["ratios"]}


if __name__ == "__main__":
    main()
