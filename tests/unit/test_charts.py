# SPDX-License-Identifier: Apache-2.0
"""Charts of times are SVG with every case, contender and ratio."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from pblasmp.drawing.charts import Bars, Lines, bar_chart, line_chart

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


def test_lines_are_drawn_on_logarithmic_axes():
    points = [(4096, {"x": 100.0}), (1024, {"x": 1.0, "y": 10.0}), (2048, {"x": 10.0, "y": 20.0})]
    chart = line_chart([Lines("Sweep", points)])
    root = ET.fromstring(chart.svg)
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SPACE}circle")]
    x, y = circles[:3], circles[3:]
    assert len(y) == 2
    assert x[0][0] < x[1][0] < x[2][0]  # by size, whatever the order of the points
    assert x[1][0] - x[0][0] == pytest.approx(x[2][0] - x[1][0], abs=0.2)
    assert x[0][1] - x[1][1] == pytest.approx(x[1][1] - x[2][1], abs=0.2)
    assert x[1][1] > y[1][1]  # 20 is above 10
    assert {"1 KiB", "2 KiB", "4 KiB", "Sweep: µs (less is better)", "1", "10", "100"} <= set(texts(chart))


def test_one_size_and_no_times():
    assert re.search(r'cx="395.0"', line_chart([Lines("One", [(8, {"x": 1.0})])]).svg)
    assert "circle" not in line_chart([Lines("None", [(8, {})])]).svg
