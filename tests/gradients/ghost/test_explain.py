"""The plan as a table."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

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


def test_an_automatic_microbatch_is_the_one_that_a_call_takes():
  grad_fn = dp_jax.clipped_grad(_loss, 1.0, microbatch_size="auto", memory_budget=2**30)
  fixed = dataclasses.replace(grad_fn, microbatch_size=4)
  assert dp_jax.explain(grad_fn, PARAMS, UNITS) == dp_jax.explain(fixed, PARAMS, UNITS)
  small = dataclasses.replace(grad_fn, engine="vmap", memory_budget=15_000_000)
  assert dp_jax.explain(small, PARAMS, UNITS).startswith("vmap: gradients of 1 units, ")


def _lookups(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(params["e"][unit]))


def test_gram_matrices_of_lookups_are_counted_and_bounded():
  """As many as fit; within a unit, a part of the tokens at a time."""
  params = {"e": jax.ShapeDtypeStruct((100, 8), jnp.float32)}
  grad_fn = dp_jax.clipped_grad(_lookups, 1.0, engine="ghost")
  for tokens, held in ((2048, 8 * 2048**2), (16384, 2 * 2**24)):
    units = jax.ShapeDtypeStruct((8, tokens), jnp.int32)
    shown = int(_cells(dp_jax.explain(grad_fn, params, units))["e"][-1].replace(",", ""))
    assert shown == 8 * held
    temporary = jax.jit(grad_fn).lower(params, units).compile().memory_analysis()
    assert temporary.temp_size_in_bytes < 1.1 * shown
  tight = dp_jax.clipped_grad(_lookups, 1.0, engine="ghost", memory_budget=8 * 2048**2)
  units = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
  assert f"{8 * 2048**2:,}" in dp_jax.explain(tight, params, units)
  temporary = jax.jit(tight).lower(params, units).compile().memory_analysis()
  assert temporary.temp_size_in_bytes < 1.1 * 8 * 2048**2


def test_a_loss_that_jax_cannot_map_is_looped():
  params = {"w": jax.ShapeDtypeStruct((2, 4, 3), jnp.float32)}
  units = jax.ShapeDtypeStruct((4, 5, 4), jnp.float32)

  def loss(params, unit, key):
    del key
    return jnp.sum(jax.lax.ragged_dot(unit, params["w"], jnp.array([2, 3], jnp.int32)))

  text = dp_jax.explain(dp_jax.clipped_grad(loss, 1.0), params, units)
  assert text.startswith("loop: gradients of 2 units, 192 bytes, since jax cannot map")


def test_what_the_budget_keeps_is_counted_together():
  """Two gradients that fit, but not both."""

  def loss(params, unit, key):
    del key
    return jnp.sum(unit * params["a"] + params["b"])

  params = {name: jax.ShapeDtypeStruct((100,), jnp.float32) for name in "ab"}
  units = jax.ShapeDtypeStruct((4, 100), jnp.float32)
  text = dp_jax.explain(dp_jax.clipped_grad(loss, 1.0, memory_budget=2000), params, units)
  assert [_cells(text)[name][-1] for name in "ab"] == ["1,600", "400"]


def test_a_loss_whose_vmap_is_not_its_map_is_shown_as_looped():
  @jax.custom_batching.custom_vmap
  def centred(x):
    return x

  centred.def_vmap(lambda size, batched, x: (x - jnp.mean(x, axis=0), True))

  def loss(params, unit, key):
    del key
    return jnp.sum(centred(unit) @ params["a"])

  params, units = {"a": jnp.ones((3, 2))}, jnp.ones((4, 3))
  assert "loop: gradients of 2 units" in dp_jax.explain(
    dp_jax.clipped_grad(loss, 1.0), params, units
  )
  with pytest.raises(ValueError, match="custom_vmap_call"):
    dp_jax.explain(dp_jax.clipped_grad(loss, 1.0, engine="ghost"), params, units)
