"""P4, and P1, P2, P3, P11 where the training loop puts the parts together.

The loop itself runs on a task whose gradients are zero, or one huge unit, with a clip norm that is
not 1 and two leaves of one shape. On zero gradients parameters move by the noise alone. Estimates
from 2^16 coordinates; the tolerances are six standard errors, so false alarms are below 1e-6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_config

from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.loop import Loop
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state

DIM, CLIP_NORM = 2**16, 0.37
KEY = MasterKey(bytes(range(32)))


@dataclasses.dataclass(frozen=True)
class Linear:
  """A task whose gradient is `size` in the first entry of leaf "a" for unit 0, else zero."""

  size: float = 0.0

  def loss(self, frozen, params, unit, key):
    del frozen, key
    # The label stands for the unit's number; the gradient in "b" is zero but for rounding.
    is_process_0 = jnp.all(unit["inputs"] == 0) & (unit["label"][0] == 0)
    return params["a"][0] * jnp.where(is_process_0, self.size, 0.0) + 0.0 * jnp.sum(params["b"])

  def made_up_units(self, count, max_records_per_unit):
    del max_records_per_unit
    return Loader().load(np.arange(count), count)[0]


class Loader:
  """Units that hold nothing but their number."""

  num_units = 200
  max_records_per_unit = 1
  bad_records: dict[int, str] = {}  # noqa: RUF012

  def load(self, indices, size):
    labels = np.zeros((size, 1), np.int32)
    labels[: len(indices), 0] = indices
    units = {"inputs": np.zeros((size, 1)), "label": labels, "record_mask": labels >= 0}
    return units, np.arange(size) < len(indices)


@pytest.fixture(scope="module")
def run():
  config = small_config(privacy__clip_norm=CLIP_NORM, privacy__sampling="full_batch",
                        privacy__sampling_rate=None, train__engine="vmap")  # fmt: skip
  params = {"a": jnp.zeros(DIM), "b": jnp.zeros(DIM)}
  return dataclasses.replace(
    prepare(config), task=Linear(), params=params, frozen={}, loader=Loader(),
    optimizer=optax.sgd(1.0),
  )  # fmt: skip


def _moves(run, tmp_path, steps, key=KEY, mutate=lambda loop: loop):
  """How each leaf moved in each step, times the divisor: noised sums, float64[steps, 2, DIM]."""
  folder = WorkDir(tmp_path)
  folder.private.mkdir(exist_ok=True)
  loop = mutate(loop_module._loop(run, folder, key))
  state = init_state(run.params, run.optimizer, run.mesh)
  before, moves = np.zeros((2, DIM)), []
  for step in range(steps):
    state = loop.step(state, step)
    after = np.stack([np.asarray(state.params[name], np.float64) for name in ("a", "b")])
    moves.append((before - after) * run.expected_batch_size)
    before = after
  return np.stack(moves)


def _problems(sums, stddev):
  """What is wrong with noised sums of zero gradients."""
  tolerance = 6 / np.sqrt(DIM)
  found = []
  if np.abs(sums.std(axis=2) / stddev - 1).max() > tolerance:
    found.append("scale")
  flat = sums.reshape(-1, DIM)
  correlations = np.corrcoef(flat) - np.eye(len(flat))
  if np.abs(correlations).max() > tolerance:
    found.append("rows")
  neighbours = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in flat]
  if np.abs(neighbours).max() > tolerance:
    found.append("coordinates")
  return found


def test_noise_has_its_scale_and_is_independent_across_leaves_coordinates_and_steps(run, tmp_path):
  assert run.mechanism.stddev == run.mechanism.noise_multiplier * CLIP_NORM
  assert _problems(_moves(run, tmp_path, 3), run.mechanism.stddev) == []


def _same_key_each_step(monkeypatch):
  original = loop_module.step_key
  monkeypatch.setattr(loop_module, "step_key", lambda key, purpose, step: original(key, purpose, 0))


def _same_key_each_leaf(monkeypatch):
  monkeypatch.setattr(jax.random, "fold_in", lambda key, data: key)


def _clip_norm_forgotten(monkeypatch):
  original = loop_module.build_step

  def build_step(*args, stddev, **kwargs):
    return original(*args, stddev=stddev / CLIP_NORM, **kwargs)

  monkeypatch.setattr(loop_module, "build_step", build_step)


@pytest.mark.parametrize(("variant", "found"), [
  (_same_key_each_step, "rows"),
  (_same_key_each_leaf, "rows"),
  (_clip_norm_forgotten, "scale"),
])  # fmt: skip
def test_broken_variants_are_caught(run, tmp_path, monkeypatch, variant, found):
  variant(monkeypatch)
  assert found in _problems(_moves(run, tmp_path, 3), run.mechanism.stddev)


def test_one_key_closed_over_under_vmap_is_caught():
  """The error of published solvers: every class gets the same noise."""
  key = jax.random.key(0)
  sums = jax.vmap(lambda total: total + jax.random.normal(key, total.shape))(jnp.zeros((2, DIM)))
  assert "rows" in _problems(np.asarray(sums, np.float64)[None], 1.0)


def _distance_of_neighbours(run, tmp_path, size):
  """How far one unit of that gradient moves the noised sum, with the same key, in clip norms."""
  with_unit = dataclasses.replace(run, task=Linear(size))
  difference = _moves(with_unit, tmp_path, 1) - _moves(run, tmp_path, 1)
  return np.linalg.norm(difference) / CLIP_NORM


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6, 1e30, 1e38])
def test_one_unit_moves_the_noised_sum_by_at_most_the_clip_norm(run, tmp_path, size):
  grid = 2.0**-14 * run.mechanism.stddev / CLIP_NORM
  assert _distance_of_neighbours(run, tmp_path, size) <= 1 + grid


def test_clipping_at_twice_the_norm_is_caught(run, tmp_path, monkeypatch):
  original = loop_module.build_step

  def build_step(*args, clip_norm, **kwargs):
    return original(*args, clip_norm=2 * clip_norm, **kwargs)

  monkeypatch.setattr(loop_module, "build_step", build_step)
  assert _distance_of_neighbours(run, tmp_path, 1e6) > 1.5


def test_the_divisor_of_the_loop_does_not_follow_the_batch(run, tmp_path):
  """P2: with one of 200 units drawn, its contribution is divided by 200 all the same."""
  one = Loop._microbatches

  def only_first(loop):
    sampler = dataclasses.replace(loop.sampler, indices=lambda step: np.array([0]))
    return dataclasses.replace(loop, sampler=sampler)

  assert Loop._microbatches is one
  with_unit = dataclasses.replace(run, task=Linear(1e6))
  moved = _moves(with_unit, tmp_path, 1, mutate=only_first)
  noise = _moves(run, tmp_path, 1, mutate=only_first)
  np.testing.assert_allclose((moved - noise)[0, 0, 0], CLIP_NORM, rtol=2e-3)


def test_no_key_is_compiled_into_the_step(run, tmp_path):
  """P11: the words of the noise key stand nowhere in the compiled halves of a step."""
  loop = loop_module._loop(run, WorkDir(tmp_path), KEY)
  state = init_state(run.params, run.optimizer, run.mesh)
  from dp_jax.gradients.noise.jax_keys import step_key

  key = step_key(loop.key, "noise", 0)
  text = loop.functions.finish.lower(state, loop.functions.zeros(run.params), key).as_text("hlo")
  closed = jax.jit(lambda s, t: loop.functions.finish(s, t, key))
  leaked = closed.lower(state, loop.functions.zeros(run.params)).as_text("hlo")
  words = [str(word) for word in np.asarray(jax.random.key_data(key))]
  assert not any(word in text for word in words)
  assert all(word in leaked for word in words)
