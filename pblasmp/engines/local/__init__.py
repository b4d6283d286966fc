# SPDX-License-Identifier: Apache-2.0
"""What algorithms are built of: how operands reach a rank, and what it computes on its own."""
