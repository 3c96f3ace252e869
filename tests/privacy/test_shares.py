"""Several releases under one budget: shares of mu^2, and the one release that they amount to."""

import dataclasses
import math

import pytest
from scipy import stats

from dp_jax.privacy.ledger import BudgetError, Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FullBatch, Poisson
from dp_jax.privacy.shares import Part, account, calibrate_parts, joint
from dp_jax.privacy.spec import PrivacySpec

PARTS = (Part("mean", 0.03), Part("moment", 0.2, 1, 1.0), Part("gradients", 0.77, 50, 0.25))


@pytest.mark.parametrize("adjacency", ["zero_out", "add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_parts_together_meet_the_target(adjacency, epsilon):
  spec = PrivacySpec(epsilon, 1e-5, adjacency=adjacency)
  declared = 1000.0 if adjacency == "add_or_remove_one" else None
  found = calibrate_parts(spec, PARTS, declared)
  spent = account(found, spec.delta)
  assert epsilon * (1 - 1e-3) <= spent.epsilon <= epsilon
  assert spent.accountant == "analytic_gaussian"
  # Shares are of mu^2.
  mu2 = [each.steps / each.noise_multiplier**2 for each in found]
  for part, value in zip(PARTS, mu2, strict=True):
    assert value / sum(mu2) == pytest.approx(part.share)
  assert [each.clip_norm for each in found] == [part.clip_norm for part in PARTS]


def test_replace_one_doubles_the_noise():
  once, twice = (
    calibrate_parts(PrivacySpec(1.0, 1e-5, adjacency=name), PARTS)
    for name in ("zero_out", "replace_one")
  )
  for a, b in zip(once, twice, strict=True):
    assert b.noise_multiplier == pytest.approx(2 * a.noise_multiplier, rel=2e-3)


# A sum that moves by two bounds when a unit is exchanged, one by sqrt(2), one by one.
EXCHANGED = (
  Part("mean", 0.5, 1, 3.0),
  Part("moment", 0.3, 1, 2.0, 2 * math.sqrt(2)),
  Part("eigenvalue", 0.2, 4, 0.5, 0.5),
)


def _true_delta(epsilon, mechanisms, moved):
  """Of all releases together, from the densities of two Gaussians that lie mu apart.

  Balle and Wang 2018, arXiv:1805.06530, theorem 8.
  """
  steps = [each.steps * (m / each.stddev) ** 2 for each, m in zip(mechanisms, moved, strict=True)]
  mu = math.sqrt(math.fsum(steps))
  above, below = (stats.norm.cdf(-epsilon / mu + sign * mu / 2) for sign in (1, -1))
  return above - math.exp(epsilon) * below


def test_what_an_exchange_moves_less_needs_less_noise():
  spec = PrivacySpec(1.0, 1e-5, adjacency="replace_one")
  found = calibrate_parts(spec, EXCHANGED)
  # Half of what moves, so that the table's row for replace_one is that of the sum.
  assert [each.clip_norm for each in found] == [3.0, math.sqrt(2), 0.25]
  blanked = calibrate_parts(PrivacySpec(1.0, 1e-5), EXCHANGED)
  assert [each.clip_norm for each in blanked] == [3.0, 2.0, 0.5]
  factors = [a.stddev / b.stddev for a, b in zip(found, blanked, strict=True)]
  assert factors == pytest.approx([2, math.sqrt(2), 1], rel=2e-3)
  epsilon = account(found, spec.delta).epsilon
  moved = [6.0, 2 * math.sqrt(2), 0.5]
  assert 0.98 * spec.delta <= _true_delta(epsilon, found, moved) <= spec.delta
  # Broken: parts that move by twice their bound, accounted as if they moved less; by four thirds.
  assert _true_delta(epsilon, found, [6.0, 4.0, 1.0]) > 3 * spec.delta


@pytest.mark.parametrize("adjacency", ["zero_out", "add_or_remove_one"])
def test_what_an_exchange_moves_is_of_no_use_elsewhere(adjacency):
  declared = 1000.0 if adjacency == "add_or_remove_one" else None
  spec = PrivacySpec(2.0, 1e-5, adjacency=adjacency)
  plain = [dataclasses.replace(part, exchanged=None) for part in EXCHANGED]
  assert calibrate_parts(spec, EXCHANGED, declared) == calibrate_parts(spec, plain, declared)


def test_an_exchange_moves_between_one_and_two_bounds():
  for wrong in (0.49, 1.01, 0.0, -1.0, math.nan, math.inf):
    with pytest.raises(ValueError, match="exchanged of a is"):
      Part("a", 1.0, 1, 0.5, wrong)
  for right in (0.5, 1.0, 0.7):
    Part("a", 1.0, 1, 0.5, right)


def test_joint_release_is_as_private():
  spec = PrivacySpec(2.0, 1e-6)
  found = calibrate_parts(spec, PARTS)
  one = joint(found)
  assert (one.steps, one.clip_norm) == (1, 1.0)
  assert one.epsilon(spec.delta) == pytest.approx(account(found, spec.delta).epsilon, abs=1e-9)
  assert joint([one]) == one
  # The broken variant: steps of a part counted once.
  wrong = math.fsum(1 / each.noise_multiplier**2 for each in found) ** -0.5
  assert dataclasses.replace(one, noise_multiplier=wrong).epsilon(spec.delta) < 0.6 * spec.epsilon


def test_what_has_no_joint_release_is_refused():
  poisson = Mechanism(Poisson(0.1), 1.0, 1)
  with pytest.raises(ValueError, match="poisson"):
    joint([poisson])
  with pytest.raises(ValueError, match="adjacency"):
    joint([Mechanism(FullBatch(), 1.0, 1), Mechanism(FullBatch(), 1.0, 1, adjacency="replace_one")])


def test_shares_that_do_not_add_up_are_refused():
  spec = PrivacySpec(1.0, 1e-5)
  with pytest.raises(ValueError, match=r"add up to 0\.8"):
    calibrate_parts(spec, [Part("a", 0.3), Part("b", 0.5)])
  with pytest.raises(ValueError, match="must be above 0"):
    Part("a", 0.0)
  with pytest.raises(ValueError, match="repeat"):
    calibrate_parts(spec, [Part("a", 0.5), Part("a", 0.5)])
  with pytest.raises(ValueError, match="'rdp'"):
    calibrate_parts(PrivacySpec(1.0, 1e-5, accountant="rdp"), [Part("a", 1.0)])


def test_a_ledger_takes_all_parts_or_none(tmp_path):
  spec = PrivacySpec(1.0, 1e-5)
  mechanisms = {p.purpose: m for p, m in zip(PARTS, calibrate_parts(spec, PARTS), strict=True)}
  ledger = Ledger(tmp_path / "ledger.jsonl", dataclasses.replace(spec, epsilon=1.2))
  entries = ledger.reserve_all(mechanisms, run="first", unit="record")
  assert [entry["purpose"] for entry in entries] == list(mechanisms)
  assert (
    ledger.reserve_all(mechanisms, run="first", unit="record") == entries
  )  # a resumed run pays once
  assert ledger.epsilon(1e-5) <= 1.0
  before = ledger.to_list()
  with pytest.raises(BudgetError, match="over the ledger's budget"):
    ledger.reserve_all(mechanisms, run="second", unit="record")
  assert Ledger(tmp_path / "ledger.jsonl").to_list() == before


def test_a_crash_between_entries_is_made_good(tmp_path):
  spec = PrivacySpec(1.0, 1e-5)
  mechanisms = {p.purpose: m for p, m in zip(PARTS, calibrate_parts(spec, PARTS), strict=True)}
  path = tmp_path / "ledger.jsonl"
  whole = Ledger(path)
  whole.reserve_all(mechanisms, run="run", unit="record")
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:2]))
  again = Ledger(path)
  again.reserve_all(mechanisms, run="run", unit="record")
  assert again.to_list() == whole.to_list()
