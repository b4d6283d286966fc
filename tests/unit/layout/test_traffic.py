# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes in words."""

import pytest

from pblasmp.layout.value import bytes_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(512, "512 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (1 << 30, "1 GiB"), (3 << 50, "3072 TiB")],
)
def test_bytes(nbytes, text):
    assert bytes_text(nbytes) == text
