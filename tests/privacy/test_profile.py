"""The privacy profile against closed forms and against the accountants."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from dp_jax.privacy.accounting import pld
from dp_jax.privacy.accounting.profile import privacy_profile
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FixedSize, FullBatch, Poisson

DELTA = 1e-5


def gaussian_delta(epsilon: float, mu: float) -> float:
  """Delta of the Gaussian mechanism. Balle and Wang 2018, arXiv:1805.06530, Theorem 8."""
  first = stats.norm.cdf(mu / 2 - epsilon / mu)
  return float(first - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("accountant", ["analytic_gaussian", "pld"])
def test_full_batch_lies_on_the_gaussian_curve(accountant):
  mechanism = Mechanism(FullBatch(), 8.0, 16, accountant=accountant)
  mu = math.sqrt(16) / 8.0
  pairs = privacy_profile(mechanism, DELTA)
  assert len(pairs) > 40
  for epsilon, delta in pairs:
    exact = gaussian_delta(epsilon, mu)
    assert delta >= exact * (1 - 1e-9)  # never below: it is a bound
    if epsilon > 0 and delta > 1e-8:
      assert delta == pytest.approx(exact, rel=2e-3, abs=1e-9)


@pytest.mark.parametrize(
  "mechanism",
  [
    Mechanism(Poisson(0.25), 8.0, 80),
    Mechanism(Poisson(0.25), 8.0, 80, accountant="rdp"),
    Mechanism(Poisson(0.05), 2.0, 20, adjacency="replace_one"),
    Mechanism(FixedSize(60, 600), 4.0, 50, adjacency="replace_one"),
  ],
  ids=lambda mechanism: f"{mechanism.sampling.name}-{mechanism.adjacency}-{mechanism.accountant}",
)
def test_pairs_agree_with_the_accountant(mechanism):
  pairs = privacy_profile(mechanism, DELTA)
  epsilons = np.array([epsilon for epsilon, _ in pairs])
  deltas = np.array([delta for _, delta in pairs])
  assert np.all(np.diff(epsilons) >= 0)
  assert np.all(np.diff(deltas) <= 0)
  stated = mechanism.epsilon(DELTA)
  at_stated = float(np.interp(stated, epsilons, np.log(deltas)))
  assert at_stated == pytest.approx(math.log(DELTA), abs=0.05)
  for epsilon, delta in pairs[5:-5:20]:
    if DELTA < delta < 0.9:
      assert mechanism.epsilon(delta) == pytest.approx(epsilon, rel=5e-3, abs=1e-3)


def test_a_delta_too_small_for_a_distribution_has_a_profile_of_one(monkeypatch):
  """Where the stated epsilon fell back to RDP, a distribution is asked once, not 81 times."""
  mechanism, delta = Mechanism(Poisson(0.003), 8.0, 2000), 1e-10
  asked = []
  epsilon_of = pld.epsilon

  def counting(*args):
    asked.append(args)
    return epsilon_of(*args)

  monkeypatch.setattr(pld, "epsilon", counting)
  pairs = privacy_profile(mechanism, delta)
  assert mechanism.account(delta).accountant == "rdp"
  assert len(asked) <= 2
  assert pairs[-1] == (mechanism.epsilon(delta), delta)
  epsilons, deltas = np.array(pairs).T
  assert np.all(np.diff(epsilons) > 0) and np.all(np.diff(deltas) <= 0)
  # No looser than RDP where the attacker's curve is decided.
  for epsilon, each in pairs[::8]:
    if each > 1e-6:
      assert dataclasses.replace(mechanism, accountant="rdp").epsilon(each) >= epsilon
