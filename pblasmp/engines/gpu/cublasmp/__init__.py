# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp's own routines as algorithms."""
