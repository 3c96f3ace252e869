"""P9: microbatch size, engine and device count change the result only by rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dp_jax
from dp_jax.gradients.ghost import rounding

UNITS = 16
RNG = np.random.default_rng(0)
PARAMS = {
  "w": jnp.asarray(0.3 * RNG.standard_normal((8, 16)), jnp.float32),
  "b": jnp.asarray(0.3 * RNG.standard_normal(16), jnp.float32),
  "out": jnp.asarray(0.3 * RNG.standard_normal((16, 8)), jnp.float32),
}
X = jnp.asarray(RNG.standard_normal((UNITS, 4, 8)), jnp.float32)
MASK = jnp.arange(UNITS) != 5
KEY = jax.random.key(7)
STDDEV = 0.5


def loss_fn(params, unit, key):
  noisy = unit + 0.1 * jax.random.normal(key, unit.shape)
  return jnp.sum(jnp.tanh(jnp.tanh(noisy @ params["w"] + params["b"]) @ params["out"]) ** 2)


def _step(grad_fn, params, units, mask):
  """(sum, noise, noised sum): each as the trainer would compute it."""
  total, _ = grad_fn(params, units, mask, jax.random.key(1))
  zeros = jax.tree.map(jnp.zeros_like, total)
  return total, dp_jax.add_noise(zeros, STDDEV, KEY), dp_jax.add_noise(total, STDDEV, KEY)


def _grad_fn(engine="ghost", microbatch_size=None):
  return dp_jax.clipped_grad(loss_fn, 1.0, engine=engine, microbatch_size=microbatch_size)


@functools.cache
def _reference(engine="vmap"):
  return jax.jit(functools.partial(_step, _grad_fn(engine)))(PARAMS, X, MASK)


def _mesh(devices, axis_type=AxisType.Auto):
  fsdp = min(2, devices)
  return jax.make_mesh((devices // fsdp, fsdp), ("data", "fsdp"), (axis_type,) * 2,
                       devices=jax.devices()[:devices])  # fmt: skip


def _sharded(mesh):
  """Units over all devices, parameters over one axis."""
  params = {
    name: jax.device_put(x, NamedSharding(mesh, P("fsdp", *(None,) * (x.ndim - 1))))
    for name, x in PARAMS.items()
  }
  over_data = NamedSharding(mesh, P("data"))
  return params, jax.device_put(X, over_data), jax.device_put(MASK, over_data)


def _flat(tree):
  return np.concatenate([np.asarray(tree[name], np.float64).reshape(-1) for name in PARAMS])


def _assert_same(found, expected, tolerance=1e-6):
  (total, noise, noised), (other, same_noise, same_noised) = found, expected
  scale = np.linalg.norm(_flat(other))
  assert np.linalg.norm(_flat(total) - _flat(other)) <= tolerance * scale
  np.testing.assert_array_equal(_flat(noise), _flat(same_noise))
  # Both are rounded to the grid of the noise, 2^-14 of STDDEV here: two sums that differ in their
  # rounding are a step of it apart where it lies between them, which is the chance of that.
  apart = np.abs(_flat(noised) - _flat(same_noised)) / (STDDEV * 2**-14)
  assert set(np.unique(apart)) <= {0.0, 1.0}
  assert apart.mean() <= 2 * tolerance * scale / (STDDEV * 2**-14) + 5 / len(apart)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "auto", "loop"])
@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 8])
def test_engines_and_microbatches(engine, microbatch_size):
  found = jax.jit(functools.partial(_step, _grad_fn(engine, microbatch_size)))(PARAMS, X, MASK)
  _assert_same(found, _reference("vmap" if engine in ("vmap", "loop") else "ghost"))
  # Between engines: norms of the ghost engine are above by a rounding bound.
  _assert_same(found, _reference(), 1e-5)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_devices(engine, devices):
  step = jax.jit(functools.partial(_step, _grad_fn(engine)))
  found = step(*_sharded(_mesh(devices)))
  assert len(found[0]["w"].sharding.device_set) == devices
  _assert_same(found, _reference(engine))


def test_microbatches_on_devices():
  step = jax.jit(functools.partial(_step, _grad_fn("ghost", 8)))
  _assert_same(step(*_sharded(_mesh(8))), _reference("ghost"))


def test_a_sum_that_each_device_clips_is_caught():
  """The broken variant: the gradient of a device's mean is clipped, not each unit's."""

  def broken(params, units, mask):
    groups = units.reshape(8, 2, *units.shape[1:])

    def loss(params, group, key):
      keys = jax.random.split(key, 2)
      return jnp.sum(jax.vmap(loss_fn, (None, 0, 0))(params, group, keys))

    grad_fn = dp_jax.clipped_grad(loss, 1.0)
    total, _ = grad_fn(params, groups, jnp.ones(8, bool), jax.random.key(1))
    return total, *_reference()[1:]

  with pytest.raises(AssertionError):
    _assert_same(broken(PARAMS, X, MASK), _reference(), 1e-3)


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_axes_of_explicit_type_are_an_error_and_not_another_result(engine):
  mesh = _mesh(4, AxisType.Explicit)
  step = jax.jit(functools.partial(_step, _grad_fn(engine)))
  with jax.set_mesh(mesh), pytest.raises(Exception, match=r"[Ss]hard|[Ee]xplicit"):
    step(*_sharded(mesh))


def _language_loss(params, unit, key):
  """A tied table and a product, by 16 tokens: sums of several parts."""
  del key
  x = params["table"][unit["ids"]] * unit["weights"][:, None]
  x = x + jnp.tanh(x @ params["inner"])
  return jnp.sum(jax.nn.log_softmax(x @ params["table"].T)[:, 0] * unit["weights"])


@pytest.mark.parametrize("longest", [rounding.LONGEST, 0.1], ids=["together", "alone"])
@pytest.mark.parametrize("engine", ["ghost", "loop"])
@pytest.mark.parametrize("count", [9, 300])
def test_tokens_and_tied_tables(count, engine, longest, monkeypatch):
  """Few units and many are added in ways of their own; if parts of one are long, one by one."""
  monkeypatch.setattr(rounding, "LONGEST", longest)
  rng = np.random.default_rng(4)
  units = {
    "ids": rng.integers(0, 40, (count, 16)).astype(np.int32),
    "weights": rng.standard_normal((count, 16)).astype(np.float32),
  }
  params = {
    "table": jnp.asarray(0.3 * rng.standard_normal((40, 32)), jnp.float32),
    "inner": jnp.asarray(0.1 * rng.standard_normal((32, 32)), jnp.float32),
  }
  mask = jnp.arange(count) != 3

  def total(engine):
    # Without a budget for made gradients, the ghost engine adds products.
    grad_fn = dp_jax.clipped_grad(
      _language_loss, 1.0, engine=engine, compensated=True, memory_budget=0
    )
    # A new function: jit would take what it traced for another parameter of this test.
    pair, aux = jax.jit(lambda *args: grad_fn(*args))(params, units, mask)
    sums = [np.asarray(pair.sum[n], np.float64) + np.asarray(pair.error[n]) for n in params]
    return np.concatenate([x.reshape(-1) for x in sums]), np.asarray(aux.norms)

  (found, norms), (expected, reference) = total(engine), total("vmap")
  excess = np.max(norms[np.asarray(mask)] / reference[np.asarray(mask)] - 1)
  assert excess < 0.02
  assert np.linalg.norm(found - expected) <= (1e-5 + excess) * np.linalg.norm(expected)
