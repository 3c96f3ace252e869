"""The plot of `dp-jax plan`: noise against batch size, as an image file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dp_jax.errors import UserError
from dp_jax.privacy.calibration.planning import PlanRow
from dp_jax.privacy.spec import PrivacySpec

FORMATS = (".png", ".svg", ".pdf")


def check_format(path: Path) -> None:
  """Refuses, before anything is computed, a file that could not be written as an image.

  Raises:
    ValueError: if the ending is not one of FORMATS or the folder does not exist.
  """
  if path.suffix not in FORMATS:
    raise UserError(f"plot file {str(path)!r} must end in {', '.join(FORMATS)}")
  if not path.absolute().parent.is_dir():
    raise UserError(f"there is no folder {str(path.parent)!r} for the plot")


def save_plan_plot(rows: Sequence[PlanRow], spec: PrivacySpec, num_units: int, path: Path) -> None:
  """Draws noise multiplier and noise per unit of batch against the batch size.

  Args:
    rows: at least one.
    spec: the target, for the title.
    num_units: N, for the title.
    path: the file; its ending chooses the format.
  """
  figure = Figure(figsize=(7.2, 3.4), layout="constrained")
  left, right = figure.subplots(1, 2, sharex=True)
  sizes = [row.expected_batch_size for row in rows]
  panels = [
    (left, [row.noise_multiplier for row in rows], "noise multiplier", "#7a3b9d"),
    (right, [row.noise_per_unit for row in rows], "noise multiplier / batch size", "#0b6e75"),
  ]
  for axes, values, label, colour in panels:
    axes.plot(sizes, values, marker="o", markersize=4, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("expected batch size")
    axes.set_ylabel(label)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.tick_params(axis="x", labelrotation=35)
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
  figure.suptitle(
    f"The same guarantee, ({spec.epsilon:g}, {spec.delta:g})-DP, at the same compute:"
    f" {num_units:,} units",
    fontsize=10,
  )
  figure.savefig(path, dpi=150)
