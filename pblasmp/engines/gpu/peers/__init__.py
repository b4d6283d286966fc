# SPDX-License-Identifier: Apache-2.0
"""Memory of other ranks: windows over NVLink, and messages through them."""
