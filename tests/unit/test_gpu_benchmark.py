# SPDX-License-Identifier: Apache-2.0
"""gpu_matmul.py without a GPU: statistics, tables, the plot, agreement on failures, and that multicast stays off."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks import gpu_bench, gpu_devices, gpu_layouts, gpu_matmul, gpu_report
from benchmarks.gpu_report import AUTO, C_CALL, CUBLASMP, GEMM, NCCL, SYMMETRIC
from reference.gpu import owner_blocks


def row(case="4096, 1792, 4096", **entries):
    return {"case": case, "entries": entries}


ROW = row(
    **{
        NCCL: {"us": 214.4},
        GEMM: {"us": 89.0},
        AUTO: {"us": 220.0},
        "no_overlap": {"us": 200.0},
        "split_p2p": {"failed": "StatusError: not supported"},
        SYMMETRIC: {"us": 150.0},
        "default, symmetric": {"us": 100.0, "wrong": True},
    }
)
RESULTS = {
    "nranks": 4,
    "machine": {"GPU": "NVIDIA H200"},
    "sections": {
        "allgather_matmul": [ROW],
        "matmul_reduce_scatter": [],
        "layouts": [row("64, float64, 1x2, 8", NN={"us": 10.0}, TN={"us": 11.0}, TT={"failed": "E: x"})],
        "host": [row("ag 1024", **{CUBLASMP: {"us": 22.0, "device_us": 51}, C_CALL: {"us": 20.0}})],
    },
}


def test_a_sample_takes_as_long_as_its_slowest_rank():
    entry = gpu_report.summary([[1, 9, 3], [2, 4, 8]])
    assert entry == {"us": 8, "fastest_us": 2, "samples_us": [2, 9, 8]}


def test_a_failed_or_wrong_contender_shows_no_usable_time():
    assert [gpu_report.cell(ROW["entries"][n]) for n in (AUTO, "split_p2p", "default, symmetric")] == [
        "220",
        "failed",
        "100 WRONG",
    ]
    assert gpu_report.cell(None) == ""
    assert set(gpu_report.valid(ROW)) == {NCCL, GEMM, AUTO, "no_overlap", SYMMETRIC}


def test_tables():
    table = gpu_report.markdown([ROW], [AUTO, NCCL], "T, N, K").splitlines()
    assert table == [
        f"| T, N, K | pblasmp | {NCCL} |",
        "| --- | ---: | ---: |",
        "| 4096, 1792, 4096 | 220 | 214 |",
    ]
    # auto is compared with the best of those that read the same memory, wrong ones left out
    assert (
        gpu_report.tuning([ROW], "")
        .splitlines()[-1]
        .endswith("| 1.10 (no_overlap); 1.00 (auto, symmetric) |")
    )


def test_the_report_has_every_section_that_was_measured_and_every_failure():
    text = gpu_report.report(RESULTS)
    assert "NVIDIA H200" in text
    assert "### AllGather + GEMM, 4 GPUs" in text
    assert "ReduceScatter" not in text
    assert "| ag 1024 | 22.0 (51) | 20.0 | 1.10 |" in text
    assert "| 64, float64, 1x2, 8 | 10 (1.00) | 11 (1.10) | failed |" in text
    assert "- allgather_matmul, split_p2p: failed: StatusError: not supported (1 of 1 cases)" in text
    assert "- allgather_matmul, default, symmetric: failed: wrong (1 of 1 cases)" in text


def test_rows_of_results_have_seconds_and_what_failed():
    entry = gpu_report.summary([[100, 300, 200]])
    failing = {"failed": "E: x"}
    (one,) = gpu_report.rows_of(
        "allgather_matmul", [row(auto=entry, push=failing, pull=entry | {"wrong": True})]
    )
    assert one == {
        "case": {"T": 4096, "N": 1792, "K": 4096},
        "seconds": {"pblasmp": pytest.approx([1e-4, 3e-4, 2e-4])},
        "failed": {"push": "E: x", "pull": "wrong"},
    }
    (one,) = gpu_report.rows_of("host", [RESULTS["sections"]["host"][0]])
    assert one["case"] == {"product": "ag 1024"}
    assert one["device_seconds"][CUBLASMP] == pytest.approx([51e-6])
    assert gpu_report.case_of("2d", "64, float64, 1x2, 8, NN") == {
        "n": 64, "dtype": "float64", "grid": "1x2", "block": 8, "ops": "NN",
    }  # fmt: skip


def test_plot(tmp_path):
    gpu_report.plot(RESULTS, tmp_path / "out.svg")
    chart = (tmp_path / "out.svg").read_text()
    assert "AllGather + GEMM, 4 GPUs: time / GEMM alone (less is better)" in chart
    assert f">{220 / 89:.2f}</text>" in chart
    gpu_report.plot(
        {"nranks": 4, "sections": {"allgather_matmul": [row(**{AUTO: {"us": 1.0}})]}}, tmp_path / "none.svg"
    )
    assert not (tmp_path / "none.svg").exists()  # there is nothing to compare with


@pytest.mark.parametrize(("p", "q"), [(1, 2), (2, 2), (2, 4)])
def test_pieces_multiply_by_owner(p, q):
    block, blocks = 3, 8
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, block * blocks)), rng.standard_normal((block * blocks, 4))
    pieces = b.reshape(blocks, block, 4)
    held = [pieces[row::p] for row in range(p)]
    total = np.zeros((5, 4))
    for column in range(q):
        mine = a.reshape(5, blocks, block)[:, column::q].reshape(5, -1)
        owner, which = owner_blocks(p, q, column)
        total += mine @ held[owner][which].reshape(-1, 4)
    np.testing.assert_allclose(total, a @ b)


def test_pieces_need_columns_that_are_a_multiple_of_rows():
    with pytest.raises(ValueError, match="2 x 3"):
        owner_blocks(2, 3, 0)


class Ranks:
    """A communicator in which the other ranks' faults are known."""

    def __init__(self, *others):
        self.others = list(others)
        self.size = 1 + len(self.others)

    def allgather(self, mine):
        return [mine, *self.others]


