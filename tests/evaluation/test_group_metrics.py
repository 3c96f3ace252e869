"""Groups of records, and which of private data may be shown."""

import itertools

import numpy as np
import pytest
from made_up_tables import binary_table, right_or_wrong

from dp_jax.evaluation.disclosure import MIN_UNITS, suppressed
from dp_jax.evaluation.subgroups import partitions, too_small, unit_counts


def _table(**groups):
  count = len(next(iter(groups.values())))
  return right_or_wrong(np.arange(count), np.ones(count), groups)


def test_columns_and_their_intersections():
  table = _table(sex=["f", "m", "f", "f"], age=["60 and above", "below 40", "40 to 60", "below 40"])
  found = partitions(table, ["sex", "age"])
  assert [part.columns for part in found] == [(), ("sex",), ("age",), ("sex", "age")]
  assert found[2].names() == ["age below 40", "age 40 to 60", "age 60 and above"]
  assert found[3].names() == [
    "sex f, age below 40", "sex f, age 40 to 60", "sex f, age 60 and above", "sex m, age below 40",
  ]  # fmt: skip
  assert found[3].codes.tolist() == [2, 3, 1, 0]
  assert unit_counts(found, np.arange(4)).tolist() == [4, 3, 1, 2, 1, 1, 1, 1, 1, 1]


def test_the_class_is_a_column_and_numbers_stand_in_order():
  table = _table(ward=["10", "9", "2", "missing"])
  names = partitions(table, ["ward"])[1].names()
  assert names == ["ward 2", "ward 9", "ward 10", "ward missing"]
  assert partitions(table, ["class"], ["cat", "dog"])[1].names() == ["class cat"]


def test_units_are_counted_once_however_many_records_they_have():
  table = right_or_wrong([0, 0, 0, 1], np.ones(4), {"sex": ["f", "f", "m", "m"]})
  parts = partitions(table, ["sex"])
  assert unit_counts(parts, table.unit).tolist() == [2, 1, 2]


@pytest.mark.parametrize(
  ("columns", "said"), [(["colour"], "no group column 'colour'"), (["sex", "sex"], "twice")]
)
def test_columns_that_are_not_there_are_refused(columns, said):
  with pytest.raises(ValueError, match=said):
    partitions(_table(sex=["f", "m"]), columns)


def test_a_column_of_names_is_refused():
  with pytest.raises(ValueError, match="group_bins"):
    partitions(_table(name=[str(i) for i in range(600)]), ["name"])


def test_a_group_is_small_by_units_or_by_what_the_metric_counts():
  label = np.r_[np.zeros(95), np.ones(5), np.zeros(20)]
  table = binary_table(np.arange(120), label, np.zeros(120), {"ward": ["a"] * 100 + ["b"] * 20})
  parts = partitions(table, ["ward"])
  assert too_small(table, parts, table.unit, "accuracy").tolist() == [False, False, True]
  assert too_small(table, parts, table.unit, "auroc").tolist() == [True, True, True]


def _suppressed(**groups):
  table = _table(**groups)
  parts = partitions(table, [*groups])
  hidden = suppressed(parts, unit_counts(parts, np.arange(len(table.label))))
  names = [name for part in parts for name in part.names()]
  return {name for name, out in zip(names, hidden, strict=True) if out}


def test_a_small_group_takes_the_smallest_other_with_it():
  race = ["a"] * 50 + ["b"] * 30 + ["c"] * 5
  assert _suppressed(race=race) == {"race c", "race b"}
  # One group of two would be the total less the other.
  assert _suppressed(sex=["f"] * 50 + ["m"] * 5) == {"sex f", "sex m"}
  assert _suppressed(sex=["f"] * 50 + ["m"] * 11) == set()


def test_what_is_left_out_holds_eleven_units_together():
  # Two small groups hide each other, but their sum of 6 would be known.
  race = ["a"] * 50 + ["b"] * 30 + ["c"] * 3 + ["d"] * 3
  assert _suppressed(race=race) == {"race b", "race c", "race d"}


def _recoverable(parts, hidden):
  """Whether hidden totals follow from the shown ones by linear algebra, found by least squares."""
  rows = np.array([
    [1.0 if group == tuple(cell[parts[-1].columns.index(c)] for c in part.columns) else 0.0
     for cell in parts[-1].groups]
    for part in parts for group in part.groups
  ])  # fmt: skip
  for row in rows[hidden]:
    solution, *_ = np.linalg.lstsq(rows[~hidden].T, row, rcond=None)
    if np.allclose(rows[~hidden].T @ solution, row, atol=1e-6):
      return True
  return False


@pytest.mark.parametrize("seed", range(12))
def test_no_small_group_follows_from_those_that_are_shown(seed):
  """Random tables of two or three columns: no group that is left out is a sum and difference."""
  rng = np.random.default_rng(seed)
  names = "sex", "race", "age"
  sizes = [(2, 3, 3), (3, 4, 0), (2, 2, 4)][seed % 3]
  count = int(rng.integers(60, 400))
  groups = {
    name: rng.choice([f"v{i}" for i in range(size)], count, p=rng.dirichlet(np.ones(size)))
    for name, size in zip(names, sizes, strict=True) if size
  }  # fmt: skip
  table = _table(**groups)
  parts = partitions(table, [*groups])
  counts = unit_counts(parts, np.arange(count))
  hidden = suppressed(parts, counts)
  assert hidden[counts < MIN_UNITS].all()
  if hidden.any() and not hidden.all():
    assert not _recoverable(parts, hidden)


def test_without_complementary_suppression_a_small_group_is_given_away():
  """The broken variant hides the small groups alone."""
  parts = partitions(_table(race=["a"] * 50 + ["b"] * 30 + ["c"] * 5), ["race"])
  counts = unit_counts(parts, np.arange(85))
  assert _recoverable(parts, counts < MIN_UNITS)


def test_complements_of_several_lines_at_once():
  """A cycle of four cells in a table of sex by race: every line has two gaps, none follows."""
  cells = {("f", "a"): 5, ("f", "b"): 40, ("m", "a"): 40, ("m", "b"): 5, ("f", "c"): 30,
           ("m", "c"): 30}  # fmt: skip
  people = list(itertools.chain.from_iterable([cell] * size for cell, size in cells.items()))
  found = _suppressed(sex=[sex for sex, _ in people], race=[race for _, race in people])
  assert {"sex f, race a", "sex m, race b"} <= found and "sex f" not in found
