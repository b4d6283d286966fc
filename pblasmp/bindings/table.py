# SPDX-License-Identifier: Apache-2.0
"""The C functions of cuBLASMp 0.5 to 0.10 and cuSOLVERMp 0.8 to 0.9 that are used: one row each, with its prototype.

Versions are numbers as ``cublasMpGetVersion`` gives them: 501 is 0.5.1, 1000 is 0.10.0. A function is called
what the newest version calls it; its older name is its ``alias``. Indices (ia, ja, ...) are 1-based.

Source: cublasmp.h of the nvidia-cublasmp wheels 0.5.0 to 0.10.0, and cusolverMp.h of the nvidia-cusolvermp wheels 0.8.0
to 0.9.1, whose types have not changed. The tests hold these tables against both.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..layout.routines import ROUTINES
from .enums import C_ENUMS

OLDEST = 500
"""The oldest supported version; earlier ones take a CAL communicator instead of NCCL's."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a C function: its C type, as the header spells it, and its name."""

    type: str
    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """One C function.

    Attributes:
        name: The name in the newest version.
        returns: The C type it returns.
        arguments: In the order of C.
        since: The first version that has it.
        alias: What versions before ``renamed`` call it; None if it never had another name.
        renamed: The first version that calls it ``name``.
    """

    name: str
    returns: str
    arguments: tuple[Argument, ...]
    since: int = OLDEST
    alias: str | None = None
    renamed: int = OLDEST

    def symbol(self, version: int) -> str | None:
        """Return the name that ``version`` of the library exports, None if it does not have the function. Local."""
        if version < self.since:
            return None
        return self.alias if self.alias is not None and version < self.renamed else self.name


_INTEGERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    **dict.fromkeys(C_ENUMS, ctypes.c_int),
}
_HANDLES = {
    "cublasMpGrid_t",
    "cublasMpHandle_t",
    "cublasMpLoggerCallback_t",
    "cublasMpMatmulDescriptor_t",
    "cublasMpMatrixDescriptor_t",
    "cudaStream_t",
    "cusolverMpGesvdDescriptor_t",
    "cusolverMpGrid_t",
    "cusolverMpHandle_t",
    "cusolverMpMatrixDescriptor_t",
    "ncclComm_t",
}

LoggerCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
"""cublasMpLoggerCallback_t: takes the log level, the function's name and the message."""


def ctype(name: str) -> Any:
    """Return the ctypes class that carries the C type ``name``; pointers and handles are addresses. Local."""
    if name == "const char*":
        return ctypes.c_char_p
    if name.endswith("*") or name in _HANDLES:
        return ctypes.c_void_p
    return _INTEGERS[name]


_TYPES = {
    "handle": "cublasMpHandle_t",
    "matmulDesc": "cublasMpMatmulDescriptor_t",
    "side": "cublasSideMode_t",
    "uplo": "cublasFillMode_t",
    "trans": "cublasOperation_t",
    "transA": "cublasOperation_t",
    "transB": "cublasOperation_t",
    "diag": "cublasDiagType_t",
    "m": "int64_t",
    "n": "int64_t",
    "k": "int64_t",
    "alpha": "const void*",
    "beta": "const void*",
    "computeType": "cublasComputeType_t",
    "global_comm": "ncclComm_t",
}
"""The type of each argument that the routines on matrices share."""


_SIZES = "size_t* workspaceSizeInBytesOnDevice, size_t* workspaceSizeInBytesOnHost"
_BUFFERS = (
    "void* d_work, size_t workspaceSizeInBytesOnDevice, void* h_work, size_t workspaceSizeInBytesOnHost"
)


def parameters(prototype: str) -> tuple[Argument, ...]:
    """Return the arguments written in C: ``type name, type name``. Local."""
    pairs = (text.strip().rpartition(" ") for text in prototype.split(",") if text.strip())
    return tuple(Argument(type_, name) for type_, _, name in pairs)


def _function(
    name: str,
    prototype: str,
    since: int = OLDEST,
    *,
    returns: str = "cublasMpStatus_t",
    alias: str | None = None,
    renamed: int = OLDEST,
) -> Function:
    return Function("cublasMp" + name, returns, parameters(prototype), since, alias, renamed)


