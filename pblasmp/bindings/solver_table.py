# SPDX-License-Identifier: Apache-2.0
"""The C functions of cuSOLVERMp 0.8 to 0.9 that are used: one row each, with its prototype.

Versions are numbers as for cuBLASMp: 901 is 0.9.1. From 0.8.0 to 0.9.1 their types have not changed.
Indices (ia, ja, ...) are 1-based.

Source: cusolverMp.h of the nvidia-cusolvermp wheels 0.8.0 to 0.9.1, which the tests hold this table against.
"""

from __future__ import annotations

from .table import Function, parameters

OLDEST_SOLVER = 800
"""The oldest supported version: earlier ones cannot change the stream, and those before 0.7 have no NCCL."""


def _function(name: str, prototype: str, since: int = OLDEST_SOLVER) -> Function:
    return Function("cusolverMp" + name, "cusolverStatus_t", parameters(prototype), since)


def _matrix(name: str, *, const: bool = False) -> str:
    """Return the four parameters of a matrix."""
    of = name.lower()
    return (
        f"{'const ' if const else ''}void* {of}, int64_t i{of}, int64_t j{of},"
        f" cusolverMpMatrixDescriptor_t desc{name}"
    )


def _routine(
    name: str, *shared: str, after: str = "", since: int = OLDEST_SOLVER
) -> tuple[Function, Function]:
    """Return a routine on matrices and the query of its workspace.

    Args:
        name: of the routine.
        shared: what both take between the handle and the compute type.
        after: what the routine takes besides, before the compute type.
        since: the first version that has it.
    """
    both = ", ".join(("cusolverMpHandle_t handle", *shared))
    compute = "cudaDataType_t computeType"
    sizes = "size_t* workspaceInBytesOnDevice, size_t* workspaceInBytesOnHost"
    buffers = "void* d_work, size_t workspaceInBytesOnDevice, void* h_work, size_t workspaceInBytesOnHost"
    made = both if not after else f"{both}, {after}"
    return (
        _function(f"{name}_bufferSize", f"{both}, {compute}, {sizes}", since),
        _function(name, f"{made}, {compute}, {buffers}, int* info", since),
    )


_HANDLE = "cusolverMpHandle_t handle, "
_UPLO, _TRANS = "cublasFillMode_t uplo", "cublasOperation_t trans"
_M, _N, _NRHS = "int64_t m", "int64_t n", "int64_t nrhs"

_ROWS = (
    # Library
    _function("Create", "cusolverMpHandle_t* handle, int deviceId, cudaStream_t stream"),
    _function("Destroy", "cusolverMpHandle_t handle"),
    _function("SetStream", _HANDLE + "cudaStream_t stream"),
    _function("GetVersion", _HANDLE + "int* version"),
    # Grids and descriptors
    _function(
        "CreateDeviceGrid",
        _HANDLE + "cusolverMpGrid_t* grid, ncclComm_t comm, int32_t numRowDevices, int32_t numColDevices,"
        " cusolverMpGridMapping_t mapping",
    ),
    _function("DestroyGrid", "cusolverMpGrid_t grid"),
    _function(
        "CreateMatrixDesc",
        "cusolverMpMatrixDescriptor_t* desc, cusolverMpGrid_t grid, cudaDataType_t dataType, int64_t M_A,"
        " int64_t N_A, int64_t MB_A, int64_t NB_A, uint32_t RSRC_A, uint32_t CSRC_A, int64_t LLD_A",
    ),
    _function("DestroyMatrixDesc", "cusolverMpMatrixDescriptor_t desc"),
    # Factorizations, and what is solved with them
    *_routine("Potrf", _UPLO, _N, _matrix("A")),
    *_routine("Potrs", _UPLO, _N, _NRHS, _matrix("A", const=True), _matrix("B")),
    *_routine("Getrf", _M, _N, _matrix("A"), "int64_t* ipiv"),
    *_routine("Getrs", _TRANS, _N, _NRHS, _matrix("A", const=True), "const int64_t* ipiv", _matrix("B")),
    *_routine("Geqrf", _M, _N, _matrix("A"), after="void* tau"),
    *_routine("Syevd", "char* jobz", _UPLO, _N, _matrix("A"), "void* w", _matrix("Q")),
    *_routine(
        "Gesvd", "cusolverMpGesvdDescriptor_t how", "cusolverEigMode_t jobu", "cusolverEigMode_t jobvt", _M, _N,
        _matrix("A"), "void* s", _matrix("U"), _matrix("VT"), since=900,
    ),
)  # fmt: skip

SOLVER_FUNCTIONS: dict[str, Function] = {function.name: function for function in _ROWS}
"""The functions by name."""
