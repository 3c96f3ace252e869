"""Plots are self-contained, reproducible SVG elements that carry their text."""

import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from dp_jax.report import plots
from dp_jax.report.plots import Interval

ODD = "a $b$ <c> & \u6570\u5b57"
HALF = Interval(0.5, 0.4, 0.6)

DRAWINGS = {
  "accuracy": lambda: plots.accuracy_plot([(ODD, HALF), ("plain", Interval(1.0, 0.98, 1.0))]),
  "epsilon": lambda: plots.epsilon_plot([(0, 0.0), (10, 0.3), (20, 0.5)], 0.5),
  "epsilon-of-zero": lambda: plots.epsilon_plot([(0, 0.0), (1, 0.0)], 0.5),
  "progress": lambda: plots.progress_plot(
    {ODD: [(0, 0.1), (5, 0.6)], "plain": [(0, 0.2), (5, 0.9)]}
  ),
  "classes": lambda: plots.class_plot([ODD, "b"], {"x": [HALF, None], ODD: [HALF, HALF]}),
  "one-class": lambda: plots.class_plot(["a"], {"x": [HALF]}),
  "calibration": lambda: plots.calibration_plot({ODD: [(0.3, 0.2, 5), (0.9, 0.8, 50)]}),
  "attacker": lambda: plots.attacker_plot([(0.0, 0.0), (0.5, 0.6), (1.0, 1.0)]),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing(name):
  before = dict(matplotlib.rcParams)
  svg = DRAWINGS[name]()
  assert DRAWINGS[name]() == svg
  assert dict(matplotlib.rcParams) == before
  root = ElementTree.fromstring(svg)
  assert root.tag == "svg" and root.attrib["role"] == "img"
  assert "width" not in root.attrib
  for word in ("http", "<metadata", "<!--", "DejaVu", "#0a0a", "#010101", "<image"):
    assert word not in svg
  title = root.find("title")
  description = root.find("desc")
  assert title is not None and title.text
  assert description is not None and description.text
  assert "var(--" in svg


def test_names_are_drawn_as_they_are():
  texts = [e.text for e in ElementTree.fromstring(DRAWINGS["accuracy"]()).iter("text")]
  assert ODD in texts
