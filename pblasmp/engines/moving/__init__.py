# SPDX-License-Identifier: Apache-2.0
"""Moving parts of matrices between ranks."""
