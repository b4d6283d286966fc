# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp's own routines as algorithms."""
