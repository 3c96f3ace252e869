"""Resamples of units: weighted metrics equal scikit-learn's on the drawn records."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, roc_auc_score

from dp_jax.evaluation import bootstrap

UNITS, GROUPS = 40, 3


@pytest.fixture(scope="module")
def records():
  """150 records of 40 people, with tied scores."""
  rng = np.random.default_rng(0)
  units = rng.integers(0, UNITS, 150)
  positive = rng.random(150) < 0.4
  return units, positive, (rng.standard_normal(150) + positive).round(1), rng.integers(0, 3, 150)


def _drawn(weights, units):
  """The records of a resample, each unit's as often as it was drawn."""
  return np.repeat(np.arange(len(units)), weights[units])


def test_auroc_of_a_resample_is_that_of_its_records(records):
  units, positive, score, codes = records
  codes = np.where(np.arange(150) % 10 == 0, -1, codes)  # some are in no group
  statistic = bootstrap.auroc_statistic(positive, score, units, codes, GROUPS)
  weights = bootstrap.draw_weights(np.random.default_rng(1), UNITS, 20)
  for row, values in zip(weights, statistic(weights), strict=True):
    drawn = _drawn(row, units)
    for group in range(GROUPS):
      own = drawn[codes[drawn] == group]
      np.testing.assert_allclose(values[group], roc_auc_score(positive[own], score[own]))


def test_a_ratio_of_a_resample_is_that_of_its_records(records):
  units, positive, score, codes = records
  right = positive == (score > 0.5)
  groups = np.vstack([np.eye(GROUPS), np.ones(GROUPS)])  # each cell, and all of them
  statistic = bootstrap.ratio_statistic(right, np.ones(150), units, UNITS, codes, groups)
  weights = bootstrap.draw_weights(np.random.default_rng(1), UNITS, 20)
  for row, values in zip(weights, statistic(weights), strict=True):
    drawn = _drawn(row, units)
    for group in range(GROUPS):
      own = drawn[codes[drawn] == group]
      np.testing.assert_allclose(values[group], accuracy_score(positive[own], score[own] > 0.5))
    np.testing.assert_allclose(values[GROUPS], accuracy_score(positive[drawn], score[drawn] > 0.5))


def test_what_is_not_defined_is_not_a_number(records):
  units, positive, score, _ = records
  nobody = np.zeros((1, UNITS), np.int32)
  everyone = nobody + 1
  area = bootstrap.auroc_statistic(positive, score, units, np.zeros(150, int), 2)
  assert np.isnan(area(nobody)).all()
  assert np.isfinite(area(everyone)[0, 0]) and np.isnan(area(everyone)[0, 1])
  only = bootstrap.auroc_statistic(np.ones(150, bool), score, units, np.zeros(150, int), 1)
  assert np.isnan(only(everyone)).all()
  share = bootstrap.ratio_statistic(
    positive, np.ones(150), units, UNITS, np.zeros(150, int), np.array([[1.0], [0.0]])
  )
  assert np.isfinite(share(everyone)[0, 0]) and np.isnan(share(everyone)[0, 1])


def test_weights_count_as_many_draws_as_there_are_units_and_every_unit_equally():
  weights = bootstrap.draw_weights(np.random.default_rng(0), 50, 4000)
  assert (weights.sum(axis=1) == 50).all()
  # A mean of 4000 multinomial counts has a standard deviation of 0.0157; 7 of them: below 1e-9.
  assert np.abs(weights.mean(axis=0) - 1).max() < 7 * 0.0157
  assert abs(weights.var() - 0.98) < 0.05


def test_the_same_seed_draws_the_same_units_whatever_is_computed(records):
  units, positive, score, codes = records
  area = bootstrap.auroc_statistic(positive, score, units, codes, GROUPS)
  share = bootstrap.ratio_statistic(positive, np.ones(150), units, UNITS, codes, np.eye(GROUPS))
  (alone,) = bootstrap.resample([area], UNITS, resamples=120)
  _, beside = bootstrap.resample([share, area], UNITS, resamples=120)
  (other,) = bootstrap.resample([area], UNITS, resamples=120, seed=1)
  assert alone.shape == (120, GROUPS)
  np.testing.assert_array_equal(alone, beside)
  assert (alone != other).mean() > 0.9


def test_percentile_intervals():
  samples = np.stack([np.linspace(0, 1, 2001), np.full(2001, np.nan)], axis=1)
  first, second = bootstrap.interval(np.array([0.5, 0.5]), samples)
  np.testing.assert_allclose([first.low, first.high], [0.025, 0.975])
  assert first.excludes_zero and not second.excludes_zero
  assert second.to_list() == [0.5, None, None]
