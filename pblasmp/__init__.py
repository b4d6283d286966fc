# SPDX-License-Identifier: Apache-2.0
"""pblasmp: distributed dense linear algebra on 2D block-cyclic layouts, on MPI ranks and on GPUs with cuBLASMp.

    import pblasmp as pb

    with pb.Context() as ctx:                      # under mpirun; one rank works too
        grid = pb.Grid.squarest(ctx.size)
        a = ctx.load("A.npy", grid=grid, block=(256, 256))
        b = ctx.load("B.npy", grid=grid, block=(256, 256))
        (a @ b).save("D.npy")

Importing pblasmp loads neither MPI nor a GPU library: each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib

from . import hooks as _hooks
from .lazy import submodule as _submodule

TYPE_CHECKING = False  # typing's own takes as long to import as all the rest of this module
if TYPE_CHECKING:
    from .context import Context as Context
    from .costs.advise import advise as advise
    from .costs.predict import predict as predict
    from .drawing import draw as draw
    from .engines.method import Verdict as Verdict
    from .epilogue import Epilogue as Epilogue
    from .errors import ArgumentError as ArgumentError
    from .errors import ArgumentTypeError as ArgumentTypeError
    from .errors import ClosedError as ClosedError
    from .errors import FactorisationError as FactorisationError
    from .errors import LayoutError as LayoutError
    from .errors import LibraryNotFoundError as LibraryNotFoundError
    from .errors import PblasmpError as PblasmpError
    from .errors import RankMismatchError as RankMismatchError
    from .errors import StatusError as StatusError
    from .errors import UnsupportedError as UnsupportedError
    from .factorisations import QrFactors as QrFactors
    from .factorisations import cho_solve as cho_solve
    from .factorisations import cholesky as cholesky
    from .factorisations import cond_estimate as cond_estimate
    from .factorisations import eigh as eigh
    from .factorisations import inv as inv
    from .factorisations import lstsq as lstsq
    from .factorisations import lu as lu
    from .factorisations import lu_solve as lu_solve
    from .factorisations import qr as qr
    from .factorisations import slogdet as slogdet
    from .factorisations import solve as solve
    from .layout import Grid as Grid
    from .layout import Level3Problem as Level3Problem
    from .layout import MatmulProblem as MatmulProblem
    from .layout import MatrixDescriptor as MatrixDescriptor
    from .layout import numroc as numroc
    from .level3 import geadd as geadd
    from .level3 import hemm as hemm
    from .level3 import her2k as her2k
    from .level3 import herk as herk
    from .level3 import herkx as herkx
    from .level3 import symm as symm
    from .level3 import syr2k as syr2k
    from .level3 import syrk as syrk
    from .level3 import syrkx as syrkx
    from .level3 import tradd as tradd
    from .level3 import trmm as trmm
    from .level3 import trsm as trsm
    from .matrix import DistributedMatrix as DistributedMatrix
    from .planning import algorithms as algorithms
    from .planning import plan as plan
    from .planning import tune as tune
    from .plans import Plan as Plan
    from .problems.files import load_problem as load_problem
    from .products import matmul as matmul
    from .reductions import allclose as allclose
    from .report import Report as Report
    from .scales import Scales as Scales
    from .tensor_parallel import allgather_matmul as allgather_matmul
    from .tensor_parallel import matmul_allgather as matmul_allgather
    from .tensor_parallel import matmul_allreduce as matmul_allreduce
    from .tensor_parallel import matmul_reduce_scatter as matmul_reduce_scatter
    from .vectors import amax as amax
    from .vectors import asum as asum
    from .vectors import axpy as axpy
    from .vectors import copy as copy
    from .vectors import dot as dot
    from .vectors import dotc as dotc
    from .vectors import gemv as gemv
    from .vectors import ger as ger
    from .vectors import gerc as gerc
    from .vectors import hemv as hemv
    from .vectors import her as her
    from .vectors import her2 as her2
    from .vectors import nrm2 as nrm2
    from .vectors import scal as scal
    from .vectors import swap as swap
    from .vectors import symv as symv
    from .vectors import syr as syr
    from .vectors import syr2 as syr2
    from .vectors import trmv as trmv
    from .vectors import trsv as trsv
    from .verification import Verification as Verification
    from .verification import verify as verify

__version__ = "0.1.0"

_NAMES = {
    "context": "Context",
    "costs.advise": "advise",
    "costs.predict": "predict",
    "drawing": "draw",
    "engines.method": "Verdict",
    "epilogue": "Epilogue",
    "errors": (
        "ArgumentError ArgumentTypeError ClosedError FactorisationError LayoutError LibraryNotFoundError "
        "PblasmpError RankMismatchError StatusError UnsupportedError"
    ),
    "factorisations": (
        "QrFactors cho_solve cholesky cond_estimate eigh inv lstsq lu lu_solve qr slogdet solve"
    ),
    "layout": "Grid Level3Problem MatmulProblem MatrixDescriptor numroc",
    "level3": "geadd hemm her2k herk herkx symm syr2k syrk syrkx tradd trmm trsm",
    "matrix": "DistributedMatrix",
    "planning": "algorithms plan tune",
    "plans": "Plan",
    "problems.files": "load_problem",
    "products": "matmul",
    "reductions": "allclose",
    "report": "Report",
    "scales": "Scales",
    "tensor_parallel": "allgather_matmul matmul_allgather matmul_allreduce matmul_reduce_scatter",
    "vectors": (
        "amax asum axpy copy dot dotc gemv ger gerc hemv her her2 nrm2 scal swap symv syr syr2 trmv trsv"
    ),
    "verification": "Verification verify",
}
"""The public names, by the module that has them."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# for users; pblasmp.torch, too, which needs PyTorch
_MODULES = {"layout", "pblas", "tensor_parallel", "testing"}

_OF_VALUES = {
    "draw": "drawing",
    "made_from": "problems.tables",
    "to_toml": "problems.schema",
    "traffic": "costs.traffic",
}
"""Methods of layouts, and the modules that compute them."""

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604


def _register(name: str, module: str) -> None:
    """Let a method of layouts find its function, whose module is imported when it is first called. Local."""

    def call(*args: object, **options: object) -> object:
        return getattr(importlib.import_module(module), name)(*args, **options)

    _hooks.register(name, call)


for _name, _module in _OF_VALUES.items():
    _register(_name, f"{__name__}.{_module}")


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    return _submodule(__name__, name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME) | _MODULES)
