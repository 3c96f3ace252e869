"""Draws what the study found.

    python -m experiments.imbalance.plot experiments/imbalance/results.json results.png

Left, accuracy of the rare class against that of all records; hollow, that of a plain run at equal
overall accuracy. Right, accuracy of each class of the whole data against epsilon.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

_COLOURS = ("#5d6875", "#0b5c8a", "#b4540a", "#6b3fa0", "#2e7d32")
_MARKERS = ("o", "s", "D", "^", "v", "P")


def draw(content: dict[str, Any]) -> Figure:
  """The figure of a result of `experiments.imbalance.study`."""
  figure = Figure(figsize=(10, 4.4), layout="constrained")
  left, right = figure.subplots(1, 2)
  _rare(left, content)
  _classes(right, content["difficulty"])
  for axes in (left, right):
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
  return figure


def _rare(axes: Axes, content: dict[str, Any]) -> None:
  points, label = content["points"], content["label"]
  shares = sorted({p["share"] for p in points})
  for i, epsilon in enumerate(dict.fromkeys(p["epsilon"] for p in points)):
    colour = _COLOURS[i % len(_COLOURS)]
    for share in shares:
      own = [p for p in points if (p["share"], p["epsilon"]) == (share, epsilon)]
      at = float(np.mean([p["overall"] for p in own]))
      place = [at, float(np.mean([p["classes"][label] for p in own]))]
      marker = _MARKERS[shares.index(share) % len(_MARKERS)]
      axes.plot(*place, marker, color=colour, markersize=7)
      matched = [p["matched"][1] for p in own if p["matched"] is not None]
      if matched:
        same = float(np.mean(matched))
        axes.plot([at, at], [place[1], same], color=colour, linewidth=1, alpha=0.5)
        axes.plot(at, same, marker, color=colour, markersize=7, markerfacecolor="white")
    axes.plot([], [], "-", color=colour, linewidth=3, label=_name(epsilon))
  for share, marker in zip(shares, _MARKERS, strict=False):
    axes.plot([], [], marker, color="#333333", label=f"{100 * share:g}% kept")
  axes.plot([], [], "o", color="#333333", markerfacecolor="white", label="plain, same accuracy")
  axes.legend(frameon=False, fontsize=8, loc="upper left")
  axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  axes.set_xlabel("accuracy on all records")
  axes.set_ylabel(f"accuracy on class {label}")


def _classes(axes: Axes, difficulty: dict[str, Any]) -> None:
  names = [*sorted((n for n in difficulty if n != "none"), key=float), "none"]
  values = np.array([difficulty[name]["accuracy"] for name in names])
  heights = _apart(values[-1], np.ptp(values) / 30)
  for k, own in enumerate(values.T):
    axes.plot(range(len(names)), own, "o-", markersize=4, linewidth=1.2, color=f"C{k % 10}")
    axes.annotate(
      f"class {k}", (len(names) - 1, heights[k]), xytext=(8, 0), textcoords="offset points",
      va="center", fontsize=8, color=f"C{k % 10}", annotation_clip=False,
    )  # fmt: skip
  axes.set_xticks(range(len(names)), [_name(None if n == "none" else float(n)) for n in names])
  axes.set_ylabel("accuracy of each class, whole data")


def _apart(values: np.ndarray, least: float) -> np.ndarray:
  """Heights of labels, near their values and at least so far from each other."""
  heights = np.array(values, float)
  order = np.argsort(heights)
  for lower, upper in itertools.pairwise(order):
    heights[upper] = max(heights[upper], heights[lower] + least)
  return heights


def _name(epsilon: float | None) -> str:
  return "no privacy" if epsilon is None else f"epsilon {epsilon:g}"


if __name__ == "__main__":
  source, target = sys.argv[1:]
  draw(json.loads(Path(source).read_text())).savefig(target, dpi=110)
