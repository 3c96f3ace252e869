"""One matplotlib figure as an inline SVG that follows the page's colours and fonts."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Colours that stand for a variable of the style sheet, so that one drawing serves light and dark.
INK = "#010101"
MUTED = "#020202"
LINE = "#030303"
SERIES = ("#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06")
MARKERS = ("o", "s", "D", "^", "v", "P")

_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)"} | {
  colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)
}

_STYLE: Any = {
  "svg.fonttype": "none",  # text stays text: it takes the page's font, and can be searched
  "font.family": "DejaVu Sans",
  "font.size": 10.0,
  "figure.facecolor": "none",
  "axes.facecolor": "none",
  "text.parse_math": False,  # a class name may hold a dollar sign
  "text.color": INK,
  "axes.edgecolor": MUTED,
  "axes.labelcolor": MUTED,
  "axes.linewidth": 0.8,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.axisbelow": True,
  "axes.grid": True,
  "grid.color": LINE,
  "grid.linewidth": 0.7,
  "xtick.color": MUTED,
  "ytick.color": MUTED,
  "xtick.labelcolor": MUTED,
  "ytick.labelcolor": MUTED,
  "xtick.major.size": 0.0,
  "ytick.major.size": 0.0,
  "xtick.minor.size": 0.0,
  "ytick.minor.size": 0.0,
  "legend.frameon": False,
}


@contextmanager
def axes(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
  """A figure of `width` x `height` inches with one axes, in the report's style.

  The figure belongs to no pyplot state, and the style ends with the block.
  """
  with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
    # The text is set in the page's font; that the layout font lacks a glyph does not matter.
    warnings.filterwarnings("ignore", message="Glyph .* missing from")
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    yield figure, figure.add_subplot()


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
  """Renders a figure as an `<svg>` element for inlining.

  Args:
    figure: from `axes`, still within its block.
    name: unique on the page; prefixes the identifiers, which are otherwise the same for the same
      drawing.
    title: the accessible name.
    description: what the plot shows, for those who cannot see it.

  Returns:
    The element: scalable, no fixed size, no prolog, no metadata, no reference outside itself.
  """
  buffer = io.StringIO()
  with matplotlib.rc_context({"svg.hashsalt": name}):
    figure.savefig(buffer, format="svg", metadata={"Date": None})
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
  text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
  text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)
  text = _own_identifiers(text, name)
  for colour, variable in _VARIABLES.items():
    text = text.replace(colour, variable)
  text = text.replace("font-family: 'DejaVu Sans'; ", "")
  view_box = re.search(r'viewBox="([^"]+)"', text)
  if view_box is None:
    raise RuntimeError(f"matplotlib wrote an SVG without a viewBox for the plot {name!r}")
  head = (
    f'<svg viewBox="{view_box.group(1)}" role="img" aria-labelledby="{name}-title {name}-desc">'
    f'<title id="{name}-title">{html.escape(title)}</title>'
    f'<desc id="{name}-desc">{html.escape(description)}</desc>'
  )
  body = text[text.index(">") + 1 :]
  return head + body


def _own_identifiers(text: str, name: str) -> str:
  """Prefixes identifiers that are referred to and drops the rest: ids are unique on a page."""
  used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))

  def rename(match: re.Match[str]) -> str:
    return f' id="{name}-{match.group(1)}"' if match.group(1) in used else ""

  text = re.sub(r'\sid="([^"]*)"', rename, text)
  text = text.replace("url(#", f"url(#{name}-")
  return re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', text)
