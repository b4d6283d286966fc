# SPDX-License-Identifier: Apache-2.0
"""The algorithm "push": every GPU writes what others need straight into their memory."""
