# SPDX-License-Identifier: Apache-2.0
"""Powers of complex numbers are products, as NumPy's are: CuPy would take logarithms (arithmetic.py)."""

import numpy as np
import pytest

from pblasmp.matrix.arithmetic import _is_whole, _whole_power


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 8, -1, -2])
def test_powers_of_whole_numbers_are_exact(exponent):
    x = np.array([3, -2, 1j, 1 + 2j, 0.5 - 1j])
    expected = np.ones_like(x)
    for _ in range(abs(exponent)):
        expected = expected * x
    expected = 1 / expected if exponent < 0 else expected
    np.testing.assert_array_equal(_whole_power(np, x, np.complex128(exponent)), expected)
    out = x.copy()
    assert _whole_power(np, out, np.complex128(exponent), out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_which_exponents():
    assert all(_is_whole(np.complex128(n)) for n in (0, -3, 99))
    assert not any(_is_whole(np.complex128(n)) for n in (0.5, 1j, 2 + 1j, 100, np.inf, np.nan))
