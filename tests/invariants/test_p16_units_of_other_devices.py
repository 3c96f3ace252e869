"""P16 under shard_map: with check_vma=True jax adds gradients up over devices, before any clipping.

jax does so wherever a gradient is taken in something that is the same on all devices, of something
that is not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dp_jax

ENGINES = ("vmap", "ghost", "loop", "auto")
C, DEVICES, WIDTH = 0.1, 4, 3
RNG = np.random.default_rng(0)
UNITS = jnp.asarray(5 * RNG.standard_normal((2 * DEVICES, WIDTH)), jnp.float32)
PARAMS = jnp.asarray(RNG.standard_normal(WIDTH), jnp.float32)
MASK = jnp.arange(2 * DEVICES) != 3


def loss(params, unit, key):
  del key
  return jnp.tanh(unit @ params) ** 2


def over_devices(function, *specs, out, check_vma=True):
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
  return jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
  )


@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_without_the_check_units_of_other_devices_are_not_seen(engine, microbatch_size):
  grad_fn = dp_jax.clipped_grad(loss, C, engine=engine, microbatch_size=microbatch_size)

  def local(params, units, mask):
    return jax.lax.psum(grad_fn(params, units, mask)[0], "data")

  run = over_devices(local, P(), P("data"), P("data"), out=P(), check_vma=False)
  total = run(PARAMS, UNITS, MASK)
  np.testing.assert_allclose(total, grad_fn(PARAMS, UNITS, MASK)[0], atol=1e-5 * C)
  np.testing.assert_array_equal(run(PARAMS, UNITS.at[3].set(100.0), MASK), total)
  exchanged = run(PARAMS, UNITS.at[0].set(-UNITS[0]), MASK)
  assert np.linalg.norm(exchanged - total) <= 2 * C


def test_the_broken_variant_clips_the_sum_over_devices():
  """A unit's gradient, by vmap of jax.grad, holds those of the units of other devices."""

  def local(params, units):
    return jax.vmap(jax.grad(loss), (None, 0, None))(params, units, None)[None]

  run = over_devices(local, P(), P("data"), out=P())
  moved = run(PARAMS, UNITS.at[0].set(-UNITS[0]))[0] - run(PARAMS, UNITS)[0]
  assert np.linalg.norm(run(PARAMS, UNITS)) > 0
  assert run(PARAMS, UNITS).shape == (1, 2, WIDTH)  # of all devices, though each has its own units
  assert np.linalg.norm(moved[1]) == 0  # each was added to the one in its place on other devices
  own = jax.vmap(jax.grad(loss), (None, 0, None))(PARAMS, UNITS[::2], None)
  np.testing.assert_allclose(run(PARAMS, UNITS)[0, 0], own.sum(0), rtol=1e-5)


def _differing(what, grad, engine):
  """Calls clipped_grad where `what` differs between devices, and nothing else does."""
  ones, key = jnp.ones((2, WIDTH)), jax.random.key(0)

  def local(x):
    (x,) = x
    if what == "params":
      return grad(loss, engine)(x, ones)[0][None]
    if what == "units":
      return grad(loss, engine)(PARAMS, ones * x)[0][None]
    if what == "mask":
      return grad(loss, engine)(PARAMS, ones, x[:2] > 0)[0][None]
    if what == "keys":
      keys = jax.random.split(jax.random.fold_in(key, x[0].astype(int)), 2)
      return grad(loss, engine)(PARAMS, ones, None, keys)[0][None]
    if what == "a constant":
      return grad(lambda p, u, k: loss(p * x, u, k), engine)(PARAMS, ones)[0][None]
    shifted = lambda p, u, k: loss(p, u + jax.lax.axis_index("data"), k)  # noqa: E731
    return grad(shifted, engine)(PARAMS, ones)[0][None]

  return over_devices(local, P("data"), out=P("data"))(UNITS[:DEVICES])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["params", "units", "mask", "keys", "a constant", "the device"])
def test_whatever_differs_between_devices_is_refused(what, engine):
  said = "collective" if what == "the device" else "check_vma=False"
  with pytest.raises(ValueError, match=said):
    _differing(what, lambda loss, engine: dp_jax.clipped_grad(loss, C, engine=engine), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_the_same_on_all_devices_is_served(engine):
  grad_fn = dp_jax.clipped_grad(loss, C, engine=engine)
  run = over_devices(lambda p, u: grad_fn(p, u)[0], P(), P(), out=P())
  np.testing.assert_allclose(run(PARAMS, UNITS), grad_fn(PARAMS, UNITS)[0], atol=1e-5 * C)


@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_mesh_within_the_loss_may_use_its_own_axes_alone(axis):
  """Of two meshes, one in the other: the outer one's axis holds other units."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  one = P("model")

  def within(x):
    return jax.shard_map(
      lambda x: x - jax.lax.pmean(x, axis), in_specs=one, out_specs=one, axis_names={"model"},
      check_vma=False,
    )(x)  # fmt: skip

  grad_fn = dp_jax.clipped_grad(lambda p, u, k: jnp.sum(jnp.tanh(p * within(u))), C)
  run = jax.jit(
    jax.shard_map(
      lambda p, u: grad_fn(p, u)[0][None], mesh=mesh, in_specs=(P(), P("data")),
      out_specs=P("data"), axis_names={"data"}, check_vma=False,
    )
  )  # fmt: skip
  units = jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)
  if axis == "data":
    with pytest.raises(ValueError, match="'psum' over the axis 'data'"):
      run(jnp.ones(4), units)
  else:
    assert run(jnp.ones(4), units).shape == (2, 4)
