# SPDX-License-Identifier: Apache-2.0
"""Products and level-3 routines that every engine can run, one algorithm a file."""
