# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products that every engine can run."""
