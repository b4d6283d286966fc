# SPDX-License-Identifier: Apache-2.0
"""A script in one process, without a launcher and without MPI, runs as it does on many ranks."""

from tests.helpers.fresh import run_fresh
from tests.helpers.mpi import ROOT

SCRIPT = """
sys.modules["mpi4py"] = None  # as if it were not installed
import torch
from torch.distributed.tensor import DTensor
import pblasmp as pb
import pblasmp.torch as pt

torch.manual_seed(0)
for _ in range(2):
    with pb.Context() as ctx:
        up = pt.ColumnParallelLinear(8, 16, ctx=ctx, sequence_parallel=True)
        down = pt.RowParallelLinear(16, 8, ctx=ctx, sequence_parallel=True)
        embedding = pt.VocabParallelEmbedding(20, 8, ctx=ctx)
        model = torch.nn.Sequential(embedding, up, torch.nn.GELU(), down)
        tokens = torch.arange(20)
        before = torch.nn.functional.linear(embedding(tokens), up.weight.full_tensor(), up.bias.full_tensor())
        assert torch.allclose(up(embedding(tokens)), before, atol=1e-5)
        model(tokens).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        assert norm.full_tensor() > 0
        assert up.weight.to_local().shape == (16, 8)
        styles = {"0": pt.ColwiseParallel(ctx=ctx), "1": pt.RowwiseParallel(ctx=ctx)}
        plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        split = torch.distributed.tensor.parallel.parallelize_module(plain, mesh, styles)
        assert split(torch.ones(3, 8)).shape == (3, 8)
    assert not torch.distributed.is_initialized()
print("done")
raise RuntimeError("shown once")  # PyTorch's hook for exceptions, set with each group, calls that of the context before
"""

EXAMPLE = """
import runpy
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_layers_in_one_process():
    done = run_fresh(SCRIPT)
    assert (done.returncode, done.stdout) == (1, "done\n"), done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("RuntimeError: shown once") == 1, done.stderr


def test_the_example_in_one_process():
    done = run_fresh(EXAMPLE, str(ROOT / "examples" / "tensor_parallel_mlp.py"))
    assert done.returncode == 0, done.stderr
    assert "the same as in one process: True" in done.stdout
