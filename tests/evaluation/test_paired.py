"""The paired difference in accuracy: its value, and how often its interval holds the truth."""

import dataclasses

import numpy as np
import pytest
from made_up_tables import right_or_wrong
from made_up_work_directories import people_table

from dp_jax.evaluation.paired import accuracy_difference


def test_the_value_is_the_difference_and_equal_models_differ_by_nothing():
  first, second = people_table(0.7), people_table(0.9)
  found = accuracy_difference(first, second)
  right = [np.mean(t.predicted == t.label) for t in (first, second)]
  assert found.value == pytest.approx(right[1] - right[0])
  assert found.low < found.value < found.high
  same = accuracy_difference(first, first)
  assert same.value == 0 and -0.02 < same.low < 0 < same.high < 0.02


def _drawn(rng):
  """300 people of 1 to 9 records; what a person finds hard is hard in all of their records."""
  units = np.repeat(np.arange(300), rng.integers(1, 10, 300))
  hard, luck = rng.random(300)[units], rng.random((2, len(units)))
  return [right_or_wrong(units, luck[k] > 0.6 * hard * (1 - 0.4 * k), {}) for k in (0, 1)]


def test_intervals_hold_the_truth_by_people_and_not_by_records():
  rng = np.random.default_rng(0)
  truth, repeats, held = 0.5 * 0.6 * 0.4, 1000, np.zeros(2)
  for _ in range(repeats):
    tables = _drawn(rng)
    # The broken variant: each record as if it were a person.
    alone = [dataclasses.replace(t, unit=np.arange(len(t.label))) for t in tables]
    for i, pair in enumerate((tables, alone)):
      found = accuracy_difference(*pair)
      held[i] += found.low <= truth <= found.high
  # Five standard errors of 0.69 points: a false alarm below 1e-6.
  assert abs(held[0] / repeats - 0.95) < 0.035
  assert held[1] / repeats < held[0] / repeats


def test_what_cannot_be_paired_is_refused():
  with pytest.raises(ValueError, match="different records"):
    accuracy_difference(people_table(0.7), people_table(0.7, data_digest="other"))
