"""A wrong rule is caught: each is put in place of the right one, and the comparison must fail."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import compare, contributions, normal
from test_rules import CASES

from dp_jax.gradients.ghost import (
  arrays,
  canonical,
  interpreter,
  lookups,
  plan,
  products,
  rules,
  structure,
  traced,
)


def _no_cross_term(patch):
  def without(*args):
    return jnp.float32(0), jnp.float32(0)

  patch.setattr(rules, "_cross_term", without)


def _tied_counted_as_two_layers(patch):
  original = plan._rule

  def split(uses, roots, members):
    group = original(uses, roots, members)
    assert group is not None
    return group

  def of_component(uses, roots, members, sizes):
    return [split(uses, roots, [i]) for i in members]

  patch.setattr(plan, "_of_component", of_component)


def _bias_use_missed(patch):
  original = traced.make_plan
  patch.setattr(
    traced, "make_plan",
    lambda uses, sizes: [g for g in original(uses, sizes) if uses[g.uses[0]].name != "add"],
  )  # fmt: skip


def _tokens_summed_before_the_norm(patch):
  def norms(c):
    x, cot = jnp.sum(c.operand, axis=2), jnp.sum(c.cotangent, axis=2)
    return jnp.linalg.norm(x, axis=(1, 2)) * jnp.linalg.norm(cot, axis=(1, 2))

  _replace_norms(patch, norms)


def _replace_norms(patch, norms):
  """In both forms: with the operands scaled, and without."""
  patch.setattr(rules, "norms", norms)
  patch.setattr(rules, "fast_norms", lambda c: (norms(c), 0.0 * norms(c)))


def _squares_summed_over_tokens(patch):
  """The norm of every token on its own, without the terms between them."""

  def norms(c):
    square = jnp.sum(c.operand**2, axis=-1) * jnp.sum(c.cotangent**2, axis=-1)
    return jnp.sqrt(jnp.sum(square, axis=(1, 2)))

  _replace_norms(patch, norms)


def _repeated_tokens_apart(patch):
  def norms(lookup):
    return jnp.linalg.norm(lookup.cotangent, axis=(1, 2))

  patch.setattr(rules, "lookup_norms", norms)
  patch.setattr(rules, "fast_lookup_norms", lambda lookup: (norms(lookup), 0.0 * norms(lookup)))


def _mode_ignored(patch):
  original = canonical.lookup_of

  def clipped(use, data, cotangent):
    lookup = original(use, data, cotangent)
    return dataclasses.replace(lookup, rows=jnp.maximum(lookup.rows, 0))

  patch.setattr(canonical, "lookup_of", clipped)


def _padding_one_sided(patch):
  original = canonical.conv_contraction

  def moved(use, data, cotangent):
    padding = tuple((low + high, 0) for low, high in use.eqn.params["padding"])
    eqn = use.eqn.replace(params={**use.eqn.params, "padding": padding})
    return original(dataclasses.replace(use, eqn=eqn), data, cotangent)

  patch.setattr(canonical, "conv_contraction", moved)


def _groups_in_the_wrong_order(patch):
  original = canonical.conv_gradient
  patch.setattr(canonical, "conv_gradient", lambda use, total: original(use, total[::-1]))


def _contracted_axes_in_the_wrong_order(patch):
  original = canonical.dot_contraction

  def reversed_(use, data, cotangent):
    c = original(use, data, cotangent)
    return dataclasses.replace(c, operand=c.operand[..., ::-1])

  patch.setattr(canonical, "dot_contraction", reversed_)


def _slices_added_before_the_square(patch):
  """All layers of a scan as one use of the same parameter."""
  original = plan._of_component

  def of_component(uses, roots, members, sizes):
    def whole(origin):
      return dataclasses.replace(origin, index=None)

    blind = [
      dataclasses.replace(u, weights=tuple((i, whole(o)) for i, o in u.weights)) for u in uses
    ]
    return original(blind, roots, members, sizes)

  patch.setattr(plan, "_of_component", of_component)


def _cotangent_not_scaled(patch):
  def selected(g, s):
    return jnp.where(s.reshape(-1, *(1,) * (g.ndim - 1)) != 0, g, 0.0)

  patch.setattr(products, "scaled", selected)


def _lookup_not_scaled(patch):
  original = lookups.clipped_sum
  patch.setattr(
    lookups,
    "clipped_sum",
    lambda c, s, *rest, **more: original(c, jnp.where(s != 0, 1.0, 0.0), *rest, **more),
  )


def _made_gradients_not_scaled(patch):
  original = arrays.weighted_sum
  patch.setattr(
    arrays, "weighted_sum", lambda g, s, *rest: original(g, jnp.where(s != 0, 1.0, 0.0), *rest)
  )


def _use_skipped(patch):
  """An equation that the interpreter takes for one of data alone."""
  original = interpreter._use

  def skip_products(eqn, inputs, visitor):
    if eqn.primitive.name != "mul":
      return original(eqn, inputs, visitor)
    blind = [dataclasses.replace(v, origin=None, exact=None) for v in inputs]
    return interpreter._equation(eqn, blind, visitor)

  patch.setattr(interpreter, "_use", skip_products)


def _transpose_forgotten(patch):
  """Two uses of a square matrix, one of them transposed, taken for alike."""
  patch.setattr(plan, "_layout", lambda use: (("same",),) if use.name == "dot_general" else None)


def _closed_over_jvp_body(patch):
  """Looks into a custom_jvp call, whose rule is not the derivative of its body."""
  known = ("call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros")
  patch.setitem(structure.CALLS, "custom_jvp_call", "call_jaxpr")
  patch.setitem(structure._PARAMETERS, "custom_jvp_call", known)


MUTATIONS = [
  (_no_cross_term, "tied embedding"),
  (_tied_counted_as_two_layers, "tied embedding"),
  (_tied_counted_as_two_layers, "used twice alike"),
  (_bias_use_missed, "dense"),
  (_bias_use_missed, "scale and bias, broadcast"),
  (_tokens_summed_before_the_norm, "gram of tokens"),
  (_tokens_summed_before_the_norm, "attention with masks"),
  (_squares_summed_over_tokens, "gradient of tokens"),
  (_squares_summed_over_tokens, "conv strided"),
  (_repeated_tokens_apart, "embedding, repeated tokens"),
  (_mode_ignored, "embedding, dropped"),
  (_padding_one_sided, "conv of a dilated input, uneven padding"),
  (_groups_in_the_wrong_order, "conv dilated and grouped"),
  (_groups_in_the_wrong_order, "conv depthwise"),
  (_contracted_axes_in_the_wrong_order, "several free and contracted dimensions"),
  (_slices_added_before_the_square, "scan over checkpointed layers"),
  (_cotangent_not_scaled, "dense"),
  (_lookup_not_scaled, "embedding, repeated tokens"),
  (_made_gradients_not_scaled, "scale and bias, broadcast"),
  (_use_skipped, "scale and bias, broadcast"),
  (_transpose_forgotten, "square, used twice, transposed"),
  (_closed_over_jvp_body, "custom_jvp that mixes"),
]


NORMS = (_tokens_summed_before_the_norm, _squares_summed_over_tokens)


@pytest.mark.parametrize(("mutation", "name"), MUTATIONS)
def test_a_wrong_rule_is_caught(monkeypatch, mutation, name):
  loss, params, units, _ = CASES[name]
  mutation(monkeypatch)
  # Gradients that are kept have no norm by these rules.
  budget = 0 if mutation in NORMS else 2**30
  # Small, so that every unit is clipped.
  wrong = compare(loss, params, units, clip_norm=1e-2, memory_budget=budget)
  assert not wrong.agrees(bound=1e-3)


def test_a_dropped_rounding_bound_is_caught(monkeypatch):
  """Tokens that cancel: without the bound one unit moves the sum by more than C."""
  rng = np.random.default_rng(0)
  units = rng.standard_normal((24, 32, 64)).astype(np.float32) * 200
  units[:, 16:] = -units[:, :16]
  units[:, 0, 0] += 0.01 * rng.standard_normal(24).astype(np.float32)

  def loss(params, unit, key):
    del key
    return jnp.sum(unit @ params["a"] @ jnp.linspace(1.0, 2.0, 64))

  params = {"a": normal(64, 64)}
  assert np.max(contributions(loss, params, jnp.asarray(units), clip_norm=1e-3)) <= 1e-3
  monkeypatch.setattr(rules, "_UNIT_ROUNDOFF", 0.0)
  assert np.max(contributions(loss, params, jnp.asarray(units), clip_norm=1e-3)) > 1e-3


def test_a_scale_without_zeroing_is_caught(monkeypatch):
  """0 * NaN is NaN: the operand must be zeroed too."""
  loss, params, units, _ = CASES["dense"]
  bad = units.at[1, 2].set(math.nan)
  assert np.max(contributions(loss, params, bad)) <= 1
  for module in (arrays, products):
    monkeypatch.setattr(module, "zeroed", lambda x, scales: x)
  assert np.max(contributions(loss, params, bad)) > 1


def test_squares_that_are_not_scaled_are_caught(monkeypatch):
  loss, params, units, _ = CASES["gram of tokens"]
  assert compare(loss, params, 1e25 * units).agrees(bound=1e-3)
  monkeypatch.setattr(rules, "_largest", lambda x, axes: jax.lax.full_like(x[:, :1, :1, :1], 1.0))
  assert not compare(loss, params, 1e25 * units).agrees(bound=1e-3)
