# SPDX-License-Identifier: Apache-2.0
"""Matrices in files: .npy, HDF5 and Zarr, read and written by all ranks in contiguous tiles."""

from .formats import Progress
from .saving import OpenFile, load, save

__all__ = ["OpenFile", "Progress", "load", "save"]
