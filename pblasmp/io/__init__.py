# SPDX-License-Identifier: Apache-2.0
"""Matrices in files: .npy, HDF5 and Zarr, read and written by all ranks in contiguous tiles."""

from .files import load, save
from .source import Progress

__all__ = ["Progress", "load", "save"]
