"""P20: the stated epsilon is that of the planned steps, whatever step a run stopped at.

A run that stops when its output crosses a level tells more by when it stopped. Here that is
worked out: full batches, noise 10, 200 steps, and a unit that shifts every step by one clip norm.
The loss of a step is then N(mu^2 / 2, mu^2) with mu = 1/10, and the run stops once its sum
reaches the epsilon that would be stated for the steps so far.
"""

import functools

import numpy as np
import pytest
from scipy import stats

from dp_jax.privacy import FullBatch, Mechanism
from dp_jax.privacy.ledger import Ledger

NOISE, STEPS, DELTA = 10.0, 200, 1e-5
MECHANISM = Mechanism(FullBatch(), NOISE, STEPS)


@functools.cache
def real_delta(stated_by_stop: bool) -> float:
  """The true delta of stopping early, for the epsilon of the stop or that of the plan."""
  width, mu = 0.005, 1 / NOISE
  losses = np.arange(-4.0, 12.0, width)
  offsets = width * np.arange(-160, 161)
  step = stats.norm.pdf(offsets, mu * mu / 2, mu)
  step /= step.sum()
  running = np.zeros(losses.size)
  running[np.argmin(np.abs(losses))] = 1.0
  planned = MECHANISM.epsilon(DELTA)
  total = 0.0
  for count in range(1, STEPS + 1):
    running = np.convolve(running, step, "same")
    so_far = MECHANISM.epsilon(DELTA, steps=count)
    stops = losses >= so_far if count < STEPS else np.ones(losses.size, dtype=bool)
    epsilon = so_far if stated_by_stop else planned
    gain = np.maximum(0.0, -np.expm1(epsilon - losses[stops]))
    total += float(running[stops] @ gain)
    running = np.where(stops, 0.0, running)
  return total


def test_the_epsilon_of_the_step_where_it_stopped_is_caught():
  assert real_delta(stated_by_stop=True) == pytest.approx(9.8e-5, rel=0.03)


def test_the_planned_epsilon_holds():
  assert real_delta(stated_by_stop=False) <= DELTA


def test_what_is_stated_is_the_plan():
  ledger = Ledger()
  ledger.reserve(MECHANISM, "training", unit="record")
  # Whatever step a run reached, its account is that of the plan unless steps are asked for.
  assert ledger.epsilon(DELTA) == MECHANISM.account(DELTA).epsilon
  assert ledger.epsilon(DELTA) > ledger.epsilon(DELTA, step=50)


def test_a_restart_or_an_evaluation_never_lowers_it(tmp_path):
  path = tmp_path / "ledger.jsonl"
  first = Ledger(path)
  first.reserve(MECHANISM, "training", run="a", unit="record")
  spent = first.epsilon(DELTA)
  resumed = Ledger(path)
  resumed.reserve(MECHANISM, "training", run="a", unit="record")
  assert resumed.epsilon(DELTA) == spent
  # Started anew, with other noise, the data has paid twice.
  resumed.reserve(MECHANISM, "training", run="b", unit="record")
  twice = resumed.epsilon(DELTA)
  assert twice > spent
  # So has it for a checkpoint chosen by a private metric: that is a release.
  resumed.reserve(Mechanism(FullBatch(), 50.0, 10), "evaluation", run="b", unit="record")
  assert resumed.epsilon(DELTA) > twice
  assert not hasattr(resumed, "release") and not hasattr(resumed, "refund")