def failing():
    raise ValueError("no\n  good")


def test_ranks_agree_on_a_failure():
    assert gpu_bench.together(Ranks("", ""), lambda: 7) == (7, "")
    assert gpu_bench.together(Ranks("ValueError: no good"), failing) == (None, "ValueError: no good")
    assert gpu_bench.together(Ranks("", ""), failing) == (None, "ValueError: no good (on rank 0 of 3)")
    assert gpu_bench.together(Ranks("", "E: x"), lambda: 7)[1] == "E: x (on rank 2 of 3)"
    with pytest.raises(RuntimeError, match="no good"):
        gpu_bench.agreed(Ranks(""), failing)


@pytest.mark.parametrize("name", ["split_multicast", "atomic_multicast", "fused", "atomic_p2p"])
def test_multicast_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError, match="multicast stays off"):
        gpu_matmul.without_multicast(name)


def test_multicast_is_switched_off(monkeypatch):
    for name in gpu_matmul.MULTICAST_OFF:
        monkeypatch.setenv(name, "")  # so that what is set here ends with the test
        monkeypatch.delenv(name)
    gpu_matmul.forbid_multicast()
    assert gpu_matmul.os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(SystemExit, match="NCCL_NVLS_ENABLE=1"):
        gpu_matmul.forbid_multicast()


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_section_is_planned(ranks):
    work = gpu_matmul.planned(gpu_matmul.parse([]), ranks)
    sections = [section for section, _ in work]
    assert {s: sections.count(s) for s in sections} == {
        "allgather_matmul": 10,
        "matmul_reduce_scatter": 10,
        "matmul_allreduce": 10,
        "2d": 6,
        "layouts": 2,
        "host": 4,
    }
    blocks = {step.keywords["block"] for section, step in work if section == "2d"}
    assert blocks == {256, 1024, 8192 if ranks == 4 else 4096}
    assert {step.keywords["n"] for section, step in work if section == "2d"} == {16384}
    assert [
        s for s, _ in gpu_matmul.planned(gpu_matmul.parse(["--only", "matmul_allreduce", "--quick"]), ranks)
    ] == ["matmul_allreduce"] * 2


def test_every_layout_is_legal_and_deals_out_shares_as_the_plain_one_does():
    cases = gpu_layouts.operands(1024, 64, "float64", (1, 2))
    assert all(len({d.block for d in cases[name]}) == 3 for name in ("unequal blocks", "any blocks"))
    assert cases["sources"][0].source == (0, 1)
    for descriptors in cases.values():
        for d in descriptors:
            assert max(d.cols.counts()) <= 0.6 * d.shape[1]


def test_random_numbers_fill_an_array(monkeypatch):
    monkeypatch.setattr(gpu_devices, "_PERIOD", 7)
    array = np.full((4, 5), np.nan)
    gpu_devices.fill(array, 3, np.asarray)
    flat = array.reshape(-1)
    assert np.isfinite(flat).all()
    assert (flat[:13] == flat[7:]).all()
    assert len(set(flat)) == 7
    gpu_devices.fill(array, None, np.asarray)
    assert (array == 1).all()
