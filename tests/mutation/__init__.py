# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: small faults put into a copy of the package; a test should notice each."""
