# SPDX-License-Identifier: Apache-2.0
"""The enumerations of cuBLASMp and cuSOLVERMp, and those of cuBLAS and CUDA that their functions take.

A member is the C constant without its prefix; those that nothing here uses are left out. Where an enumeration grew, a
member's ``since`` is the first cuBLASMp version that has it.

Source: cublasmp.h 0.5.0 to 0.10.0; cusolverMp.h 0.8.0 to 0.9.1; cusolver_common.h, cublas_api.h and library_types.h of
CUDA 13.0.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class _VersionedEnum(IntEnum):
    """An enumeration that grew: ``NAME = value`` or ``NAME = value, since``."""

    _value_: int
    since: int

    def __new__(cls, value: int, since: int = 500) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.since = since
        return member


class Status(IntEnum):
    """cublasMpStatus_t: what a function returns."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    ALLOCATION_FAILED = 2
    INVALID_VALUE = 3
    ARCHITECTURE_MISMATCH = 4
    EXECUTION_FAILED = 5
    INTERNAL_ERROR = 6
    NOT_SUPPORTED = 7


class SolverStatus(IntEnum):
    """cusolverStatus_t: what a function of cuSOLVERMp returns."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    ALLOC_FAILED = 2
    INVALID_VALUE = 3
    ARCH_MISMATCH = 4
    MAPPING_ERROR = 5
    EXECUTION_FAILED = 6
    INTERNAL_ERROR = 7
    MATRIX_TYPE_NOT_SUPPORTED = 8
    NOT_SUPPORTED = 9
    ZERO_PIVOT = 10
    INVALID_LICENSE = 11


class EigMode(IntEnum):
    """cusolverEigMode_t: whether vectors are computed."""

    NOVECTOR = 0
    VECTOR = 1


class GridMapping(IntEnum):
    """cusolverMpGridMapping_t: how ranks fill a process grid."""

    COL_MAJOR = 0
    ROW_MAJOR = 1


class GridLayout(IntEnum):
    """cublasMpGridLayout_t: how ranks fill a process grid."""

    COL_MAJOR = 0
    ROW_MAJOR = 1


class MatmulAttribute(IntEnum):
    """cublasMpMatmulDescriptorAttribute_t: the attributes of a matmul descriptor.

    ``NAME = value, c_type`` or ``NAME = value, c_type, since``; ``c_type`` is the C type of its value.
    """

    _value_: int
    c_type: str
    since: int

    def __new__(cls, value: int, c_type: str, since: int = 500) -> Self:  # noqa: D102
        member = int.__new__(cls, value)
        member._value_ = value
        member.c_type = c_type
        member.since = since
        return member

    TRANSA = 0, "cublasOperation_t"
    TRANSB = 1, "cublasOperation_t"
    ALGO_TYPE = 3, "cublasMpMatmulAlgoType_t"
    COMMUNICATION_SM_COUNT = 4, "int32_t"
    EPILOGUE = 5, "cublasMpMatmulEpilogue_t"
    BIAS_POINTER = 6, "void*"
    BIAS_DATA_TYPE = 8, "cudaDataType_t"
    EPILOGUE_AUX_POINTER = 9, "void*"
    EPILOGUE_AUX_LD = 10, "int64_t"
    EPILOGUE_AUX_DATA_TYPE = 12, "cudaDataType_t"
    A_SCALE_POINTER = 16, "const void*"
    A_SCALE_MODE = 17, "cublasMpMatmulMatrixScale_t"
    B_SCALE_POINTER = 18, "const void*"
    B_SCALE_MODE = 19, "cublasMpMatmulMatrixScale_t"
    D_SCALE_POINTER = 22, "const void*"
    AMAX_D_POINTER = 24, "void*"
    COMMUNICATION_TYPE = 27, "cudaDataType_t", 800
    BIAS_RESULT_SCHEME = 28, "cublasMpResultScheme_t", 800


class MatmulAlgoType(_VersionedEnum):
    """cublasMpMatmulAlgoType_t: how communication and products overlap; a hint."""

    DEFAULT = 0
    SPLIT_P2P = 1
    SPLIT_MULTICAST = 2
    ATOMIC_P2P = 3
    ATOMIC_MULTICAST = 4
    NO_OVERLAP = 5, 700
    FUSED = 6, 1000


class MatmulEpilogue(IntEnum):
    """cublasMpMatmulEpilogue_t; its bits are 128 AUX, 4 BIAS and 16 BGRAD."""

    DEFAULT = 0
    ALLREDUCE = 1
    RELU = 2
    RELU_AUX = 2 | 128
    BIAS = 4
    RELU_BIAS = 2 | 4
    RELU_AUX_BIAS = 2 | 128 | 4
    DRELU = 8 | 128
    DRELU_BGRAD = 8 | 128 | 16
    GELU = 32
    GELU_AUX = 32 | 128
    GELU_BIAS = 32 | 4
    GELU_AUX_BIAS = 32 | 128 | 4
    DGELU = 64 | 128
    DGELU_BGRAD = 64 | 128 | 16
    BGRADA = 256
    BGRADB = 512


class MatrixScale(_VersionedEnum):
    """cublasMpMatmulMatrixScale_t: what a scale pointer points to."""

    SCALAR_FP32 = 0
    VEC32_UE8M0 = 2, 600


class ResultScheme(_VersionedEnum):
    """cublasMpResultScheme_t: whether bias gradients are left partial or summed over the ranks."""

    DEFAULT = 0, 800
    FULL = 2, 800


class Operation(IntEnum):
    """cublasOperation_t."""

    N = 0
    T = 1
    C = 2


class FillMode(IntEnum):
    """cublasFillMode_t."""

    LOWER = 0
    UPPER = 1
    FULL = 2


class DiagType(IntEnum):
    """cublasDiagType_t."""

    NON_UNIT = 0
    UNIT = 1


class SideMode(IntEnum):
    """cublasSideMode_t."""

    LEFT = 0
    RIGHT = 1


class ComputeType(IntEnum):
    """cublasComputeType_t: the type in which products are summed."""

    COMPUTE_32F = 68
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F = 70
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79


class DataType(IntEnum):
    """cudaDataType_t: R is real, C is complex."""

    R_16F = 2
    R_16BF = 14
    R_32F = 0
    C_32F = 4
    R_64F = 1
    C_64F = 5
    R_8F_E4M3 = 28
    R_8F_E5M2 = 29


C_ENUMS: dict[str, tuple[type[IntEnum], str]] = {
    "cublasMpStatus_t": (Status, "CUBLASMP_STATUS_"),
    "cusolverStatus_t": (SolverStatus, "CUSOLVER_STATUS_"),
    "cusolverEigMode_t": (EigMode, "CUSOLVER_EIG_MODE_"),
    "cusolverMpGridMapping_t": (GridMapping, "CUSOLVERMP_GRID_MAPPING_"),
    "cublasMpGridLayout_t": (GridLayout, "CUBLASMP_GRID_LAYOUT_"),
    "cublasMpMatmulDescriptorAttribute_t": (MatmulAttribute, "CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_"),
    "cublasMpMatmulAlgoType_t": (MatmulAlgoType, "CUBLASMP_MATMUL_ALGO_TYPE_"),
    "cublasMpMatmulEpilogue_t": (MatmulEpilogue, "CUBLASMP_MATMUL_EPILOGUE_"),
    "cublasMpMatmulMatrixScale_t": (MatrixScale, "CUBLASMP_MATMUL_MATRIX_SCALE_"),
    "cublasMpResultScheme_t": (ResultScheme, "CUBLASMP_RESULT_SCHEME_"),
    "cublasOperation_t": (Operation, "CUBLAS_OP_"),
    "cublasFillMode_t": (FillMode, "CUBLAS_FILL_MODE_"),
    "cublasDiagType_t": (DiagType, "CUBLAS_DIAG_"),
    "cublasSideMode_t": (SideMode, "CUBLAS_SIDE_"),
    "cublasComputeType_t": (ComputeType, "CUBLAS_"),
    "cudaDataType_t": (DataType, "CUDA_"),
}
"""Each C enumeration: the class that carries it and the prefix its constants have in C."""
