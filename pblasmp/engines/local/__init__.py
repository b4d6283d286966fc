# SPDX-License-Identifier: Apache-2.0
"""What a rank computes on its own: parts of products, triangles, epilogues."""
