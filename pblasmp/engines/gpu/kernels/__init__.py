# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes on its own: CUDA kernels, cuBLASLt, 8-bit floats, views of memory."""
