# SPDX-License-Identifier: Apache-2.0
"""Times of algorithms on this machine: taking and keeping them."""
