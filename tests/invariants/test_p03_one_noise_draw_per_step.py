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
from jax.sharding import PartitionSpec

from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.parallel.mesh import AXES, build_mesh
from dp_jax.training.step import build_step, init_state

DIM = 2**18
CLIP_NORM, NOISE_MULTIPLIER, EXPECTED = 2.0, 0.75, 64.0
STDDEV = CLIP_NORM * NOISE_MULTIPLIER
TOLERANCE = 0.007


def zero_loss(frozen, params, unit, key):
  del frozen, key
  return 0.0 * jnp.sum(params["w"]) * unit["x"]


@functools.cache
def _step(mesh="data:1"):
  return build_step(
    zero_loss, optax.sgd(1.0), clip_norm=CLIP_NORM, stddev=STDDEV, expected_batch_size=EXPECTED,
    ema=0.0, mesh=build_mesh(mesh),
  )  # fmt: skip


def _sum(microbatches, mesh="data:1"):
  state = init_state({"w": jnp.zeros(DIM)}, optax.sgd(1.0), build_mesh(mesh))
  total = _step(mesh).zeros(state.params)
  for _ in range(microbatches):
    total, _ = _step(mesh).accumulate(
      state.params, {}, total, {"x": np.ones(8, np.float32)}, np.ones(8, bool),
      np.arange(8, dtype=np.uint32), jax.random.key(0),
    )  # fmt: skip
  return state, total


def _moved(microbatches, mesh="data:1", key=1):
  state, total = _sum(microbatches, mesh)
  return np.asarray(_step(mesh).finish(state, total, jax.random.key(key)).params["w"])


def _ratio(moved):
  """Measured over promised standard deviation."""
  return float(np.std(np.asarray(moved, np.float64)) * EXPECTED / STDDEV)


MESHES = ["data:1", "data:2", "data:8", "data:4,fsdp:2", "fsdp:8"]


@pytest.mark.parametrize("microbatches", [0, 1, 4, 16])
@pytest.mark.parametrize("mesh", MESHES)
def test_noise_grows_neither_with_microbatches_nor_with_devices(mesh, microbatches):
  moved = _moved(microbatches, mesh)
  assert abs(_ratio(moved) - 1) < TOLERANCE
  # Of the same key, it is the same noise: no device draws another, and none draws twice.
  np.testing.assert_array_equal(moved, _moved(0))
  assert not np.array_equal(moved, _moved(0, key=2))


def test_noise_per_microbatch_is_caught():
  noised = {"w": jnp.zeros(DIM)}
  for i in range(4):  # the broken variant
    noised = add_noise(noised, STDDEV, jax.random.key(i))
  assert abs(_ratio(noised["w"] / EXPECTED) - 1) > TOLERANCE


@pytest.mark.parametrize("one_key", [True, False], ids=["one key", "a key each"])
@pytest.mark.parametrize("mesh", ["data:2", "data:8"])
def test_noise_per_replica_is_caught(mesh, one_key):
  """The broken variant: each replica adds the full noise to its own sum, before the all-reduce."""
  mesh = build_mesh(mesh)

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec(),
    check_vma=False,
  )  # fmt: skip
  def each_replica(keys):
    noised = add_noise({"w": jnp.zeros(DIM)}, STDDEV, keys[0])
    return jax.lax.psum(noised["w"], AXES)

  keys = jax.random.split(jax.random.key(0), mesh.size)
  moved = jax.jit(each_replica)(keys[np.zeros(mesh.size, int)] if one_key else keys) / EXPECTED
  assert abs(_ratio(moved) - 1) > 0.4


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
