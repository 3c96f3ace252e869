"""How well a model does on each group of people, with intervals by bootstrap over units.

Berrada et al. 2023, arXiv:2308.10888, section 3 (accuracy of subgroups under private fine-tuning).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_jax.errors import UserError
from dp_jax.evaluation import bootstrap
from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.disclosure import suppressed
from dp_jax.evaluation.intervals import difference, wider, wilson
from dp_jax.evaluation.predictions import PredictionTable, check_same_records
from dp_jax.evaluation.record_metrics import METRICS, check_metrics, statistic_of
from dp_jax.evaluation.subgroups import Partition, Status, partitions, too_small, unit_counts


@dataclass(frozen=True)
class GroupFigure:
  """A metric in one group.

  Attributes:
    columns, values: what defines the group.
    name: for people.
    units, records: how many it has; 0 where suppressed.
    status: "shown"; "small", too small to be ranked; or "suppressed".
    value: the metric, not a number where suppressed.
    gap: the metric less that of all records.
  """

  columns: tuple[str, ...]
  values: tuple[str, ...]
  name: str
  units: int
  records: int
  status: Status
  value: Interval
  gap: Interval


@dataclass(frozen=True)
class ColumnFigure:
  """The spread of a metric over the groups of one or several columns.

  Attributes:
    columns: their names.
    largest_gap: between the best and the worst of the groups that are large enough. It is never
      negative, and chance alone makes it positive.
    worst, best: the names of those groups.
  """

  columns: tuple[str, ...]
  largest_gap: Interval
  worst: str
  best: str


@dataclass(frozen=True)
class Fairness:
  """One metric of one model: overall, in each group, and its spread.

  Attributes:
    metric: its name.
    overall: on all records.
    groups: each value of each column, then combinations.
    columns: for each column and combination with at least two groups to compare.
  """

  metric: str
  overall: Interval
  groups: tuple[GroupFigure, ...]
  columns: tuple[ColumnFigure, ...]

  def to_dict(self) -> dict[str, Any]:
    """JSON values; intervals are [value, low, high]."""
    return {
      "metric": self.metric,
      "overall": self.overall.to_list(),
      "groups": [
        {
          "group": dict(zip(g.columns, g.values, strict=True)), "status": g.status,
          "units": g.units, "records": g.records,
          "value": g.value.to_list(), "gap": g.gap.to_list(),
        }
        for g in self.groups
      ],
      "columns": [
        {"columns": list(c.columns), "largest_gap": c.largest_gap.to_list(), "worst": c.worst,
         "best": c.best}
        for c in self.columns
      ],
    }  # fmt: skip


@dataclass(frozen=True)
class Measured:
  """A metric of one table in all groups, on the data and on the resamples.

  Attributes:
    metric: its name.
    parts: the partitions; the first is all records.
    units, records: int[g], counts of each group.
    status: [g].
    values: float[g].
    samples: float[resamples, g], the same resamples for every table that is measured together.
  """

  metric: str
  parts: tuple[Partition, ...]
  units: np.ndarray
  records: np.ndarray
  status: tuple[Status, ...]
  values: np.ndarray
  samples: np.ndarray

  def ranked(self, part: int) -> np.ndarray:
    """Places of the groups of a partition that can be ranked."""
    start = sum(len(each.groups) for each in self.parts[:part])
    places = np.arange(start, start + len(self.parts[part].groups))
    shown = np.array([self.status[place] == "shown" for place in places], bool)
    return places[shown & np.isfinite(self.values[places])]

  def no_spread(self, place: int) -> bool:
    """Whether a group's figure is the same in every resample, as a share of 0 or 1 is."""
    known = self.samples[np.isfinite(self.samples[:, place]), place]
    return bool(len(known) and np.ptp(known) == 0)

  def gaps(self) -> tuple[np.ndarray, np.ndarray]:
    """The metric of each group less that of all records: float[g], float[resamples, g]."""
    return self.values - self.values[0], self.samples - self.samples[:, :1]


