"""P2: sum, never mean. The divisor is a public constant, never the realised batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dp_jax.config.run_config import Config
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step, init_state

DIM = 4


def linear_loss(frozen, params, unit, key):
  """Its gradient is the unit itself."""
  del frozen, key
  return jnp.dot(params["w"], unit["x"])


@functools.cache
def _step():
  return build_step(
    linear_loss, optax.sgd(1.0), clip_norm=10.0, stddev=1e-6, expected_batch_size=8.0, ema=0.0
  )


def _update(num_real):
  """The parameters' move when `num_real` units, all (1, 0, 0, 0), were drawn."""
  state = init_state({"w": jnp.zeros(DIM)}, optax.sgd(1.0))
  units = {"x": jnp.zeros((16, DIM)).at[:, 0].set(1.0)}
  total, _ = _step().accumulate(
    state.params, {}, _step().zeros(state.params), units, np.arange(16) < num_real,
    np.arange(16, dtype=np.uint32), jax.random.key(0),
  )  # fmt: skip
  return -np.asarray(_step().finish(state, total, jax.random.key(1)).params["w"])


def _update_divided_by_realised_batch(num_real):
  """The broken variant."""
  return _update(num_real) * 8.0 / max(num_real, 1)


def _moves_with_each_unit(update):
  moves = [update(n)[0] for n in (1, 2, 5, 16)]
  return np.allclose(moves, np.array([1, 2, 5, 16]) / 8, atol=1e-4)


def test_the_update_is_the_sum_over_a_constant():
  assert _moves_with_each_unit(_update)


def test_dividing_by_the_realised_batch_is_caught():
  assert not _moves_with_each_unit(_update_divided_by_realised_batch)


def _config(**privacy):
  return Config.from_dict({
    "data": {"source": "digits", "declared": "private"},
    "train": {"steps": 2},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, **privacy},
  })  # fmt: skip


def test_the_trainer_takes_the_divisor_from_rate_and_n_or_from_the_declaration():
  run = prepare(_config(sampling_rate=0.25))
  assert run.expected_batch_size == 0.25 * run.loader.num_units
  declared = prepare(
    _config(adjacency="add_or_remove_one", sampling_rate=0.25, expected_batch_size=350)
  )
  assert declared.expected_batch_size == 350


@pytest.mark.parametrize("given", [{"sampling_rate": 0.25}, {"expected_batch_size": 350}])
def test_add_or_remove_one_refuses_a_divisor_derived_from_the_data(given):
  with pytest.raises(ValueError, match="declare both"):
    prepare(_config(adjacency="add_or_remove_one", **given))
