"""Losses made to break the ghost engine: each was wrong, or a crash, in some version of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import compare, contributions, normal, plan_of, values

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.ghost import rules

C = 1.0


def dense(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(unit @ params["a"]) @ params["b"])


def linear(params, unit, key):
  del key
  return jnp.sum(unit @ params["a"])


DENSE = {"a": normal(5, 4), "b": normal(4, 2)}


def test_sums_over_units_of_a_bf16_model_are_not_rounded_to_bf16():
  """All cotangents are 1: the exact sum of the operands needs more bits than bf16 has."""

  def loss(params, unit, key):
    del key
    return jnp.sum(unit.astype(jnp.bfloat16) @ params["a"].astype(jnp.bfloat16))

  units = jnp.asarray(1.0 + np.arange(200)[:, None] % 2 / 128, jnp.float32)
  with jax.disable_jit():
    total, _ = clipped_grad(loss, 1e6, engine="ghost", compensated=True)({"a": normal(1, 1)}, units)
  np.testing.assert_array_equal(values(total)[0], [[200 + 100 / 128]])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e28])
def test_norms_beyond_the_range_of_their_squares(scale):
  result = compare(linear, {"a": normal(5, 4)}, normal(4, 3, 5, scale=scale), clip_norm=1.0)
  assert result.agrees(bound=1e-4)


@pytest.mark.parametrize("memory_budget", [0, 2**30])
@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_such_norms_of_gradients_that_are_made(scale, memory_budget):
  def loss(params, unit, key):
    del key
    return jnp.sum(unit * params["a"])

  units = normal(4, 3, 5, scale=scale)
  params = {"a": normal(5)}
  result = compare(loss, params, units, memory_budget=memory_budget)
  assert result.agrees()
  assert np.max(contributions(loss, params, units, memory_budget=memory_budget)) <= C


def test_a_norm_of_many_equal_entries_does_not_stagnate():
  """2^20 equal squares, added one by one, lose several percent."""
  value = 1.0 + 2.0**-11
  x, cot = jnp.full((1, 1, 1, 2**20), value), jnp.ones((1, 1, 1, 1))
  norm = float(rules.norms(rules.Contraction(x, cot))[0])
  assert norm >= 2**10 * value * (1 - 2.0**-12)
  x, cot = jnp.full((1, 1, 520, 1024), value), jnp.ones((1, 1, 520, 1024))
  norm = float(rules.norms(rules.Contraction(x, cot))[0])
  assert norm >= 520 * value * 2**10 * (1 - 2.0**-12)


def test_complex_values_fall_back():
  def loss(params, unit, key):
    del key
    spectrum = jnp.fft.fft(unit) @ (params["a"] * (1 + 0.5j))
    return jnp.sum(jnp.abs(spectrum) ** 2) + jnp.sum((unit + 1j * unit) @ params["a"]).imag

  assert compare(loss, {"a": normal(5, 4)}, normal(3, 5)).agrees()
  with pytest.raises(ValueError, match="complex"):
    clipped_grad(loss, 1.0, engine="ghost")({"a": normal(5, 4)}, normal(3, 5))


def test_a_mutable_reference_falls_back():
  def loss(params, unit, key):
    del key
    ref = jax.new_ref(params["a"])
    ref[...] = ref[...] * unit
    return jnp.sum(ref[...] ** 2)

  assert compare(loss, {"a": normal(5)}, normal(3, 5)).agrees()
  with pytest.raises(ValueError, match="reference"):
    clipped_grad(loss, 1.0, engine="ghost")({"a": normal(5)}, normal(3, 5))


def test_a_while_loop_whose_gradient_is_stopped_falls_back():
  def loss(params, unit, key):
    del key
    a = jax.lax.stop_gradient(params["a"])
    start = (0, jax.lax.stop_gradient(unit))
    _, out = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * a), start)
    return jnp.sum(out * params["a"] * unit)

  assert compare(loss, {"a": normal(5)}, normal(3, 5)).agrees()

  def mixed(params, unit, key):
    del key
    start = (0, unit)
    _, out = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * params["a"]), start)
    return jnp.sum(jax.lax.stop_gradient(out) * params["a"])

  assert compare(mixed, {"a": normal(5)}, normal(3, 5)).agrees()


def test_a_custom_derivative_that_is_not_linear_is_applied_to_each_unit():
  """Its backward pass adds a constant: at a zero cotangent it must not be applied once more."""

  @jax.custom_vjp
  def odd(p):
    return 2.0 * p

  odd.defvjp(lambda p: (2.0 * p, None), lambda _, c: (jnp.tanh(c) + 1.0,))

  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.tanh(unit @ odd(params["a"])) * params["b"])

  assert compare(loss, {"a": normal(5, 4), "b": normal(4)}, normal(4, 3, 5)).agrees()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int32"])
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_indices_of_every_dtype_and_mode(dtype, mode):
  ids = np.array([[0, 1, 1], [2, 2, 2], [3, 299, 0], [4, 0, 4]])
  if mode != "promise_in_bounds":  # out of range
    ids[0, 0], ids[1, 0] = np.iinfo(dtype).max, np.iinfo(dtype).max - 1
  ids = jnp.asarray(ids.astype(dtype))

  def loss(params, unit, key):
    del key
    rows = params["e"].at[unit].get(mode=mode, fill_value=0.0, wrap_negative_indices=False)
    return jnp.sum(jnp.tanh(rows) ** 2 * jnp.arange(1.0, 4)[:, None])

  params = {"e": normal(300, 4)}
  assert plan_of(loss, params, ids) == {"e": "lookup"}
  assert compare(loss, params, ids).agrees()


def test_parameters_without_any_use():
  total, aux = clipped_grad(lambda p, u, k: jnp.sum(u**2), 1.0)({"a": normal(3)}, normal(4, 2))
  np.testing.assert_array_equal(total["a"], np.zeros(3))
  np.testing.assert_array_equal(aux.norms, np.zeros(4))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_a_unit_without_tokens(shape):
  params = {"a": normal(shape[1], 4)}
  units = jnp.zeros((3, *shape))

  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.tanh(unit @ params["a"])) + jnp.sum(unit)

  total, aux = clipped_grad(loss, 1.0)(params, units)
  np.testing.assert_array_equal(total["a"], np.zeros(params["a"].shape))
  np.testing.assert_array_equal(aux.norms, np.zeros(3))


def test_an_empty_scan():
  def loss(params, unit, key):
    del key
    carry, ys = jax.lax.scan(lambda c, x: (c * x, c * x), unit, params["s"][:0])
    return jnp.sum(carry @ params["a"]) + jnp.sum(ys)

  assert compare(loss, {"a": normal(5, 4), "s": normal(2, 5)}, normal(3, 5)).agrees()


@pytest.mark.parametrize("kind", ["int32", "complex64"])
def test_parameters_that_are_not_real_are_refused(kind):
  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.abs(unit * params["a"]))

  for engine in ("auto", "ghost"):
    with pytest.raises((TypeError, ValueError), match=r"params|real"):
      clipped_grad(loss, 1.0, engine=engine)({"a": jnp.ones(3, kind)}, normal(4, 3))


def test_tokens_that_cancel_between_those_of_other_units():
  """Two tokens of 2^22 clip norms cancel exactly; the others' sum must not be lost in between."""
  units = np.array(normal(32, 2, 64, scale=0.01))
  units[5, 1] = -units[5, 0]
  units[5] *= 1e8

  def loss(params, unit, key):
    del key
    return jnp.sum(unit @ params["a"] * jnp.sign(normal(1, 64, seed=1)))

  for engine in ("auto", "vmap"):
    moved = contributions(loss, {"a": normal(64, 64)}, jnp.asarray(units), engine=engine)
    assert np.max(moved) <= C


