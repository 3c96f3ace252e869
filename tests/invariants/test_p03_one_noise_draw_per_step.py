"""P3: one noise draw a released step, whatever the number of microbatches or devices.

On zero gradients the parameters move by the noise alone: its standard deviation is
noise_multiplier * clip_norm / expected_batch_size. With 2^18 coordinates the estimate of a
standard deviation is within 0.7% with probability above 1 - 1e-6.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.noise import add_noise
from dp_jax.training.step import build_step, init_state

DIM = 2**18
CLIP_NORM, NOISE_MULTIPLIER, EXPECTED = 2.0, 0.75, 64.0
STDDEV = CLIP_NORM * NOISE_MULTIPLIER
TOLERANCE = 0.007


def zero_loss(frozen, params, unit, key):
  del frozen, key
  return 0.0 * jnp.sum(params["w"]) * unit["x"]


@functools.cache
def _step():
  return build_step(
    zero_loss, optax.sgd(1.0), clip_norm=CLIP_NORM, stddev=STDDEV, expected_batch_size=EXPECTED,
    ema=0.0,
  )  # fmt: skip


def _sum(microbatches, sharding=None):
  state = init_state({"w": jnp.zeros(DIM)}, optax.sgd(1.0))
  total = pairs.zeros_like(state.params)
  for _ in range(microbatches):
    units = {"x": jnp.ones(8)}
    if sharding is not None:
      units = jax.device_put(units, sharding)
    total, _ = _step().accumulate(
      state.params, {}, total, units, np.ones(8, bool), np.arange(8, dtype=np.uint32),
      jax.random.key(0),
    )  # fmt: skip
  return state, total


def _ratio(moved):
  """Measured over promised standard deviation."""
  return float(np.std(np.asarray(moved, np.float64)) * EXPECTED / STDDEV)


@pytest.mark.parametrize("microbatches", [0, 1, 4, 16])
def test_noise_does_not_grow_with_microbatches(microbatches):
  state, total = _sum(microbatches)
  moved = _step().finish(state, total, jax.random.key(1)).params["w"]
  assert abs(_ratio(moved) - 1) < TOLERANCE


@pytest.mark.parametrize("devices", [2, 8])
def test_noise_does_not_grow_with_devices(devices):
  mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
  state, total = _sum(2, NamedSharding(mesh, PartitionSpec("data")))
  moved = _step().finish(state, total, jax.random.key(1)).params["w"]
  assert abs(_ratio(moved) - 1) < TOLERANCE


def test_noise_per_microbatch_is_caught():
  _, total = _sum(4)
  noised = pairs.collapse(total)
  for i in range(4):  # the broken variant
    noised = add_noise(noised, STDDEV, jax.random.key(i))
  assert abs(_ratio(noised["w"] / EXPECTED) - 1) > TOLERANCE


def test_noise_per_replica_is_caught():
  mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(),
    check_vma=False,
  )  # fmt: skip
  def each_replica(keys):  # the broken variant: each replica adds the full noise, then a psum
    noised = add_noise({"w": jnp.zeros(DIM)}, STDDEV, keys[0])
    return jax.lax.psum(noised["w"], "data")

  moved = jax.jit(each_replica)(jax.random.split(jax.random.key(0), 8)) / EXPECTED
  assert abs(_ratio(moved) - 1) > TOLERANCE


def test_the_optax_transform_draws_once_an_update_and_anew_each_time():
  import dp_jax

  transform = dp_jax.gaussian_noise(STDDEV, jax.random.key(3))
  state = transform.init({"w": jnp.zeros(DIM)})
  update = jax.jit(transform.update)
  first, state = update({"w": jnp.zeros(DIM)}, state)
  second, state = update({"w": jnp.zeros(DIM)}, state)
  assert abs(np.std(first["w"]) / STDDEV - 1) < TOLERANCE
  correlation = np.corrcoef(first["w"], second["w"])[0, 1]
  assert abs(correlation) < 5 / np.sqrt(DIM)
  assert state.count == 2
