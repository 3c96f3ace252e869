"""The plots of a sweep: a figure against epsilon, for the page and as image files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.report import figure as fig
from dp_jax.statement import formatting

# Label to (epsilon, figure) by increasing epsilon; epsilon None is without privacy.
Lines = Mapping[str, Sequence[tuple[float | None, Interval]]]

_FILE_COLOURS = ("#0b5c8a", "#b4540a", "#6b3fa0", "#2e7d32", "#a3195b", "#5d6875")
_PAGE_COLOURS = (fig.SERIES[0], *fig.SERIES[2:], fig.SERIES[1])


def inline_plot(lines: Lines, name: str, title: str, unit: str) -> str:
  """One figure against epsilon, as an SVG element for the page.

  Args:
    lines: what to draw.
    name: of the plot, unique on the page.
    title: of the plot.
    unit: what the vertical axis shows, fractions as percentages.
  """
  with fig.axes(4.7, 3.1) as (figure, axes):
    _draw(axes, lines, unit, _PAGE_COLOURS)
    text = "; ".join(f"{label} {_told(points)}" for label, points in lines.items())
    return fig.to_svg(figure, name, title, f"{title}: {text}.")


def image(panels: Mapping[str, Lines], file_format: str) -> bytes:
  """One panel for each figure, side by side, as the content of an image file.

  Args:
    panels: what the vertical axis shows, to its lines.
    file_format: "svg" or "png".
  """
  figure = Figure(figsize=(4.7 * len(panels), 3.3), layout="constrained")
  for axes, (unit, lines) in zip(
    figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
  ):
    _draw(axes, lines, unit, _FILE_COLOURS)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
  metadata = {"Date": None} if file_format == "svg" else None
  buffer = io.BytesIO()
  with matplotlib.rc_context({"svg.hashsalt": "sweep"}):
    figure.savefig(buffer, format=file_format, dpi=150, metadata=metadata)
  return buffer.getvalue()


def _draw(axes: Axes, lines: Lines, unit: str, colours: Sequence[str]) -> None:
  axes.set_xscale("log", base=2)
  ticks = sorted({e for points in lines.values() for e, _ in points if e is not None})
  for i, (label, points) in enumerate(lines.items()):
    colour, marker = colours[i % len(colours)], fig.MARKERS[i % len(fig.MARKERS)]
    private = [(epsilon, value) for epsilon, value in points if epsilon is not None]
    axes.plot(
      [e for e, _ in private], [v.value for _, v in private],
      color=colour, marker=marker, markersize=5, linewidth=1.4, label=label,
    )  # fmt: skip
    for epsilon, value in private:
      if np.isfinite(value.low):
        axes.plot([epsilon] * 2, [value.low, value.high], color=colour, linewidth=1.6, alpha=0.55)
    for value in (v for e, v in points if e is None):
      axes.axhline(value.value, color=colour, linewidth=1, linestyle=(0, (4, 3)))
      if np.isfinite(value.low):
        axes.axhspan(value.low, value.high, color=colour, alpha=0.12, linewidth=0)
  axes.xaxis.set_major_locator(FixedLocator(ticks))
  axes.xaxis.set_minor_locator(NullLocator())
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: formatting.short(x)))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
  axes.set_xlabel("epsilon (dashed: without privacy)")
  axes.set_ylabel(unit)
  if len(lines) > 1:
    axes.legend(loc="best", frameon=False)


def _told(points: Sequence[tuple[float | None, Interval]]) -> str:
  return ", ".join(
    f"{formatting.percent(value.value)} "
    + ("without privacy" if epsilon is None else f"at epsilon {formatting.short(epsilon)}")
    for epsilon, value in points
  )
