"""How far the host is ahead: inputs made in groups, and waiting."""

import numpy as np
import pytest

from dp_jax.training import ahead
from dp_jax.training.ahead import Ahead, DispatchThrottle, StepInputs


def _inputs(made, count=10):
  def make(step):
    made.append(step)
    return StepInputs(np.full(count, step), None, None, None)

  return make


def test_each_step_is_made_once_and_none_past_the_last():
  made, kept = [], Ahead()
  for step in range(20):
    assert (kept.take(step, 20, _inputs(made)).indices == step).all()
    assert len(made) == min(20, ahead._STEPS * (1 + step // ahead._STEPS))
  assert made == list(range(20))


def test_after_a_jump_nothing_of_other_steps_is_used():
  made, kept = [], Ahead()
  kept.take(0, 100, _inputs(made))
  assert (kept.take(50, 100, _inputs(made)).indices == 50).all()
  assert (kept.take(1, 100, _inputs(made)).indices == 1).all()
  assert kept.take(100, 100, _inputs(made)).indices[0] == 100  # whoever calls past the last


def test_large_steps_are_made_one_at_a_time():
  made, kept = [], Ahead()
  for step in range(3):
    kept.take(step, 100, _inputs(made, ahead._BYTES // 8 + 1))
    assert made == list(range(step + 1))


class Result:
  """A step that takes so long; waiting for it moves the clock."""

  def __init__(self, clock, seconds):
    self.clock, self.done = clock, max(clock[1], clock[0]) + seconds
    clock[1] = self.done
    self.waited = False

  def block_until_ready(self):
    self.clock[0], self.waited = max(self.clock[0], self.done), True


def _furthest(monkeypatch, seconds, nbytes, steps=40):
  """How many steps were begun and not done, at most; after the first few."""
  clock, pace, begun, furthest = [0.0, 0.0], None, [], 0
  monkeypatch.setattr(ahead.time, "monotonic", lambda: clock[0])
  pace = DispatchThrottle()
  for step in range(steps):
    begun.append(Result(clock, seconds))
    pace.begun(begun[-1], nbytes)
    if step > 5:
      furthest = max(furthest, sum(each.done > clock[0] for each in begun))
  return furthest, sum(each.waited for each in begun)


@pytest.mark.parametrize(("seconds", "nbytes", "furthest", "waits"), [
  (1.0, 1000, 1, 39),  # long
  (0.05, None, 1, 39),  # of unknown size
  (0.05, ahead._BYTES + 1, 1, 39),  # large
  (0.05, 1000, 4, 12),  # short: at most a quarter of a second
  (0.001, 1000, ahead._STEPS - 1, 4),
  (0.001, ahead._BYTES // 3, 3, 14),
])  # fmt: skip
def test_short_and_small_steps_alone_are_begun_several_at_a_time(
  monkeypatch, seconds, nbytes, furthest, waits
):
  found = _furthest(monkeypatch, seconds, nbytes)
  assert found[0] <= furthest + 1 and found[1] == pytest.approx(waits, abs=3)
