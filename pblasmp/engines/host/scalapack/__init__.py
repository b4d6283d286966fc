# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's own routines as an algorithm: a library that is there is found, loaded, and called."""
