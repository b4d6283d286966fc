from functools import partial
from tests.mpi.torch import test_models as m
from tests.helpers.mpi import run_mpi
from torch.distributed.device_mesh import init_device_mesh
def some(comm):
    with m.world(comm) as size, m.host(comm) as ctx:
        mesh = init_device_mesh("cpu", (size,))
        for case in (m.main_grads, m.bias_apart, m.fused, m.wrong_types):
            yield case.__name__, m.failure(partial(case, mesh=mesh), ctx)
def test_some():
    run_mpi(some, 3, timeout=300, launch=True)