def _shared(token: str) -> str:
    """Return the C parameters that a token of a routine's shape means."""
    if token == "workspace":
        return token
    if token in _TYPES:
        return f"{_TYPES[token]} {token}"
    letter, data = token[0].lower(), "void*" if token.endswith("!") else "const void*"
    indices = f"int64_t i{letter}, int64_t j{letter}"
    return f"{data} {letter}, {indices}, cublasMpMatrixDescriptor_t desc{token[0]}"


def _routine(name: str, shape: str, since: int = OLDEST) -> tuple[Function, Function]:
    """Return a routine on matrices and the query of its workspace.

    ``shape`` names the arguments in order. ``A`` is a matrix that is read and ``A!`` one that is written,
    four arguments each. ``workspace`` is where the two functions differ: pointers to two sizes in the query,
    two buffers with their sizes in the routine.
    """
    prototype = ", ".join(_shared(token) for token in shape.split())
    return (
        _function(f"{name}_bufferSize", prototype.replace("workspace", _SIZES), since),
        _function(name, prototype.replace("workspace", _BUFFERS), since),
    )


_HANDLE = "cublasMpHandle_t handle, "
_MATRIX = (
    "int64_t m, int64_t n, int64_t mb, int64_t nb, int64_t rsrc, int64_t csrc, int64_t lld,"
    " cudaDataType_t type, cublasMpGrid_t grid, "
)
_ATTRIBUTE = "cublasMpMatmulDescriptor_t matmulDesc, cublasMpMatmulDescriptorAttribute_t attr, "

_ROWS = (
    # Library
    _function("Create", "cublasMpHandle_t* handle, cudaStream_t stream"),
    _function("Destroy", "cublasMpHandle_t handle"),
    _function("SetStream", _HANDLE + "cudaStream_t stream", alias="cublasMpStreamSet", renamed=800),
    _function("GetStream", _HANDLE + "cudaStream_t* stream", alias="cublasMpStreamGet", renamed=800),
    _function("GetVersion", "int* version"),
    _function("GetStatusString", "cublasMpStatus_t status", 800, returns="const char*"),
    # Grids and symmetric memory
    _function(
        "GridCreate",
        "int64_t nprow, int64_t npcol, cublasMpGridLayout_t layout, ncclComm_t comm, cublasMpGrid_t* grid",
    ),
    _function("GridDestroy", "cublasMpGrid_t grid"),
    _function("BufferRegister", "cublasMpGrid_t grid, void* ptr, size_t size", 800),
    _function("BufferDeregister", "cublasMpGrid_t grid, void* ptr", 800),
    _function("Malloc", "cublasMpGrid_t grid, void** ptr, size_t size", 800),
    _function("Free", "cublasMpGrid_t grid, void* ptr", 800),
    # Descriptors
    _function("MatrixDescriptorCreate", _MATRIX + "cublasMpMatrixDescriptor_t* desc"),
    _function("MatrixDescriptorDestroy", "cublasMpMatrixDescriptor_t desc"),
    _function(
        "MatmulDescriptorCreate", "cublasMpMatmulDescriptor_t* matmulDesc, cublasComputeType_t computeType"
    ),
    _function("MatmulDescriptorDestroy", "cublasMpMatmulDescriptor_t matmulDesc"),
    _function(
        "MatmulDescriptorSetAttribute",
        _ATTRIBUTE + "const void* buf, size_t sizeInBytes",
        alias="cublasMpMatmulDescriptorAttributeSet",
        renamed=800,
    ),
    _function(
        "MatmulDescriptorGetAttribute",
        _ATTRIBUTE + "void* buf, size_t sizeInBytes, size_t* sizeWritten",
        alias="cublasMpMatmulDescriptorAttributeGet",
        renamed=800,
    ),
    _function(
        "Numroc",
        "int64_t n, int64_t nb, uint32_t iproc, uint32_t isrcproc, uint32_t nprocs",
        returns="int64_t",
    ),
    # Products
    *_routine("Matmul", "handle matmulDesc m n k alpha A B beta C D! workspace"),
    *_routine("Gemm", "handle transA transB m n k alpha A B beta C! computeType workspace"),
    *(
        function
        for name, row in ROUTINES.items()
        for function in _routine(name.capitalize(), f"handle {row.cublasmp} workspace", row.since or OLDEST)
    ),
    # Redistribution
    *_routine("Gemr2D", "handle m n A B! workspace global_comm"),
    # Logging
    _function("LoggerSetCallback", "cublasMpLoggerCallback_t callback"),
    _function("LoggerOpenFile", "const char* logFile"),
    _function("LoggerSetLevel", "int level"),
    _function("LoggerSetMask", "int mask"),
    _function("LoggerForceDisable", ""),
)

