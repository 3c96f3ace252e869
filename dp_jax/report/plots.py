"""The report's plots, as SVG strings: pure functions of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.report import figure as fig
from dp_jax.statement import formatting

# Bins with less than this share of the records get a dot, but no line.
_LINE_SHARE = 0.03
# Lines through more points than this carry no markers.
_MARKED = 60


def accuracy_plot(rows: Sequence[tuple[str, Interval]]) -> str:
  """Dots with intervals, one row for each run, the first on top.

  Args:
    rows: (run's label, accuracy), at least one.
  """
  with fig.axes(4.7, 0.75 + 0.42 * len(rows)) as (figure, axes):
    for i, (_, interval) in enumerate(rows):
      _dot(axes, interval, len(rows) - 1 - i, i, size=7.5)
      axes.annotate(
        formatting.percent(interval.value),
        (interval.value, len(rows) - 1 - i),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
      )
    _rows(axes, [label for label, _ in rows])
    _percent_axis(axes.xaxis)
    low = min(interval.low for _, interval in rows)
    high = max(interval.high for _, interval in rows)
    axes.set_xlim(max(0.0, low - 0.04), min(1.005, high + 0.04))
    text = "; ".join(f"{label} {formatting.percent(value.value)}" for label, value in rows)
    return fig.to_svg(figure, "plot-accuracy", "Accuracy of each run", f"Accuracy: {text}.")


def epsilon_plot(points: Sequence[tuple[int, float]], target: float | None) -> str:
  """Epsilon spent against the step, with the target as a line where there is one.

  Args:
    points: (step, epsilon), by increasing step.
    target: the target epsilon.
  """
  with fig.axes(4.7, 2.9) as (figure, axes):
    steps = [step for step, _ in points]
    epsilons = [epsilon for _, epsilon in points]
    # A staircase that stands at the later of two points: never below what is spent between them.
    axes.plot(steps, epsilons, color=fig.SERIES[0], linewidth=2, drawstyle="steps-pre")
    axes.fill_between(steps, epsilons, step="pre", color=fig.SERIES[0], alpha=0.1, linewidth=0)
    axes.plot(steps[-1:], epsilons[-1:], "o", color=fig.SERIES[0], markersize=6)
    if target is not None:
      axes.axhline(target, color=fig.MUTED, linewidth=1, linestyle=(0, (4, 3)))
      axes.annotate(
        f"target {formatting.short(target)}",
        (steps[0], target),
        xytext=(2, 4),
        textcoords="offset points",
        color=fig.MUTED,
      )
    axes.set_xlim(0, steps[-1] * 1.03)
    axes.set_ylim(0, max([*epsilons, target or 0]) * 1.15)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("epsilon")
    end = formatting.round_up(epsilons[-1])
    description = f"Epsilon rises from 0 to {end} over {steps[-1]} steps."
    return fig.to_svg(figure, "plot-epsilon", "Epsilon spent against step", description)


def progress_plot(
  runs: Mapping[str, Sequence[tuple[int, float]]],
  *,
  name: str = "plot-progress",
  title: str = "Accuracy during training",
  unit: str = "accuracy",
  percent: bool = True,
) -> str:
  """Accuracy on held-out data against the step, one line for each run; or another figure.

  Args:
    runs: label to (step, figure) pairs by increasing step; at least one run.
    name: of the plot, unique on the page.
    title: of the plot.
    unit: what the vertical axis shows.
    percent: whether values are fractions to be shown as percentages.
  """
  show = formatting.percent if percent else formatting.short
  with fig.axes(4.7, 2.9) as (figure, axes):
    for i, (label, points) in enumerate(runs.items()):
      colour, marker = _series(i)
      axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color=colour,
        marker=marker if len(points) <= _MARKED else None,
        markersize=4,
        linewidth=1.6,
        label=label,
      )
    if percent:
      _percent_axis(axes.yaxis)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(unit)
    axes.legend(loc="best", labelcolor=fig.INK)
    text = "; ".join(f"{label} ends at {show(points[-1][1])}" for label, points in runs.items())
    return fig.to_svg(figure, name, title, f"{text}.")


def class_plot(
  classes: Sequence[str],
  runs: Mapping[str, Sequence[Interval | None]],
  *,
  name: str = "plot-classes",
  title: str = "Accuracy of each class",
  kind: str = "classes",
  percent: bool = True,
) -> str:
  """Accuracy of each class in each run, dots with intervals; or a metric of each group.

  Args:
    classes: their names, from the top.
    runs: label to one interval for each class (None where the class has no held-out record).
    name: of the plot, unique on the page.
    title: of the plot.
    kind: what the rows are.
    percent: whether values are fractions to be shown as percentages.
  """
  labels = [formatting.one_line(name, 30) for name in classes]
  spread = 0.36 if len(runs) > 1 else 0.0
  with fig.axes(4.7, 1.0 + (0.16 + 0.12 * len(runs)) * len(classes)) as (figure, axes):
    for i, (label, intervals) in enumerate(runs.items()):
      offset = spread * (0.5 - i / max(1, len(runs) - 1)) if len(runs) > 1 else 0.0
      axes.plot([], [], _series(i)[1], color=_series(i)[0], markersize=5, label=label)
      for row, interval in enumerate(intervals):
        if interval is not None:
          _dot(axes, interval, len(classes) - 1 - row + offset, i, size=4.5)
    _rows(axes, labels)
    axes.grid(visible=True, axis="y", color=fig.LINE)
    if percent:
      _percent_axis(axes.xaxis)
      lows = [i.low for intervals in runs.values() for i in intervals if i is not None]
      axes.set_xlim(right=1 + 0.02 * max(0.05, 1 - min(lows, default=0.0)))
    figure.legend(loc="outside upper left", ncols=3, labelcolor=fig.INK)
    description = f"{len(classes)} {kind}, {len(runs)} runs; the values stand in the table."
    return fig.to_svg(figure, name, title, description)


def calibration_plot(runs: Mapping[str, Sequence[tuple[float, float, int]]]) -> str:
  """Reliability diagram: accuracy against confidence, the area of a dot by its count.

  Args:
    runs: label to (mean confidence, accuracy, count) for each bin that is not empty.
  """
  with fig.axes(4.1, 3.9) as (figure, axes):
    axes.plot([0, 1], [0, 1], color=fig.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for i, (label, bins) in enumerate(runs.items()):
      colour, marker = _series(i)
      total = sum(count for *_, count in bins) or 1
      confidence = [bin_[0] for bin_ in bins]
      accuracy = [bin_[1] for bin_ in bins]
      # A bin of a handful of records says little; a line through it would say much.
      kept = [bin_ for bin_ in bins if bin_[2] >= _LINE_SHARE * total]
      axes.plot([b[0] for b in kept], [b[1] for b in kept], color=colour, linewidth=1, alpha=0.6)
      areas = [14 + 180 * count / total for *_, count in bins]
      axes.scatter(confidence, accuracy, s=areas, color=colour, marker=marker, linewidth=0)
      axes.plot([], [], marker, color=colour, markersize=5, label=label)
    _percent_axis(axes.xaxis)
    _percent_axis(axes.yaxis)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.04)
    axes.set_aspect("equal")
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    axes.legend(loc="upper left", labelcolor=fig.INK)
    description = (
      "Accuracy against confidence. On the dashed diagonal the model is as often right as it "
      "says; below it, it is too sure of itself."
    )
    return fig.to_svg(figure, "plot-calibration", "Calibration", description)


def attacker_plot(points: Sequence[tuple[float, float]]) -> str:
  """The most that a membership test can reach: true against false positive rate.

  Args:
    points: (false positive rate, bound on the true positive rate), both in [0, 1], by increasing
      false positive rate.
  """
  with fig.axes(4.1, 3.9) as (figure, axes):
    false_positives = [point[0] for point in points]
    true_positives = [point[1] for point in points]
    axes.plot([0, 1], [0, 1], color=fig.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(false_positives, true_positives, color=fig.SERIES[0], linewidth=2)
    axes.fill_between(
      false_positives, false_positives, true_positives, color=fig.SERIES[0], alpha=0.1, linewidth=0
    )
    axes.annotate("no test can be above", (0.30, 0.90), color=fig.INK, ha="center")
    axes.annotate("blind guessing", (0.62, 0.50), color=fig.MUTED, ha="left")
    _percent_axis(axes.xaxis)
    _percent_axis(axes.yaxis)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.01)
    axes.set_aspect("equal")
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    description = (
      "The highest true positive rate that any membership test can have at each false positive "
      "rate, above the diagonal of blind guessing."
    )
    return fig.to_svg(figure, "plot-attacker", "Limit on membership tests", description)


def _series(index: int) -> tuple[str, str]:
  return fig.SERIES[index % len(fig.SERIES)], fig.MARKERS[index % len(fig.MARKERS)]


def _dot(axes: Axes, interval: Interval, y: float, index: int, size: float) -> None:
  colour, marker = _series(index)
  axes.plot([interval.low, interval.high], [y, y], color=colour, linewidth=1.6, alpha=0.55)
  axes.plot([interval.value], [y], marker, color=colour, markersize=size)


def _rows(axes: Axes, labels: Sequence[str]) -> None:
  axes.set_yticks(range(len(labels)), list(reversed(labels)))
  axes.tick_params(axis="y", labelcolor=fig.INK)
  axes.set_ylim(-0.6, len(labels) - 0.4)
  axes.grid(visible=False, axis="y")
  axes.spines["left"].set_visible(False)


def _percent_axis(axis) -> None:  # type: ignore[no-untyped-def]
  axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
  axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
