"""Known figures, and the places where dp-accounting called plainly goes wrong."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as plain_rdp
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import special, stats

from dp_jax.privacy import FixedSize, FullBatch, Mechanism, Poisson, Stream, TruncatedPoisson
from dp_jax.privacy.accounting import losses, pld, rdp
from dp_jax.privacy.accounting.accountants import gaussian_epsilon

ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
  ("mechanism", "delta", "expected"),
  [
    (Mechanism(Poisson(256 / 60000), 1.1, 14063), 1e-5, 2.382),
    (Mechanism(Poisson(256 / 60000), 1.1, 14063, accountant="rdp"), 1e-5, 2.597),
    (Mechanism(Poisson(0.01), 1.0, 1000), 1e-5, 1.828),
    (Mechanism(Poisson(0.01), 1.0, 1000, accountant="rdp"), 1e-5, 2.101),
    (Mechanism(Poisson(0.01), 1.0, 1000, adjacency="replace_one"), 1e-5, 2.843),
    (Mechanism(FixedSize(600, 60000), 2.0, 1000, adjacency="replace_one"), 1e-5, 3.576),
    (Mechanism(TruncatedPoisson(0.01, 1000, 60000), 1.0, 1000), 1e-5, 1.828),
    (Mechanism(TruncatedPoisson(0.01, 700, 60000), 1.0, 1000), 1e-5, 1.879),
    (Mechanism(FullBatch(), 3.7306, 1), 1e-5, 1.0),
    (Mechanism(FullBatch(), 4.045, 1, accountant="rdp"), 1e-5, 1.0),
    (Mechanism(FullBatch(), 7.4612, 1, adjacency="replace_one"), 1e-5, 1.0),
    (Mechanism(Poisson(0.125), 0.8, 1000), 1e-6, 56.73),
  ],
)
def test_known_figures(mechanism, delta, expected):
  assert mechanism.epsilon(delta) == pytest.approx(expected, rel=3e-4)


def test_fixed_size_at_little_noise():
  mechanism = Mechanism(FixedSize(600, 60000), 1.0, 1000, adjacency="replace_one")
  assert mechanism.epsilon(1e-5) == pytest.approx(20.987, rel=1e-4)


@pytest.mark.parametrize(
  ("mechanism", "delta"),
  [
    (Mechanism(Poisson(0.00105), 1.0, 1), 1e-3),
    (Mechanism(Poisson(0.01), 4.0, 10), 0.5),
    (Mechanism(FullBatch(), 10.0, 1), 0.5),
    (Mechanism(FullBatch(), 10.0, 1, accountant="rdp"), 0.5),
  ],
)
def test_epsilon_is_exactly_zero(mechanism, delta):
  assert mechanism.epsilon(delta) == 0.0


@pytest.mark.parametrize(
  ("sampling", "adjacency", "accountant"),
  [
    (FullBatch(), "zero_out", "analytic_gaussian"),
    (FullBatch(), "zero_out", "pld"),
    (FullBatch(), "replace_one", "rdp"),
    (Poisson(0.01), "zero_out", "pld"),
    (Poisson(0.01), "zero_out", "rdp"),
    (TruncatedPoisson(0.01, 20, 1000), "zero_out", "pld"),
    (FixedSize(10, 100), "replace_one", "rdp"),
    (Stream(10, 100), "zero_out", "auto"),
  ],
)
def test_no_noise_has_no_bound(sampling, adjacency, accountant):
  mechanism = Mechanism(sampling, 0, 10, adjacency=adjacency, accountant=accountant)
  assert mechanism.epsilon(1e-5) == math.inf
  assert mechanism.epsilon(1e-5, steps=0) == 0.0


def test_almost_no_noise_has_an_answer():
  # dp-accounting's PLD gives none in nine minutes.
  found = Mechanism(Poisson(0.01), 0.01, 10).account(1e-5, sampler_tails=False)
  # One sampled step moves the loss to about 1 / (2 s^2) = 5000; three of ten steps are sampled
  # with a probability of 1.1e-4, four with one of 2e-6.
  assert 3 * 5000 < found.epsilon < 4 * 5000
  assert found.discretization is not None and found.discretization > pld.STANDARD_DISCRETIZATION
  assert "limits" in found.reason


def test_a_coarse_discretisation_is_pessimistic():
  event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
  found = [pld.epsilon(((event, 1000),), ADD_REMOVE, 1e-5, coarsen=c) for c in (1, 16, 256)]
  epsilons = [each.epsilon for each in found]
  assert epsilons == sorted(epsilons)
  assert epsilons[1] < 1.001 * epsilons[0]


@pytest.mark.parametrize("delta", [1e-18, 1e-12])
def test_tiny_delta_falls_back_to_rdp(delta):
  # dp-accounting's PLD returns infinity: it moves 1e-15 of the mass there.
  found = Mechanism(Poisson(0.01), 40.0, 1000).account(delta, sampler_tails=False)
  assert found.accountant == "rdp"
  assert "in place of PLD" in found.reason
  assert 0 < found.epsilon < 1


def test_tiny_delta_without_rdp_says_so():
  mechanism = Mechanism(Poisson(0.01), 40.0, 1000, adjacency="replace_one")
  found = mechanism.account(1e-18, sampler_tails=False)
  assert found.epsilon == math.inf
  assert "RDP has no such event" in found.reason


def test_rdp_below_rounding_is_not_zero():
  # Divergences of 1e-26 round to less than nothing in dp-accounting, which then claims epsilon 0;
  # but at epsilon 0 the true delta is rate * (2 Phi(1/200) - 1), 40 times the delta asked for.
  event = dp_accounting.PoissonSampledDpEvent(1e-12, dp_accounting.GaussianDpEvent(100.0))
  delta = 1e-16
  assert 1e-12 * (2 * stats.norm.cdf(1 / 200) - 1) > 30 * delta
  assert plain_rdp.RdpAccountant().compose(event).get_epsilon(delta) == 0
  assert rdp.epsilon(((event, 1),), ADD_REMOVE, delta)[0] > 0


def renyi_by_quadrature(rate, noise_multiplier, order):
  """The Renyi divergence of (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2)."""
  x = np.linspace(-15 * noise_multiplier, 15 * noise_multiplier + 2 * order, 200_001)
  log_ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * noise_multiplier**2))
  density = stats.norm.logpdf(x, scale=noise_multiplier)
  total = special.logsumexp(order * log_ratio + density, b=x[1] - x[0])
  return total / (order - 1)


@pytest.mark.parametrize(("rate", "noise_multiplier"), [(0.1, 2.0), (0.01, 14.0), (0.3, 30.0)])
def test_renyi_divergences_are_bounds_and_tight(rate, noise_multiplier, caplog):
  # At the last two settings dp-accounting drops most fractional orders, with a warning each.
  event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
  found = dict(zip(rdp.ORDERS.tolist(), rdp.renyi_divergences(event, ADD_REMOVE), strict=True))
  assert not caplog.records
  for order in (2.0, 3.5, 6.5, 10.5, 32.0):
    exact = renyi_by_quadrature(rate, noise_multiplier, order)
    assert found[order] >= exact - 1e-11
    assert found[order] <= 1.06 * exact + 1e-11


def test_more_steps_than_a_distribution_can_compose():
  found = Mechanism(Poisson(1e-3), 10.0, 10**10).account(0.4)
  assert found.accountant == "rdp" and "beyond PLD" in found.reason
  found = Mechanism(Poisson(1e-3), 10.0, 10**10, adjacency="replace_one").account(0.4)
  assert found.epsilon == math.inf
  # Without subsampling any number is one release with less noise.
  found = Mechanism(FullBatch(), 1e6, 10**10, accountant="pld").account(0.4)
  assert found.accountant == "pld" and math.isfinite(found.epsilon)


def test_many_steps_of_few_points_do_not_explode():
  # dp-accounting would compute (number of points) ** steps as a whole number.
  found = Mechanism(Poisson(1e-4), 10.0, 10**6).account(1e-5)
  assert found.accountant == "pld"
  assert found.epsilon == pytest.approx(0.0276, rel=1e-2)
  assert found.epsilon <= Mechanism(Poisson(1e-4), 10.0, 10**6, accountant="rdp").epsilon(1e-5)


@pytest.mark.parametrize(
  ("event", "count", "relation"),
  [
    (dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000, None),
    (dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(4.0)), 50, None),
    (dp_accounting.GaussianDpEvent(2.0), 9, None),
    (
      dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)),
      100,
      NeighboringRelation.REPLACE_ONE,
    ),
    (
      dp_accounting.TruncatedSubsampledGaussianDpEvent(6000, 0.01, 70, 1.0),
      100,
      NeighboringRelation.REPLACE_SPECIAL,
    ),
  ],
)
def test_predicted_size_of_a_loss_distribution(event, count, relation):
  relation = relation or ADD_REMOVE
  shape = losses.loss_shape(event, count, relation)
  step = 1e-3
  composed = pld._distribution(event, count, relation, step)._pmf_remove
  assert 0.2 * shape.composed < composed.size * step < 1.3 * shape.composed + 10 * step
  if not isinstance(event, dp_accounting.GaussianDpEvent):
    single = pld._distribution(event, 1, relation, step)._pmf_remove
    assert single.size * step < 1.3 * shape.single + 10 * step


@pytest.mark.parametrize("noise_multiplier", [0.3, 0.02])
def test_size_is_bounded_whatever_the_noise(noise_multiplier):
  event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(noise_multiplier))
  shape = losses.loss_shape(event, 100_000, ADD_REMOVE)
  step = pld.discretization([shape], [100_000])
  assert shape.single / step <= pld._MAX_SINGLE_POINTS
  assert shape.composed / step <= pld._MAX_COMPOSED_POINTS


def test_gaussian_composition_is_rounded_up():
  event = dp_accounting.GaussianDpEvent(10.0)
  found = gaussian_epsilon(((event, 25),), 1e-6)
  exact = dp_accounting.get_epsilon_gaussian(2.0, 1e-6)
  assert exact < found < exact * (1 + 1e-9)


@pytest.mark.parametrize("mu", [6.6e8, 4.8e8, 1e10, 1e100])
def test_gaussians_that_reveal_everything_are_not_flattered(mu):
  # The median of the loss is mu^2 / 2, so at delta 0.3 no epsilon lies below it; the root that
  # dp-accounting finds does, where a double no longer resolves the curve.
  event = dp_accounting.GaussianDpEvent(1 / mu)
  found = gaussian_epsilon(((event, 1),), 0.3)
  assert mu / 2 * mu <= found * (1 + 1e-15) < mu / 2 * mu * (1 + 1e-8)


@pytest.mark.parametrize("noise_multiplier", [1e-320, 1e-200, 1e-155, 1e155, 1e200, 1e300])
def test_noise_of_any_size_has_an_answer(noise_multiplier):
  # The square of such a number is no double: it raises, or vanishes.
  mechanism = Mechanism(FullBatch(), noise_multiplier, 5)
  found = mechanism.account(1e-5, sampler_tails=False)
  assert found.epsilon == (math.inf if noise_multiplier < 1 else 0.0)


def test_deterministic_to_the_last_bit():
  event = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5))
  found = []
  for _ in range(2):
    pld._compose.cache_clear()
    found.append(pld.epsilon(((event, 300),), ADD_REMOVE, 1e-5).epsilon)
  assert found[0] == found[1]


def test_account_records_how():
  found = Mechanism(Poisson(0.02), 2.0, 100).account(1e-5)
  assert found.accountant == "pld"
  assert found.library_version.startswith("dp-accounting 0.")
  assert found.delta == 1e-5
  assert 0 <= found.tail_delta < 1e-12
  assert found.to_dict()["discretization"] == found.discretization
