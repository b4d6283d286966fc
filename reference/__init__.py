# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks compare pblasmp with: the real ScaLAPACK, and PyTorch or nvmath-python on GPUs."""