def measure(
  tables: Sequence[PredictionTable],
  columns: Sequence[str],
  metric: str,
  *,
  private: bool,
  class_names: Sequence[str] = (),
  resamples: int = bootstrap.RESAMPLES,
  seed: int = 0,
) -> list[Measured]:
  """Measures one or several models on the same records.

  Args:
    tables: predictions of each model, record by record on the same records.
    columns: the columns that make up groups, each and in combination.
    metric: of METRICS.
    private: whether small groups have to be suppressed; else they are marked.
    class_names: of the classes, for the column "class".
    resamples: of the bootstrap.
    seed: of the bootstrap. It is fixed, so that figures can be reproduced.

  Raises:
    ValueError: for an unknown column or metric, or tables of different records.
  """
  first = tables[0]
  check_metrics([metric], first)
  check_same_records(tables)
  if not len(first.label):
    raise UserError("there are no predictions to evaluate: no record could be read.")
  parts = partitions(first, columns, class_names)
  present, units = np.unique(first.unit, return_inverse=True)
  counts = unit_counts(parts, units)
  hidden = suppressed(parts, counts) if private else np.zeros(len(counts), bool)
  small = too_small(first, parts, units, metric)
  status: tuple[Status, ...] = tuple(
    "suppressed" if h else "small" if s else "shown" for h, s in zip(hidden, small, strict=True)
  )
  records = np.concatenate([np.bincount(p.codes, minlength=len(p.groups)) for p in parts])
  statistics = [statistic_of(metric, table, units, len(present), parts) for table in tables]
  everyone = np.ones((1, len(present)), np.int32)
  samples = bootstrap.resample(statistics, len(present), resamples=resamples, seed=seed)
  return [
    Measured(metric, tuple(parts), counts, records, status, statistic(everyone)[0], drawn)
    for statistic, drawn in zip(statistics, samples, strict=True)
  ]


def fairness(measured: Measured) -> Fairness:
  """The figures of one model."""
  nothing = Interval(*[float("nan")] * 3)
  values = [
    _beyond_the_sample(value, int(units), measured.metric)
    for value, units in zip(
      bootstrap.interval(measured.values, measured.samples), measured.units, strict=True
    )
  ]
  gaps = [
    _honest(gap, value, values[0], measured.no_spread(place))
    for place, (gap, value) in enumerate(
      zip(bootstrap.interval(*measured.gaps()), values, strict=True)
    )
  ]
  groups, place = [], 1
  for part in measured.parts[1:]:
    for name, own in zip(part.names(), part.groups, strict=True):
      seen = measured.status[place] != "suppressed"
      groups.append(GroupFigure(
        part.columns, own, name, int(seen * measured.units[place]),
        int(seen * measured.records[place]), measured.status[place],
        values[place] if seen else nothing, gaps[place] if seen else nothing,
      ))  # fmt: skip
      place += 1
  seen = measured.status[0] != "suppressed"
  return Fairness(
    measured.metric, values[0] if seen else nothing, tuple(groups),
    tuple(_spreads(measured)),
  )  # fmt: skip


def _honest(gap: Interval, first: Interval, second: Interval, no_spread: bool) -> Interval:
  """The interval of a difference of which one side is the same in every resample.

  What that side may be elsewhere is in its own interval, and no resample shows it.
  """
  return wider(gap, difference(first, second)) if no_spread else gap


def _beyond_the_sample(value: Interval, units: int, metric: str) -> Interval:
  """The interval of a figure that is the same in every resample, as a share that is 0 or 1.

  Of accuracy it is the score interval of as many independent units (Wilson 1927); other shares are
  of a part of the units, and get no interval, and neither does an area of 1.
  """
  if value.low != value.high:
    return value
  if metric != "accuracy":
    return Interval(value.value, float("nan"), float("nan"))
  return wilson(value.value, units)


def spread_of(measured: Measured, places: np.ndarray) -> Interval:
  """The largest gap between two of some groups, with its interval."""
  (gap,) = bootstrap.interval(*largest_gap(measured, places))
  ends = [places[np.argmax(measured.values[places])], places[np.argmin(measured.values[places])]]
  best, worst = (
    _beyond_the_sample(interval, int(measured.units[place]), measured.metric)
    for place in ends
    for interval in bootstrap.interval(measured.values[[place]], measured.samples[:, [place]])
  )
  honest = _honest(gap, best, worst, any(measured.no_spread(place) for place in ends))
  return Interval(honest.value, max(0.0, honest.low), honest.high)


def largest_gap(measured: Measured, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The largest difference between two of some groups: float[1], float[resamples, 1]."""
  values, samples = measured.values[places], measured.samples[:, places]
  return np.ptp(values, keepdims=True), np.ptp(samples, axis=1, keepdims=True)


def _spreads(measured: Measured) -> list[ColumnFigure]:
  spreads = []
  names = [name for part in measured.parts for name in part.names()]
  better = 1 if METRICS[measured.metric].higher_is_better else -1
  for i, part in enumerate(measured.parts):
    places = measured.ranked(i)
    if len(places) < 2:
      continue
    order = places[np.argsort(better * measured.values[places], kind="stable")]
    gap = spread_of(measured, places)
    spreads.append(ColumnFigure(part.columns, gap, names[order[0]], names[order[-1]]))
  return spreads