@pytest.mark.parametrize("memory_budget", [0, 2**30])
@pytest.mark.parametrize("tokens", [2, 8, 32])
def test_cancelling_tokens_at_activations_of_200(tokens, memory_budget):
  rng = np.random.default_rng(tokens)
  units = rng.standard_normal((6, tokens, 6)) * 200
  units[:3, tokens // 2 :] = -units[:3, : tokens // 2] * (1 + 1e-7 * rng.standard_normal((3, 1, 1)))

  def loss(params, unit, key):
    del key
    return 1e-2 * jnp.sum(unit @ params["a"] + unit * params["s"] @ params["a"] + params["b"])

  params = {"a": normal(6, 8), "s": normal(6), "b": normal(8)}
  moved = contributions(loss, params, jnp.asarray(units, jnp.float32), memory_budget=memory_budget)
  assert np.max(moved) <= C


def test_values_that_are_not_finite_move_nothing():
  units = np.array(normal(6, 3, 5))
  units[0, 0, 0], units[1, 1, 1], units[2] = np.nan, np.inf, -np.inf
  units[3] = 3e38
  good = normal(6, 3, 5)
  for engine in ("auto", "vmap"):
    moved = contributions(dense, DENSE, jnp.asarray(units), engine=engine)
    assert np.all(moved[:3] == 0)
    assert np.max(moved) <= C
  assert np.all(contributions(dense, DENSE, good) <= C)


@pytest.mark.parametrize("memory_budget", [0, 2**30])
@pytest.mark.parametrize("value", [1e30, 3e38, np.nan, np.inf, 1e-30])
def test_no_other_unit_is_rounded_differently_because_of_one(value, memory_budget):
  """Slower branches serve the units that need them: all others keep every bit."""
  units = np.array(normal(5, 3, 5))
  units[1] = value

  def loss(params, unit, key):
    return dense(params, unit, key) + linear(params, unit, key)

  grad_fn = clipped_grad(loss, C, compensated=True, memory_budget=memory_budget)
  (odd, aux), (plain, other) = (
    jax.jit(grad_fn)(DENSE, x, jnp.ones(5, bool)) for x in (units, np.array(normal(5, 3, 5)))
  )
  others = [0, 2, 3, 4]
  np.testing.assert_array_equal(aux.norms[np.asarray(others)], other.norms[np.asarray(others)])
  if not np.isfinite(value):
    (zero, _) = jax.jit(grad_fn)(DENSE, units, jnp.arange(5) != 1)
    for a, b in zip(values(odd), values(zero), strict=True):
      np.testing.assert_array_equal(a, b)
  assert np.all(np.isfinite(values(plain)[0]))


def test_sums_of_convolutions_and_products_ask_for_full_precision():
  """On accelerators the default precision of float32 products is lower."""

  def loss(params, unit, key):
    del key
    out = jax.lax.conv_general_dilated(
      unit[None], params["k"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.sum(jnp.tanh(out[0] @ params["w"]) ** 2)

  params = {"k": normal(1, 8, 8), "w": normal(8, 6)}
  units = normal(3, 2, 8)
  assert set(plan_of(loss, params, units).values()) == {"convolution", "product"}
  grad_fn = clipped_grad(loss, C, memory_budget=0)
  closed = jax.make_jaxpr(grad_fn)(params, units, jnp.ones(3, bool))
  # The model's own keep theirs: two forward, and the product of the cotangent of its operand.
  lower = [p for p in _precisions(closed.jaxpr) if p != (jax.lax.Precision.HIGHEST,) * 2]
  assert len(lower) == 3


def _precisions(jaxpr):
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
      found.append(eqn.params["precision"])
    for inner in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
        found += _precisions(getattr(inner, "jaxpr", inner))
  return found
