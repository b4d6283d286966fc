# SPDX-License-Identifier: Apache-2.0
"""Charts of times are SVG with every case, contender and ratio."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from benchmarks.charts import Bars, bar_chart

SPACE = "{http://www.w3.org/2000/svg}"
BARS = [
    Bars("First & best", [("a", {"theirs": 2.0, "x": 1.0, "y": 3.0}), ("b", {"x": 1.0})]),
    Bars("Second", [("c", {"theirs": 4.0, "y": 4.0})]),
    Bars("Left out", [("d", {"x": 1.0})]),
]


def texts(drawing):
    return [each.text for each in ET.fromstring(drawing.svg).iter(f"{SPACE}text")]


def test_bars_are_as_long_as_their_ratios():
    chart = bar_chart(BARS, reference="theirs", order=("y",))
    assert texts(chart) == [
        "First & best: time / theirs (less is better)", "y", "x", "a", "1.50", "0.50",
        "Second: time / theirs (less is better)", "y", "c", "1.00",
    ]  # fmt: skip
    root = ET.fromstring(chart.svg)
    bars = [
        (each.get("fill"), float(each.get("width")))
        for each in root.iter(f"{SPACE}rect")
        if each.get("x") == "190.0"
    ]
    (color_y, y), (color_x, x), (color_same, one) = bars
    assert y == pytest.approx(3 * x, abs=0.2)
    assert color_x != color_y == color_same  # a contender has one color in every chart
    assert one == pytest.approx(y, abs=0.2)  # each chart has its own scale


def test_without_the_reference_there_is_no_chart():
    assert bar_chart(BARS[2:], reference="theirs") is None
