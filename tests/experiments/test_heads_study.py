"""The searches of experiments/heads: what is changed, and where they stop."""

import numpy as np

from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from experiments.heads import choose, data, sizes
from experiments.heads.methods import METHODS, Times, changed


def test_settings_are_replaced_or_multiplied():
  method = FeatureCovariance(descent=Descent(steps=3, learning_rate=2.0), ridge=0.5)
  got = changed(method, {"descent.steps": Times(0.5), "descent.average": 0.5, "ridge": Times(3)})
  assert (got.descent.steps, got.descent.average, got.ridge) == (2, 0.5, 1.5)
  assert got.descent.learning_rate == 2.0
  assert changed(method, {"descent.steps": Times(0.01)}).descent.steps == 1
  assert changed(method, {}) == method


def test_every_change_names_a_setting():
  for name, changes in choose.CHANGES.items():
    for change in changes:
      changed(choose.STARTS[name], change)  # or it raises
  for name, knobs in sizes.KNOBS.items():
    for path, factor in knobs:
      assert changed(METHODS[name], {path: Times(factor)}) != METHODS[name]


def test_climbing_stops_at_the_top_in_either_direction():
  method = FeatureCovariance(ridge=1.0)
  for top in (0.01, 1.0, 200.0):
    score = lambda each, top=top: -abs(np.log(each.ridge / top))  # noqa: E731
    got, most = sizes.climb(method, "ridge", 3.0, score, score(method))
    assert abs(np.log(got.ridge / top)) <= np.log(3) / 2 and most == score(got)


def test_a_climb_stays_within_the_budget():
  method = FeatureCovariance(moment_share=0.4)

  def score(each):
    each.parts()  # refuses shares that leave nothing
    return each.moment_share

  got, _ = sizes.climb(method, "moment_share", 2.0, score, score(method))
  assert got.moment_share == 0.8


def test_the_centre_is_paid_for_as_its_noise_asks():
  rows = lambda n: data.Split(np.zeros((n, 560)), np.zeros(n), np.zeros((1, 560)), np.zeros(1))  # noqa: E731
  assert sizes.centre_share(rows(2000), 0.5) == 0
  assert sizes.centre_share(rows(40_000), 8.0) == 0.006
  assert 0.006 < sizes.centre_share(rows(10_000), 0.5) < 0.1
