# SPDX-License-Identifier: Apache-2.0
"""Ranks that are kept from test to test: what ``pblasmp.testing`` does, without starting ranks for every call."""
