# SPDX-License-Identifier: Apache-2.0
"""The GPU of a rank: device, streams, graphs, communicators, health; memory of other ranks, and messages through it."""
