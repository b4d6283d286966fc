# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products on GPUs from local GEMMs and copies that overlap them."""
