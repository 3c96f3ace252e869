"""The plan as a table."""

import jax
import jax.numpy as jnp

import dp_jax

PARAMS = {
  "a": jax.ShapeDtypeStruct((1000, 800), jnp.float32),
  "b": jax.ShapeDtypeStruct((800,), jnp.float32),
  "s": jax.ShapeDtypeStruct((1000,), jnp.float32),
  "unused": jax.ShapeDtypeStruct((3,), jnp.float32),
}
UNITS = jax.ShapeDtypeStruct((4, 16, 1000), jnp.float32)


def _loss(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(unit * params["s"] @ params["a"] + params["b"]))


def _cells(text):
  return {line.split()[0]: line.split() for line in text.splitlines()[1:]}


def test_a_line_for_each_parameter_with_rule_operations_and_bytes():
  cells = _cells(dp_jax.explain(dp_jax.clipped_grad(_loss, 1.0), PARAMS, UNITS))
  assert set(cells) == set(PARAMS)
  assert cells["a"][1:4] == ["dot_general", "product:", "gram"]
  # Two Gram matrices of 16 tokens, of 1000 and 800 entries, for 4 units.
  assert cells["a"][-2].replace(",", "") == str(4 * 2 * 16 * 16 * 1800)
  assert cells["b"][1:4] == ["add", "instantiate:", "gradient"]
  assert cells["b"][-1].replace(",", "") == str(4 * 800 * 4)
  assert cells["unused"][1] == "unused"


def test_a_budget_and_a_microbatch_show():
  grad_fn = dp_jax.clipped_grad(_loss, 1.0, memory_budget=0, microbatch_size=2)
  text = dp_jax.explain(grad_fn, PARAMS, UNITS)
  assert "one unit at a time, twice" in text
  assert _cells(text)["b"][-1].replace(",", "") == str(4 * 800)
  assert _cells(text)["a"][-2].replace(",", "") == str(2 * 2 * 16 * 16 * 1800)


def test_why_it_is_vmap():
  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.abs(jnp.fft.fft(unit) * params["s"]))

  text = dp_jax.explain(dp_jax.clipped_grad(loss, 1.0), PARAMS, UNITS)
  assert text.startswith("vmap")
  assert "complex" in text
  text = dp_jax.explain(dp_jax.clipped_grad(_loss, 1.0, engine="vmap"), PARAMS, UNITS)
  assert text.startswith("vmap: gradients of 4 units, ")


def test_an_unknown_primitive_is_marked():
  def loss(params, unit, key):
    return jnp.sum(jnp.arctan2(unit, params["s"])) + _loss(params, unit, key)

  text = dp_jax.explain(dp_jax.clipped_grad(loss, 1.0), PARAMS, UNITS)
  assert "atan2" in text
  assert "unknown primitive" in text


def test_a_loss_with_a_key():
  def loss(params, unit, key):
    return _loss(params, unit + jax.random.normal(key, unit.shape), None)

  grad_fn = dp_jax.clipped_grad(loss, 1.0)
  assert "product" in dp_jax.explain(grad_fn, PARAMS, UNITS, jax.random.key(0))
