"""Bounds on membership tests, against the exact curve of the Gaussian mechanism."""

import itertools
import math

import pytest
from scipy import stats

from dp_jax.privacy import FullBatch, Mechanism, Poisson
from dp_jax.statement import attacker

DELTA = 1e-5


def test_advantage_of_an_epsilon_delta_mechanism():
  assert attacker.membership_advantage(0.0, 0.0) == 0.0
  assert attacker.membership_advantage(0.0, 0.3) == pytest.approx(0.3)
  assert attacker.membership_advantage(1.0, 0.01) == pytest.approx(
    (math.e - 1 + 2 * 0.01) / (math.e + 1)
  )
  assert attacker.membership_advantage(2000.0, 0.0) == 1.0


def test_gaussian_bounds_are_the_exact_curve_from_above():
  # Dong, Roth, Su 2022, arXiv:1905.02383: TPR = Phi(Phi^-1(FPR) + mu), advantage 2 Phi(mu/2) - 1.
  mechanism = Mechanism(FullBatch(), 8.0, 16)
  mu = 0.5
  found = attacker.attacker_section(mechanism, mechanism.epsilon(DELTA), DELTA)
  advantage = 2 * stats.norm.cdf(mu / 2) - 1
  assert advantage <= found["mechanism_advantage_bound"] <= advantage * 1.01
  assert found["mechanism_advantage_bound"] < found["membership_advantage_bound"]
  for point in found["trade_off"]:
    exact = stats.norm.cdf(stats.norm.ppf(point["false_positive_rate"]) + mu)
    assert exact <= point["true_positive_rate_bound"] <= exact * 1.01


def test_curve_is_concave_above_the_diagonal():
  record = {"mechanism": Mechanism(Poisson(0.25), 8.0, 40).to_dict(), "delta": DELTA}
  points = attacker.curve(record)
  assert points[0][0] == 0.0 and points[-1] == (1.0, 1.0)
  assert all(true >= false for false, true in points)
  slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
  assert all(later <= earlier * (1 + 1e-9) + 1e-9 for earlier, later in itertools.pairwise(slopes))


def test_epsilon_curve_ends_at_the_stated_epsilon():
  mechanism = Mechanism(Poisson(0.25), 8.0, 40)
  points = attacker.epsilon_curve({"mechanism": mechanism.to_dict(), "delta": DELTA})
  assert points[0] == (0, 0.0)
  assert points[-1] == (40, mechanism.epsilon(DELTA))
  assert all(a[1] <= b[1] for a, b in itertools.pairwise(points))
