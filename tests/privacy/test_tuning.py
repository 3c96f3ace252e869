"""The best of a random number of runs: its epsilon, and the number of runs."""

import json
import math

import numpy as np
import pytest
from dp_accounting import rdp
from scipy import stats

from dp_jax.privacy import FixedSize, FullBatch, MasterKey, Mechanism, Poisson, TruncatedPoisson
from dp_jax.privacy.tuning import Selection, account_selection

RUN = Mechanism(Poisson(0.01), 1.0, 1000)
SHAPES = [0.0, 0.5, 1.0, 3.0, math.inf]


@pytest.mark.parametrize("shape", SHAPES)
def test_epsilon_is_that_of_the_event(shape):
  found = account_selection(RUN, Selection(10.0, shape), 1e-5)
  event = Selection(10.0, shape).event(RUN)
  by_hand = rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
  assert found.epsilon == pytest.approx(by_hand, rel=1e-6)
  assert found.epsilon >= by_hand
  assert found.accountant == "rdp" and "best of 10 runs" in found.reason


def test_selection_costs_more_than_one_run_and_less_than_all():
  one = Mechanism(Poisson(0.01), 1.0, 1000, accountant="rdp").epsilon(1e-5)
  best = [account_selection(RUN, Selection(mean), 1e-5).epsilon for mean in (1, 3, 10, 100)]
  assert best == sorted(best)
  assert one < best[0]
  ten = Mechanism(Poisson(0.01), 1.0, 10_000, accountant="rdp").epsilon(1e-5)
  assert best[2] < ten


def test_other_mechanisms():
  fixed = Mechanism(FixedSize(60, 6000), 4.0, 100, adjacency="replace_one")
  full = Mechanism(FullBatch(), 8.0, 1, adjacency="replace_one")
  for mechanism in (fixed, full):
    assert account_selection(mechanism, Selection(5.0), 1e-5).epsilon > mechanism.epsilon(1e-5)
  truncated = Mechanism(TruncatedPoisson(0.1, 40, 200), 3.0, 10)
  with pytest.raises(ValueError, match="RDP, which has no event for truncated_poisson"):
    account_selection(truncated, Selection(5.0), 1e-5)


def draws(selection, count):
  return np.array([selection.draw(MasterKey(each.to_bytes(32, "big"))) for each in range(count)])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_runs_has_its_mean(shape):
  count = 4000
  drawn = draws(Selection(4.0, shape), count)
  # At 5.33 standard errors, 1e-7 of false alarms (the keys are fixed, so it does not flicker).
  assert abs(drawn.mean() - 4.0) < 5.33 * drawn.std() / math.sqrt(count)
  assert drawn.min() == (0 if math.isinf(shape) else 1)


def test_shape_one_is_geometric():
  drawn = draws(Selection(4.0, 1.0), 4000)
  observed = [np.sum(drawn == k) for k in range(1, 9)] + [np.sum(drawn > 8)]
  expected = [0.25 * 0.75 ** (k - 1) for k in range(1, 9)] + [0.75**8]
  assert stats.chisquare(observed, 4000 * np.array(expected)).pvalue > 1e-7


def test_the_number_is_a_function_of_the_key():
  key = MasterKey(bytes(range(32)))
  assert Selection(50.0, 1.0).draw(key) == Selection(50.0, 1.0).draw(key)
  assert Selection(1.0, 1.0).draw(key) == 1


@pytest.mark.parametrize("selection", [Selection(3.0), Selection(2.5, 0.0), Selection(2, math.inf)])
def test_round_trip_through_json(selection):
  assert Selection.from_dict(json.loads(json.dumps(selection.to_dict()))) == selection


@pytest.mark.parametrize(
  ("mean", "shape"), [(0.5, 1.0), (0, 1.0), (math.inf, 1.0), (True, 1.0), (3, -1), (3, math.nan)]
)
def test_bad_parameters(mean, shape):
  with pytest.raises(ValueError, match=" is "):
    Selection(mean, shape)
