"""Several mechanisms on the same data, with and without a common accountant."""

import math

import dp_accounting
import pytest
from dp_accounting import pld
from dp_accounting.privacy_accountant import NeighboringRelation as Relation

from dp_jax.privacy import (
  FixedSize,
  FullBatch,
  Mechanism,
  Poisson,
  SamplerTailError,
  Stream,
  TruncatedPoisson,
)
from dp_jax.privacy.accounting.composition import PlannedRelease, account_releases
from dp_jax.privacy.tuning import Selection

DELTA = 1e-5
FULL = Mechanism(FullBatch(), 5.0, 3)
POISSON = Mechanism(Poisson(0.1), 3.0, 20)
TRUNCATED = Mechanism(TruncatedPoisson(0.1, 60, 200), 3.0, 20)
STREAM = Mechanism(Stream(10, 200), 6.0, 30)


def together(*mechanisms):
  return account_releases([PlannedRelease(each) for each in mechanisms], DELTA)


def test_gaussians_compose_exactly():
  found = together(FULL, STREAM)
  # Three releases at 5 and two passes at 6: mu^2 = 3 / 25 + 2 / 36.
  noise = (3 / 25 + 2 / 36) ** -0.5
  assert found.accountant == "analytic_gaussian"
  assert found.epsilon == pytest.approx(dp_accounting.get_epsilon_gaussian(noise, DELTA), rel=1e-9)


def test_pld_composes_what_it_has():
  found = together(FULL, POISSON)
  accountant = pld.PLDAccountant()
  accountant.compose(FULL.event()).compose(POISSON.event())
  assert found.accountant == "pld"
  assert found.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)
  assert found.epsilon < FULL.epsilon(DELTA) + POISSON.epsilon(DELTA)


def test_truncated_batches_share_pld():
  found = together(POISSON, TRUNCATED)
  double = Mechanism(Poisson(0.1), 3.0, 40).epsilon(DELTA)
  assert found.accountant == "pld"
  assert double * (1 - 1e-4) <= found.epsilon < 1.01 * double


def test_replace_one_is_doubled_once():
  full = Mechanism(FullBatch(), 8.0, 1, adjacency="replace_one")
  poisson = Mechanism(Poisson(0.1), 3.0, 20, adjacency="replace_one")
  accountant = pld.PLDAccountant(Relation.REPLACE_ONE)
  accountant.compose(dp_accounting.GaussianDpEvent(8.0)).compose(poisson.event())
  assert together(full, poisson).epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)
  # Alone, PLD's own doubling and the halved noise agree.
  alone = pld.PLDAccountant(Relation.REPLACE_ONE).compose(dp_accounting.GaussianDpEvent(8.0))
  assert full.epsilon(DELTA) == pytest.approx(alone.get_epsilon(DELTA), rel=1e-4)


def test_rdp_composes_what_it_has():
  fixed = Mechanism(FixedSize(20, 200), 6.0, 20, adjacency="replace_one")
  full = Mechanism(FullBatch(), 8.0, 1, adjacency="replace_one")
  found = together(fixed, full)
  assert found.accountant == "rdp"
  assert max(fixed.epsilon(DELTA), full.epsilon(DELTA)) < found.epsilon
  assert found.epsilon < fixed.epsilon(DELTA) + full.epsilon(DELTA)


def test_without_a_common_accountant_epsilons_and_deltas_add():
  selection = PlannedRelease(FULL, None, Selection(3.0))
  found = account_releases([PlannedRelease(TRUNCATED), selection], DELTA)
  assert found.accountant == "pld+rdp"
  assert "epsilons add" in found.reason
  halves = [
    account_releases([each], DELTA / 2).epsilon for each in (PlannedRelease(TRUNCATED), selection)
  ]
  assert found.epsilon <= sum(halves) * (1 + 1e-6)
  wholes = [
    account_releases([each], DELTA).epsilon for each in (PlannedRelease(TRUNCATED), selection)
  ]
  assert found.epsilon > sum(wholes) * 0.95


def test_fixed_size_and_poisson_under_replace_one_add():
  fixed = Mechanism(FixedSize(20, 200), 6.0, 20, adjacency="replace_one")
  poisson = Mechanism(Poisson(0.1), 3.0, 20, adjacency="replace_one")
  assert together(fixed, poisson).accountant == "pld+rdp"


def test_nothing_and_parts_of_a_release():
  assert account_releases([], DELTA).epsilon == 0.0
  assert account_releases([PlannedRelease(FULL, 0)], DELTA).epsilon == 0.0
  one = account_releases([PlannedRelease(POISSON, 5), PlannedRelease(POISSON, 6)], DELTA).epsilon
  assert one == pytest.approx(POISSON.epsilon(DELTA, 11), rel=1e-9)


def test_adjacencies_do_not_mix():
  with pytest.raises(ValueError, match="no common guarantee"):
    together(FULL, Mechanism(FullBatch(), 5.0, 1, adjacency="replace_one"))


def test_residuals_of_the_sampler_add_up():
  small = Mechanism(FullBatch(), 0.3, 1)
  one = small.tail_delta()
  delta = 150 * one
  small.account(delta)
  with pytest.raises(SamplerTailError):
    account_releases([PlannedRelease(small), PlannedRelease(small)], delta)


def test_no_noise_anywhere_has_no_bound():
  assert together(POISSON, Mechanism(Poisson(0.1), 0.0, 1)).epsilon == math.inf
