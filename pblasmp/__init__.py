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

from . import lazy as _hooks
from .lazy import submodule as _submodule

TYPE_CHECKING = False  # typing's own takes as long to import as all the rest of this module
if TYPE_CHECKING:
    from . import blas as blas
    from . import layout as layout
    from . import linalg as linalg
    from . import pblas as pblas
    from . import tensor_parallel as tensor_parallel
    from .context import Context as Context
    from .costs.advise import advise as advise
    from .costs.predict import predict as predict
    from .drawing import draw as draw
    from .engines.method import Report as Report
    from .engines.method import Verdict as Verdict
    from .epilogue import Epilogue as Epilogue
    from .epilogue import Scales as Scales
    from .errors import ArgumentError as ArgumentError
    from .errors import ArgumentTypeError as ArgumentTypeError
    from .errors import ClosedError as ClosedError
    from .errors import FactorizationError as FactorizationError
    from .errors import LayoutError as LayoutError
    from .errors import LibraryNotFoundError as LibraryNotFoundError
    from .errors import PblasmpError as PblasmpError
    from .errors import RankMismatchError as RankMismatchError
    from .errors import StatusError as StatusError
    from .errors import UnsupportedError as UnsupportedError
    from .layout import FactorProblem as FactorProblem
    from .layout import Grid as Grid
    from .layout import Level3Problem as Level3Problem
    from .layout import MatmulProblem as MatmulProblem
    from .layout import MatrixDescriptor as MatrixDescriptor
    from .layout import ParallelProblem as ParallelProblem
    from .layout import numroc as numroc
    from .linalg.checks import verify as verify
    from .matrix.distributed import DistributedMatrix as DistributedMatrix
    from .matrix.products import matmul as matmul
    from .matrix.reductions import allclose as allclose
    from .matrix.verification import Verification as Verification
    from .planning import algorithms as algorithms
    from .planning import plan as plan
    from .planning import tune as tune
    from .problems.files import load_problem as load_problem
    from .runtime.plans import Plan as Plan
    from .tensor_parallel import allgather_matmul as allgather_matmul
    from .tensor_parallel import matmul_allgather as matmul_allgather
    from .tensor_parallel import matmul_allreduce as matmul_allreduce
    from .tensor_parallel import matmul_reduce_scatter as matmul_reduce_scatter

__version__ = "0.1.0"

_NAMES = {
    "context": "Context",
    "costs.advise": "advise",
    "costs.predict": "predict",
    "drawing": "draw",
    "engines.method": "Report Verdict",
    "epilogue": "Epilogue Scales",
    "errors": (
        "ArgumentError ArgumentTypeError ClosedError FactorizationError LayoutError LibraryNotFoundError "
        "PblasmpError RankMismatchError StatusError UnsupportedError"
    ),
    "layout": "FactorProblem Grid Level3Problem MatmulProblem MatrixDescriptor ParallelProblem numroc",
    "linalg.checks": "verify",
    "matrix.distributed": "DistributedMatrix",
    "matrix.products": "matmul",
    "matrix.reductions": "allclose",
    "matrix.verification": "Verification",
    "planning": "algorithms plan tune",
    "problems.files": "load_problem",
    "runtime.plans": "Plan",
    "tensor_parallel": "allgather_matmul matmul_allgather matmul_allreduce matmul_reduce_scatter",
}
"""The public names, by the module that has them."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

_MODULES = {"blas", "layout", "linalg", "pblas", "tensor_parallel", "testing", "torch"}
"""For users; pblasmp.torch needs PyTorch."""

_BLAS = (
    "amax asum axpy copy dot dotc geadd gemv ger gerc hemm hemv her her2 her2k herk herkx nrm2 scal swap symm symv syr "
    "syr2 syr2k syrk syrkx tradd trmm trmv trsm trsv"
)
_LINALG = "QrFactors cho_solve cholesky cond_estimate eigh inv lstsq lu_solve qr slogdet solve"
_FORMER = {
    **{name: f"blas.{name}" for name in _BLAS.split()},
    **{name: f"linalg.{name}" for name in _LINALG.split()},
    "lu": "linalg.lu_factor",
    "FactorisationError": "FactorizationError",
}
"""Names of the last release and what they are called now: they warn, and go in the next release."""

_OF_VALUES = {
    "draw": "drawing",
    "made_from": "problems.tables",
    "to_toml": "problems.files",
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
    if name in _FORMER:
        return _former(name)
    return _submodule(__name__, name)


def _former(name: str) -> object:
    """Return what a name of the last release stands for, with a warning. Local."""
    import warnings

    successor = _FORMER[name]
    module, _, last = successor.rpartition(".")
    home = importlib.import_module(f".{module or _HOME[last]}", __name__)
    value: object = getattr(home, last)
    how = ""
    if module == "linalg":
        changed = importlib.import_module(".linalg.former", __name__).FORMER.get(name)
        if changed is not None:
            value, how = changed, ", whose arguments are NumPy's and SciPy's"
    warnings.warn(
        f"pblasmp.{name} is now pblasmp.{successor}{how}; the old name goes in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | set(_HOME) | _MODULES)
