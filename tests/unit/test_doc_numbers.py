# SPDX-License-Identifier: Apache-2.0
"""Numbers in the pages are those of the code: limits, thresholds of "auto", times."""

import importlib
import re

import pytest

from pblasmp.bindings.c_library import version_text
from tests.helpers.docs import DOCS

POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def mib(nbytes):
    return f"{nbytes >> 20} MiB"


def times_ten_to(value):
    """Return 25000000000.0 as "2.5 · 10¹⁰", and 1e10 as "10¹⁰"."""
    mantissa, exponent = f"{value:e}".split("e")
    power = f"10{str(int(exponent)).translate(POWERS)}"
    return power if float(mantissa) == 1 else f"{float(mantissa):g} · {power}"


def since(version):
    """Return 700 as "0.7", and 801 as "0.8.1"."""
    return version_text(version).removesuffix(".0")


def power_of_two(value):
    assert value & (value - 1) == 0
    return f"2{str(value.bit_length() - 1).translate(POWERS)}"


FACTORIZATIONS = "internals/calls"

# page, module and constant, how the page writes it, and the words around the number
NUMBERS = [
    ("matmul", "runtime.kept_plans._MOST_BYTES", mib, "used ones that fit into {} of each rank"),
    ("matmul", "runtime.kept_plans._MACHINE_BYTES", mib, "or into {} of all ranks of a machine;"),
    ("tensor-parallel", "runtime.kept_plans._MOST_BYTES", mib, "used ones that fit into {} ("),
    ("tensor-parallel", "runtime.kept_plans._MACHINE_BYTES", mib, "(into {} of all ranks of a machine) until"),
    (FACTORIZATIONS, "engines.host.host_operations._WIDTH", str, "have panels of {} columns"),
    (FACTORIZATIONS, "engines.host.host_operations._LARGE", str, "columns, from an order of {} on"),
    (FACTORIZATIONS, "engines.host.host_operations._LARGE_WIDTH", str, "on of {}. On one node"),
    (FACTORIZATIONS, "engines.host.host_operations.HostOperations.factor_alone", str, "Up to an order of {} one rank"),
    (FACTORIZATIONS, "engines.dense.panel_shape._WIDE", str, "at least {} columns"),
    (FACTORIZATIONS, "engines.dense.panel_shape._BULKY", "{:,}".format, "From an order of {} on, ways in"),
    (FACTORIZATIONS, "engines.dense.panel_shape._MOST", str, "more than {} times the volume by the model"),
    (FACTORIZATIONS, "engines.dense.panel_shape.ROUNDS", str, "each rank has {} such blocks"),
    (
        FACTORIZATIONS, "engines.gpu.factor_operations.GpuFactorOperations.shared_width", str,
        "have up to {} columns there",
    ),
    (
        FACTORIZATIONS, "engines.gpu.factor_operations.GpuFactorOperations.shared_from", "{:,}".format,
        "has less than {} elements",
    ),
    (FACTORIZATIONS, "engines.gpu.spread.FEW", str, "For up to {} right-hand sides one kernel"),
    ("matrices", "matrix.creation.DEFAULT_BLOCK", str, "| `block` | `64` or `(64, 32)` | {};"),
    ("matrices", "matrix.io.saving.TILE_BYTES", mib, "contiguous tiles of about {}"),
    ("errors", "runtime.runtime.MANY_PLANS", {1000: "a thousand"}.get, "when {} plans are open"),
    ("errors", "comm.agreement.BLOCKED_SECONDS", "{:.0f}".format, "still in theirs {} seconds later"),
    ("errors", "comm.side_channel._DRAIN_SECONDS", {0.1: "a tenth of a second"}.get, "canceled within {}"),
    ("errors", "comm.process_group._LOOK_SECONDS", lambda x: f"{x * 1000:.0f} ms", "ranks poll every {}"),
    ("gpu", "engines.gpu.runtime.health._EXIT_SECONDS", str, "ends a process {} seconds after"),
    ("gpu", "engines.gpu.gpu_transport.PANEL_BYTES", mib, "pinned memory, {} at a time"),
    ("host-engine", "engines.protocol.SHARE", lambda x: f"{x * 100:.0f} %", "fits into {} of the free memory"),
    ("host-engine", "engines.dense.stationary._LARGER", {2: "twice"}.get, "move at least {} as much"),
    ("host-engine", "engines.dense.stationary._LEAST", power_of_two, "and {} elements or more"),
    ("host-engine", "engines.host.host_operations.HostOperations.panel", str, "in panels of {} along k"),
    ("host-engine", "comm.exchange.MESSAGE_BYTES", mib, "Messages have at most {}"),
    ("products-with-more", "engines.gpu.cublasmp.epilogues._SINCE", since, "dgelu | since cuBLASMp {} |"),
    ("products-with-more", "engines.gpu.cublasmp.epilogues._DRELU_SINCE", since, "| drelu | since {} |"),
    ("products-with-more", "engines.gpu.cublasmp.epilogues._ALIGNMENT", str, "must begin at multiples of {} bytes"),
    (
        "tensor-parallel", "bindings.enums.MatmulAttribute.COMMUNICATION_TYPE.since", since,
        "cuBLASMp has this choice since {}; before",
    ),
    ("tensor-parallel", "engines.tensor.algorithms._PANELS", {4: "a quarter"}.get, "*By panels*: {} of each rank's"),
    ("blas", "engines.dense.steps._LEAST", str, "takes it for {} or more equations"),
    ("blas", "engines.dense.steps._THIN", "1/{}".format, "at most {} as many right-hand sides"),
    ("blas", "engines.dense.steps._PANEL", str, "solves {} equations at a time"),
    ("tensor-parallel", "engines.tensor.algorithms._WORTH_A_TURN", mib, "`ring` if each rank owns {} of the sum"),
    ("tensor-parallel", "tuning.measurements._REACH", lambda x: {4: "four"}[2**x], "up to about {} times as large"),
    ("command-line", "matrix.verification._LINES", str, "with NaN or infinities, up to {} of each"),
    ("command-line", "cli.matmul._MOST_REPEATS", str, "fit into a second, at most {}"),
    ("products-with-more", "epilogue._MASK_LD", str, "mask are multiples of {} bits"),
    ("products-with-more", "epilogue._GELU_LD", str, "gelu's argument multiples of {} elements"),
    ("products-with-more", "epilogue.BLOCK", str, "scales {} entries along k"),
    ("internals/gpu", "engines.gpu.tensor.copy_methods._HIDES_COPIES", times_ten_to, "below {} operations, else"),
    ("internals/gpu", "engines.gpu.tensor.copy_methods._PULLS", times_ten_to, '`"pull"` below {} operations per rank'),
    ("internals/gpu", "engines.gpu.tensor.copy_methods._HIDES_SUMS", times_ten_to, "and {} operations per rank on"),
    ("internals/gpu", "engines.gpu.tensor.copy_methods._ONE_SHOT_WAVES", str, "below {} waves of tiles"),
    ("internals/gpu", "engines.gpu.tensor.copy_methods._RING_WAVES", str, '`"ring"` from {} waves of tiles on'),
    (
        "internals/gpu", "engines.gpu.tensor.copy_methods._ONE_SHOT_BYTES", lambda x: f"{x >> 10} KiB",
        "for results up to {}",
    ),
    ("internals/gpu", "engines.gpu.push.plan._LINE", str, "in blocks of fewer than {}"),
    ("internals/gpu", "engines.gpu.push.plan._SIDE", str, "a product of about {} × "),
]  # fmt: skip


def value_of(name):
    """Return the value of a dotted name below pblasmp."""
    parts = name.split(".")
    for at in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(["pblasmp", *parts[:at]]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("pblasmp"):
                pytest.skip(f"{error.name} is missing")
            continue
        for part in parts[at:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("page", "name", "written", "words"), NUMBERS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_numbers_are_those_of_the_code(page, name, written, words):
    text = re.sub(r"\s+", " ", (DOCS / f"{page}.md").read_text())
    assert words.format(written(value_of(name))) in text
