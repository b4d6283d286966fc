# SPDX-License-Identifier: Apache-2.0
"""Engines, which compute: one protocol, the host engine (MPI ranks and the CPU's BLAS) and cuBLASMp."""
