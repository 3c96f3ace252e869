"""Styles of clipping with both engines, against a loop over units in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.gradients.engines.styles import GAMMA, ClipRule

CLIP_NORM = 1.5
GROUPS = {"head": 0.3, "body|scale": 0.7}
ENGINES = ["vmap", "ghost", "loop"]
RNG = np.random.default_rng(0)
PARAMS = {
  "body": {"w": jnp.asarray(RNG.standard_normal((3, 4)), jnp.float32)},
  "head": {"w": jnp.asarray(RNG.standard_normal((4, 2)), jnp.float32), "b": jnp.ones(2)},
  "scale": jnp.ones(()),
}
UNITS = np.float32(RNG.standard_normal((7, 3)) * np.float32(10.0) ** np.arange(-3, 4)[:, None])
MASK = np.array([1, 1, 1, 0, 1, 1, 1], bool)


def loss_fn(params, unit, key):
  """Head and scale meet data together, as one product: a use with two parameters."""
  del key
  hidden = jnp.tanh(unit @ params["body"]["w"])
  return jnp.sum((hidden @ (params["scale"] * params["head"]["w"]) + params["head"]["b"]) ** 2)


def _gradients():
  return [jax.grad(loss_fn)(PARAMS, unit, None) for unit in UNITS]


def _norm(*trees):
  leaves = jax.tree.leaves(trees)
  return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in leaves))


def _expected(factors_of):
  """Sums each unit's gradient, its parts scaled by what `factors_of` gives for each part."""
  total = jax.tree.map(lambda p: np.zeros(p.shape), PARAMS)
  for grad, is_unit in zip(_gradients(), MASK, strict=True):
    factors = factors_of(grad)
    for name in PARAMS:
      scaled = jax.tree.map(lambda g: np.asarray(g, np.float64) * factors[name] * is_unit,  # noqa: B023
                            grad[name])  # fmt: skip
      total[name] = jax.tree.map(np.add, total[name], scaled)
  return total


def _automatic(grad):
  return dict.fromkeys(PARAMS, CLIP_NORM * (1 - 2**-10) / (_norm(grad) + GAMMA))


def _grouped(grad):
  bound = CLIP_NORM * (1 - 2**-10)
  head = min(1, bound * 0.3**0.5 / _norm(grad["head"]))
  rest = min(1, bound * 0.7**0.5 / _norm(grad["body"], grad["scale"]))
  return {"head": head, "body": rest, "scale": rest}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("memory_budget", [2**30, 0])
@pytest.mark.parametrize(("style", "factors_of"), [("automatic", _automatic), (GROUPS, _grouped)])
def test_agrees_with_a_loop_over_units(engine, memory_budget, style, factors_of):
  grad_fn = dp_jax.clipped_grad(
    loss_fn, CLIP_NORM, engine=engine, clipping=style, memory_budget=memory_budget
  )
  total, aux = jax.jit(grad_fn)(PARAMS, UNITS, MASK)
  expected = _expected(factors_of)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-6), total, expected)
  norms = [_norm(grad) * is_unit for grad, is_unit in zip(_gradients(), MASK, strict=True)]
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-4)
  assert grad_fn.sensitivity("zero_out") == CLIP_NORM


def _contribution(style, engine, unit):
  grad_fn = dp_jax.clipped_grad(
    lambda params, unit, key: sum(jnp.sum(params[n] * unit[n]) for n in params),
    CLIP_NORM, engine=engine, clipping=style,
  )  # fmt: skip
  params = {"a": jnp.zeros(40), "b": jnp.zeros(40), "c": jnp.zeros(40)}
  units = {name: jnp.asarray(unit[name], jnp.float32)[None] for name in params}
  return _norm(grad_fn(params, units)[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("style", ["flat", "automatic", {"a": 0.5, "b": 0.3, "c": 0.2}])
def test_no_unit_contributes_more_than_the_clip_norm(style, engine):
  for exponent in (-44, -30, -20, -8, 0, 8, 18, 30, 38):
    entry = np.float32(10.0) ** np.float32(exponent)
    for b, c in [(0.0, 0.0), (entry, entry), (1.0, -entry), (np.nan, 1.0), (1.0, np.inf)]:
      unit = {"a": np.full(40, entry), "b": np.full(40, b), "c": np.full(40, c)}
      assert _contribution(style, engine, unit) <= CLIP_NORM, (exponent, b, c)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_use_their_budget_and_automatic_nearly_all_of_it(engine):
  large = {name: np.full(40, 1e3) for name in "abc"}
  for style in ("automatic", {"a": 0.5, "b": 0.3, "c": 0.2}):
    assert _contribution(style, engine, large) > 0.99 * CLIP_NORM
  small = {name: np.full(40, 1e-3) for name in "abc"}
  assert _contribution("flat", engine, small) < 0.02
  assert 0.4 * CLIP_NORM < _contribution("automatic", engine, small) < 0.6 * CLIP_NORM


@pytest.mark.parametrize("engine", ENGINES)
def test_giving_each_group_the_whole_budget_is_caught(engine, monkeypatch):
  """The broken variant: three groups of clip norm C move the sum by sqrt(3) C."""
  original = ClipRule.scales

  def each_whole(rule, norms, mask):
    return original(ClipRule(rule.group_of, (CLIP_NORM,) * len(rule.bounds)), norms, mask)

  monkeypatch.setattr(ClipRule, "scales", each_whole)
  large = {name: np.full(40, 1e3) for name in "abc"}
  assert _contribution({"a": 0.5, "b": 0.3, "c": 0.2}, engine, large) > 1.7 * CLIP_NORM


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_that_is_not_finite_in_one_group_counts_as_zero_in_all(engine):
  unit = {"a": np.full(40, np.nan), "b": np.ones(40), "c": np.ones(40)}
  assert _contribution({"a": 0.5, "b": 0.3, "c": 0.2}, engine, unit) == 0


@pytest.mark.parametrize(("clipping", "message"), [
  ("adaptive", "'adaptive' is not one of flat, automatic"),
  ({}, "is not one of"),
  ({"head": 0.5, "body": 0.6}, "must sum to 1, got 1.1"),
  ({"head": 1.5, "body": -0.5}, "share of clipping group"),
  ({"(": 1.0}, "not a regular expression"),
])  # fmt: skip
def test_refuses_a_style(clipping, message):
  with pytest.raises(ValueError, match=message):
    dp_jax.clipped_grad(loss_fn, 1.0, clipping=clipping)


@pytest.mark.parametrize(("clipping", "message"), [
  ({"head": 0.5, "body": 0.5}, "'scale' is in 0 clipping groups"),
  ({"head": 0.5, "h|body|scale": 0.5}, r"'head\.[bw]' is in 2 clipping groups"),
  ({"head|body|scale": 0.5, "tail": 0.5}, "'tail' matches none of body.w"),
])  # fmt: skip
def test_refuses_groups_that_do_not_fit_the_parameters(clipping, message):
  with pytest.raises(ValueError, match=message):
    dp_jax.clipped_grad(loss_fn, 1.0, clipping=clipping)(PARAMS, UNITS)