FUNCTIONS: dict[str, Function] = {function.name: function for function in _ROWS}
"""The functions by their names in the newest version."""


# -- cuSOLVERMp

OLDEST_SOLVER = 800
"""The oldest supported version: earlier ones cannot change the stream, and those before 0.7 have no NCCL."""


def _solver(name: str, prototype: str, since: int = OLDEST_SOLVER) -> Function:
    return Function("cusolverMp" + name, "cusolverStatus_t", parameters(prototype), since)


def _placed(name: str, *, const: bool = False) -> str:
    """Return the four parameters of a matrix."""
    of = name.lower()
    return (
        f"{'const ' if const else ''}void* {of}, int64_t i{of}, int64_t j{of},"
        f" cusolverMpMatrixDescriptor_t desc{name}"
    )


def _solver_routine(
    name: str, *shared: str, after: str = "", since: int = OLDEST_SOLVER
) -> tuple[Function, Function]:
    """Return a routine on matrices and the query of its workspace, in the library since that version.

    ``shared`` is what both take between the handle and the compute type, ``after`` what the routine takes besides.
    """
    both = ", ".join(("cusolverMpHandle_t handle", *shared))
    compute = "cudaDataType_t computeType"
    sizes = "size_t* workspaceInBytesOnDevice, size_t* workspaceInBytesOnHost"
    buffers = "void* d_work, size_t workspaceInBytesOnDevice, void* h_work, size_t workspaceInBytesOnHost"
    made = both if not after else f"{both}, {after}"
    return (
        _solver(f"{name}_bufferSize", f"{both}, {compute}, {sizes}", since),
        _solver(name, f"{made}, {compute}, {buffers}, int* info", since),
    )


_HANDLE = "cusolverMpHandle_t handle, "
_UPLO, _TRANS = "cublasFillMode_t uplo", "cublasOperation_t trans"
_M, _N, _NRHS = "int64_t m", "int64_t n", "int64_t nrhs"

_SOLVER_ROWS = (
    # Library
    _solver("Create", "cusolverMpHandle_t* handle, int deviceId, cudaStream_t stream"),
    _solver("Destroy", "cusolverMpHandle_t handle"),
    _solver("SetStream", _HANDLE + "cudaStream_t stream"),
    _solver("GetVersion", _HANDLE + "int* version"),
    # Grids and descriptors
    _solver(
        "CreateDeviceGrid",
        _HANDLE + "cusolverMpGrid_t* grid, ncclComm_t comm, int32_t numRowDevices, int32_t numColDevices,"
        " cusolverMpGridMapping_t mapping",
    ),
    _solver("DestroyGrid", "cusolverMpGrid_t grid"),
    _solver(
        "CreateMatrixDesc",
        "cusolverMpMatrixDescriptor_t* desc, cusolverMpGrid_t grid, cudaDataType_t dataType, int64_t M_A,"
        " int64_t N_A, int64_t MB_A, int64_t NB_A, uint32_t RSRC_A, uint32_t CSRC_A, int64_t LLD_A",
    ),
    _solver("DestroyMatrixDesc", "cusolverMpMatrixDescriptor_t desc"),
    # Factorizations, and what is solved with them
    *_solver_routine("Potrf", _UPLO, _N, _placed("A")),
    *_solver_routine("Potrs", _UPLO, _N, _NRHS, _placed("A", const=True), _placed("B")),
    *_solver_routine("Getrf", _M, _N, _placed("A"), "int64_t* ipiv"),
    *_solver_routine("Getrs", _TRANS, _N, _NRHS, _placed("A", const=True), "const int64_t* ipiv", _placed("B")),
    *_solver_routine("Geqrf", _M, _N, _placed("A"), after="void* tau"),
    *_solver_routine("Syevd", "char* jobz", _UPLO, _N, _placed("A"), "void* w", _placed("Q")),
    *_solver_routine(
        "Gesvd", "cusolverMpGesvdDescriptor_t how", "cusolverEigMode_t jobu", "cusolverEigMode_t jobvt", _M, _N,
        _placed("A"), "void* s", _placed("U"), _placed("VT"), since=900,
    ),
)  # fmt: skip

SOLVER_FUNCTIONS: dict[str, Function] = {function.name: function for function in _SOLVER_ROWS}
"""The functions by name."""
