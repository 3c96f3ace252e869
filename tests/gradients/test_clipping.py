"""`clipped_grad` against a loop over units in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dp_jax
from dp_jax.gradients.engines.norms import per_unit_norms


def loss_fn(params, unit, key):
  del key
  hidden = jnp.tanh(unit["x"] @ params["a"])
  return jnp.sum((hidden @ params["b"] - unit["y"]) ** 2)


@pytest.fixture(scope="module")
def problem():
  rng = np.random.default_rng(0)
  params = {
    "a": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32),
    "b": jnp.asarray(rng.standard_normal((4, 2)), jnp.float32),
  }
  units = {
    "x": jnp.asarray(rng.standard_normal((7, 3)) * 3, jnp.float32),
    "y": jnp.asarray(rng.standard_normal((7, 2)), jnp.float32),
  }
  return params, units


def _reference(params, units, mask, clip_norm):
  """Unit by unit, clipped and summed in float64."""
  total = jax.tree.map(lambda p: np.zeros(p.shape), params)
  norms = []
  for i in range(len(mask)):
    grad = jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[i], units), None)  # noqa: B023
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grad.values()))
    norms.append(norm)
    scale = min(1, clip_norm * (1 - 2**-10) / norm) * mask[i]
    total = {k: total[k] + scale * np.asarray(grad[k], np.float64) for k in total}
  return total, np.array(norms)


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_agrees_with_a_loop_over_units(problem, microbatch_size, compensated, engine):
  params, units = problem
  mask = np.array([1, 1, 0, 1, 1, 1, 0], bool)
  grad_fn = dp_jax.clipped_grad(
    loss_fn, 1.5, engine=engine, microbatch_size=microbatch_size, compensated=compensated
  )
  total, aux = jax.jit(grad_fn)(params, units, mask, None)
  expected, norms = _reference(params, units, mask, 1.5)
  if compensated:
    total = jax.tree.map(np.add, total.sum, total.error)
  for name in params:
    np.testing.assert_allclose(total[name], expected[name], rtol=1e-5, atol=1e-6)
    assert total[name].dtype == jnp.float32
  np.testing.assert_allclose(aux.norms, norms * mask, rtol=1e-5)
  assert aux.losses.shape == (7,) and (np.asarray(aux.losses)[~mask] == 0).all()


def test_no_units_give_zero(problem):
  params, units = problem
  none = jax.tree.map(lambda x: x[:0], units)
  total, aux = dp_jax.clipped_grad(loss_fn, 1.0)(params, none)
  assert all((np.asarray(x) == 0).all() for x in total.values())
  assert aux.norms.shape == aux.losses.shape == (0,)


def test_one_key_is_split_by_position_and_a_key_array_is_used_as_it_is(problem):
  params, units = problem

  def noisy(params, unit, key):
    return loss_fn(params, unit, None) * jax.random.uniform(key)

  key = jax.random.key(1)
  grad_fn = dp_jax.clipped_grad(noisy, 1.0)
  one, _ = grad_fn(params, units, None, key)
  many, _ = grad_fn(params, units, None, jax.random.split(key, 7))
  assert all((one[k] == many[k]).all() for k in one)
  other, _ = grad_fn(params, units, None, jax.random.split(jax.random.key(2), 7))
  assert any((one[k] != other[k]).any() for k in one)
  with pytest.raises(ValueError, match="7 keys"):
    grad_fn(params, units, None, jax.random.split(key, 6))


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-10, 1.0, 1e10, 1e30, 1e36])
def test_norms_neither_overflow_nor_vanish(scale):
  direction = np.ones((1, 4), np.float32) * np.float32(scale)
  norm = jax.jit(per_unit_norms)({"w": direction})[0]
  np.testing.assert_allclose(norm, 2 * scale, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_no_unit_contributes_more_than_the_clip_norm_however_large(clip_norm, engine):
  """Entries over the whole range of float32: near its top, reciprocals are flushed to zero."""
  entries = np.float32(10.0) ** np.arange(-44, 39, dtype=np.float32)
  entries = np.concatenate([entries, np.float32([6e37, 9e37, 2**126, 2**127, 3.4e38])])
  linear = dp_jax.clipped_grad(lambda w, unit, key: jnp.dot(w, unit), clip_norm, engine=engine)
  clip = jax.jit(lambda rows: linear(jnp.zeros(40), rows)[0])
  for entry in entries:
    for row in ([entry] + [0.0] * 39, [entry] * 40, [entry, -entry] * 20):
      total = np.asarray(clip(np.float32([row])), np.float64)
      assert np.sqrt((total**2).sum()) <= clip_norm, (entry, row[:2])


def test_norms_of_many_equal_entries_do_not_stagnate():
  """A plain float32 sum of 2^25 ones stops at 2^24, and a small norm clips too little."""
  norm = jax.jit(per_unit_norms)({"w": jnp.ones((1, 2**25))})[0]
  np.testing.assert_allclose(norm, 2**12.5, rtol=1e-5)


def test_sensitivity_travels_with_the_function():
  grad_fn = dp_jax.clipped_grad(loss_fn, 0.7)
  assert grad_fn.sensitivity("zero_out") == grad_fn.sensitivity("add_or_remove_one") == 0.7
  assert grad_fn.sensitivity("replace_one") == 1.4
  with pytest.raises(ValueError, match="swap_one"):
    grad_fn.sensitivity("swap_one")


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), "1"])
def test_refuses_a_clip_norm(clip_norm):
  with pytest.raises(ValueError, match="clip_norm"):
    dp_jax.clipped_grad(loss_fn, clip_norm)


def test_refuses_bad_arguments(problem):
  params, units = problem
  with pytest.raises(ValueError, match="engine 'fast'"):
    dp_jax.clipped_grad(loss_fn, 1.0, engine="fast")
  with pytest.raises(ValueError, match="microbatch_size"):
    dp_jax.clipped_grad(loss_fn, 1.0, microbatch_size=0)
  grad_fn = dp_jax.clipped_grad(loss_fn, 1.0)
  with pytest.raises(ValueError, match="mask must be bool"):
    grad_fn(params, units, np.ones(3, bool))
  with pytest.raises(ValueError, match="mask must be bool"):
    grad_fn(params, units, np.ones(7, np.float32))
  with pytest.raises(ValueError, match="same first axis"):
    grad_fn(params, {**units, "x": units["x"][:3]})
  with pytest.raises(ValueError, match="typed key"):
    grad_fn(params, units, None, jax.random.PRNGKey(0))


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_a_sharding_constraint_in_the_loss(engine):
  """Works on Auto axes; on Explicit ones a clear error says what to change."""

  def loss(params, unit, key):
    del key
    hidden = jax.lax.with_sharding_constraint(unit @ params, PartitionSpec("model"))
    return jnp.sum(jnp.tanh(hidden) ** 2)

  rng = np.random.default_rng(0)
  params, units = (rng.standard_normal((8, n)).astype(np.float32) for n in (6, 8))
  expected, _ = dp_jax.clipped_grad(lambda p, u, k: jnp.sum(jnp.tanh(u @ p) ** 2), 1.0)(
    params, units
  )
  for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
      placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in ((params, (None, "model")), (units, ("data",)))
      ]
      function = jax.jit(dp_jax.clipped_grad(loss, 1.0, engine=engine))
      if axis_type == AxisType.Explicit:
        with pytest.raises(ValueError, match=r"Explicit axes .*AxisType\.Auto"):
          function(*placed)
      else:
        np.testing.assert_allclose(function(*placed)[0], expected, rtol=1e-6, atol=1e-6)
