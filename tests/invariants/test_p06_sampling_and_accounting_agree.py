"""P6: sampling and accounting come from the same Mechanism; a run has no other indices."""

import ast
import math
import pathlib

import dp_accounting
import numpy as np
import pytest

import dp_jax
from dp_jax.data.pipeline import _Parts
from dp_jax.privacy import FixedSize, FullBatch, MasterKey, Mechanism, Poisson, Stream
from dp_jax.privacy.sampling import Sampler
from dp_jax.training.agreement import agree_on_draws
from dp_jax.training.ahead import Ahead, StepInputs

PACKAGE = pathlib.Path(dp_jax.__file__).parent
NUM_UNITS, RATE, STEPS = 40, 0.25, 8000
KEY = MasterKey(bytes(range(32)))


def usage(sampler: Sampler) -> np.ndarray:
  """bool[STEPS, NUM_UNITS]: which units each step uses."""
  used = np.zeros((STEPS, NUM_UNITS), dtype=bool)
  for step in range(STEPS):
    used[step, sampler.indices(step)] = True
  return used


def draws_what_poisson_events_assume(used: np.ndarray) -> bool:
  """Whether units are used with RATE, independently of each other and from step to step.

  Each of three means is compared at 6 standard errors: below 1e-8 of false alarms together.
  """
  rate = abs(used.mean() - RATE) < 6 * math.sqrt(RATE * (1 - RATE) / used.size)
  sizes = used.sum(axis=1)
  variance = NUM_UNITS * RATE * (1 - RATE)
  spread = abs(sizes.var() / variance - 1) < 6 * math.sqrt(2 / STEPS)
  # A unit in the step after one that used it; the factor covers the dependence of such pairs.
  again = np.mean(used[1:] & used[:-1])
  repeats = abs(again - RATE**2) < 6 * math.sqrt(2 * RATE**2 / used[1:].size)
  return bool(rate and spread and repeats)


class ShuffledBatches:
  """The broken variant, and what most published code does: each epoch a permutation, cut up."""

  def indices(self, step: int) -> np.ndarray:
    per_epoch = int(1 / RATE)
    epoch, batch = divmod(step, per_epoch)
    order = np.random.Generator(np.random.Philox(epoch)).permutation(NUM_UNITS)
    return np.sort(order[batch * NUM_UNITS // per_epoch : (batch + 1) * NUM_UNITS // per_epoch])


def test_the_sampler_draws_what_the_event_says():
  mechanism = Mechanism(Poisson(RATE), 2.0, STEPS)
  event = mechanism.event().event
  assert isinstance(event, dp_accounting.PoissonSampledDpEvent)
  assert event.sampling_probability == RATE
  assert draws_what_poisson_events_assume(usage(mechanism.sampler(KEY, NUM_UNITS)))


def test_shuffled_batches_accounted_as_poisson_are_caught():
  assert not draws_what_poisson_events_assume(usage(ShuffledBatches()))


def test_fixed_batches_accounted_as_poisson_are_caught():
  fixed = Mechanism(FixedSize(10, NUM_UNITS), 2.0, STEPS, adjacency="replace_one")
  assert not draws_what_poisson_events_assume(usage(fixed.sampler(KEY, NUM_UNITS)))


def test_ordered_data_pay_per_pass():
  # What shuffled batches may claim: the epsilon of a stream, which is far from that of Poisson.
  stream = Mechanism(Stream(10, NUM_UNITS), 8.0, 400)
  full = Mechanism(FullBatch(), 8.0, 100)
  assert stream.epsilon(1e-5) == full.epsilon(1e-5)
  assert stream.epsilon(1e-5) > 1.5 * Mechanism(Poisson(RATE), 8.0, 400).epsilon(1e-5)
  used = np.zeros(NUM_UNITS, dtype=int)
  sampler = stream.sampler(KEY, NUM_UNITS)
  for step in range(stream.steps):
    used[sampler.indices(step)] += 1
  assert used.max() == stream.event().count == 100


def test_one_object_gives_both():
  # Changing what is accounted changes what is drawn, since there is nothing else to change.
  for rate in (0.1, 0.3):
    mechanism = Mechanism(Poisson(rate), 2.0, 10)
    assert mechanism.event().event.sampling_probability == mechanism.sampling.rate == rate
    drawn = np.mean([mechanism.sampler(KEY, 10**5).indices(step).size for step in range(5)]) / 10**5
    assert drawn == pytest.approx(rate, rel=0.02)


def test_what_looks_ahead_asks_for_no_step_beyond_the_plan():
  mechanism = Mechanism(Poisson(RATE), 2.0, 10)
  sampler = mechanism.sampler(KEY, NUM_UNITS)
  ahead, asked = Ahead(), []

  def inputs(step):
    asked.append(step)
    return StepInputs(sampler.indices(step), None, None, None)

  for step in range(mechanism.steps):
    ahead.take(step, mechanism.steps, inputs)
    agree_on_draws(KEY, sampler, step, mechanism.steps)
  assert asked == list(range(mechanism.steps))
  parts = _Parts(sampler.indices, range(7, mechanism.steps), NUM_UNITS, len)
  assert [parts[number] for number in range(4)][-1] is None
  with pytest.raises(ValueError, match="beyond the 10 planned"):
    ahead.take(mechanism.steps, mechanism.steps, inputs)
  # One that was told of too many steps learns it, and does not draw them.
  parts = _Parts(sampler.indices, range(10, 12), 8, len)
  with pytest.raises(ValueError, match="beyond the 10 planned"):
    parts[0]


def sources_of_indices(tree: ast.AST) -> set[str]:
  """The names in a module by which it could choose units itself."""
  random = {"permutation", "shuffle", "choice", "default_rng", "make_sampler", "poisson_indices"}
  names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
  names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
  names |= {each.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            for each in node.names}  # fmt: skip
  return names & random


def test_training_has_no_other_source_of_indices():
  files = [f for d in ("training", "parallel", "config") for f in (PACKAGE / d).rglob("*.py")]
  assert len(files) > 40
  for file in files:
    assert not sources_of_indices(ast.parse(file.read_text())), file.name
  # ... and the check sees one.
  assert sources_of_indices(ast.parse("import numpy as np\norder = np.random.permutation(9)"))
