"""The engines that compute a clipped sum: gradients of units, by vmap or in a loop, or ghost."""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines import looped
from dp_jax.gradients.engines.cost import loop_is_cheaper
from dp_jax.gradients.engines.norms import per_unit_norms, scaled
from dp_jax.gradients.engines.styles import ClipRule
from dp_jax.gradients.ghost import engine as ghost
from dp_jax.gradients.ghost.traced import check_known, trace
from dp_jax.gradients.ghost.uses import UnsupportedError
from dp_jax.gradients.per_unit import one_at_a_time

PyTree = Any
LossFn = Callable[[PyTree, PyTree, Any], jax.Array]
Engine = Literal["auto", "vmap", "ghost", "loop"]

ENGINES = ("auto", "vmap", "ghost", "loop")

_log = logging.getLogger(__name__)
_told: set[str] = set()


class ClipAux(NamedTuple):
  """What clipping saw of each unit. Not private: write it only under `private/`.

  Attributes:
    norms: float32[B], the L2 norms before clipping (the ghost engine's are upper bounds, by no
      more than rounding); 0 for padding.
    losses: float32[B], the losses of the units; 0 for padding.
  """

  norms: jax.Array
  losses: jax.Array


def clipped_sum(
  engine: Engine,
  loss_fn: LossFn,
  params: PyTree,
  units: PyTree,
  mask: jax.Array,
  keys: Any,
  rule: ClipRule,
  memory_budget: int,
  exact: bool,
  alone: bool = False,
) -> tuple[Compensated, ClipAux]:
  """Sums the scaled gradients of a batch of units.

  Args:
    engine: "vmap" makes every unit's gradient; "ghost" makes none, and refuses a primitive that
      it has no rule for; "loop" makes two at a time, without vmap; "auto" is vmap where ghost is
      not sound, loop where that is cheaper or jax cannot map the loss, and ghost elsewhere.
    loss_fn: (params, unit, key) -> scalar.
    params: the parameters.
    units: leaves [B, ...].
    mask: bool[B].
    keys: a key a unit, or None.
    rule: what each gradient is multiplied with, from its norm.
    memory_budget: bytes of instantiated gradients that may be kept.
    exact: of `clipped_grad`. The sums of vmap are so anyway.
    alone: whether vmap of the loss may not be its map; takes engine "loop", and an outer vmap does
      not reach into it either.

  Raises:
    ValueError: under "ghost", naming the primitive and the parameter that has no rule; under
      "ghost" and "vmap", where jax has no batching rule for a primitive.
  """
  one, one_key = jax.tree.map(lambda x: x[0], (units, keys))
  if engine == "loop":
    gradient = jax.value_and_grad(loss_fn)
    if alone:
      gradient = one_at_a_time(gradient, params, one, one_key)
    return _by_loop(gradient, params, units, mask, keys, rule, exact)
  try:
    return _by_map(engine, loss_fn, params, units, mask, keys, rule, memory_budget, exact)
  except NotImplementedError as error:  # of jax: a primitive that vmap has no rule for
    if engine != "auto":
      raise UserError(
        f"engine {engine!r} cannot map this loss over units ({error}): use engine 'auto' or 'loop',"
        " which take one unit at a time."
      ) from error
    _tell_once(f"clipping in a loop, since jax cannot map this loss over units: {error}")
    return _by_loop(jax.value_and_grad(loss_fn), params, units, mask, keys, rule, exact)


def _by_map(
  engine: Engine, loss_fn: LossFn, params: PyTree, units: PyTree, mask: jax.Array, keys: Any,
  rule: ClipRule, memory_budget: int, exact: bool,
) -> tuple[Compensated, ClipAux]:  # fmt: skip
  """By vmap or ghost, or in a loop where "auto" finds that cheaper."""
  if engine == "vmap":
    return _by_vmap(loss_fn, params, units, mask, keys, rule)
  one, one_key = jax.tree.map(lambda x: x[0], (units, keys))
  try:
    traced = trace(loss_fn, params, one, one_key)
    if engine == "ghost":
      check_known(traced)
  except UnsupportedError as error:
    if engine == "ghost":
      raise
    _tell_once(f"clipping by vmap, since ghost clipping cannot serve this loss: {error}")
    return _by_vmap(loss_fn, params, units, mask, keys, rule)
  if engine == "auto" and loop_is_cheaper(traced, params, memory_budget):
    return _by_loop(jax.value_and_grad(loss_fn), params, units, mask, keys, rule, exact)
  total, norms, losses = ghost.clipped_sum(
    traced, params, units, mask, keys, rule, memory_budget, exact
  )
  return total, _aux(norms, losses, mask)


def engine_for(engine: Engine, no_map: str | None) -> Engine:
  """The engine to take for a loss of which `per_unit.check_loss` says whether vmap is its map.

  Args:
    engine: that was asked for.
    no_map: the operation for which vmap may not be the map, or None.

  Raises:
    ValueError: if engine "vmap" or "ghost" was asked for and would rely on it.
  """
  if no_map is None or engine == "loop":
    return engine
  if engine == "auto":
    _tell_once(f"clipping in a loop, since vmap over units may mix them: {no_map}")
    return "loop"
  raise UserError(
    f"engine {engine!r} maps the loss over units by vmap, which may mix them here: {no_map}. Use"
    " engine 'auto' or 'loop', which take one unit at a time."
  )


def _by_loop(
  gradient: Callable[..., Any], params: PyTree, units: PyTree, mask: jax.Array, keys: Any,
  rule: ClipRule, exact: bool,
) -> tuple[Compensated, ClipAux]:  # fmt: skip
  """The gradients of two units at a time."""
  total, norms, losses = looped.clipped_sum(gradient, params, units, mask, keys, rule, exact)
  return total, _aux(norms, losses, mask)


def _by_vmap(
  loss_fn: LossFn, params: PyTree, units: PyTree, mask: jax.Array, keys: Any, rule: ClipRule
) -> tuple[Compensated, ClipAux]:
  """The reference engine: every unit's gradient is materialised."""
  in_axes = (None, 0, None if keys is None else 0)
  losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes)(params, units, keys)
  total, norms = clip_and_sum(grads, mask, rule)
  return total, _aux(norms, losses, mask)


def clip_and_sum(grads: PyTree, mask: jax.Array, rule: ClipRule) -> tuple[Compensated, jax.Array]:
  """Clips each unit's gradient and sums over the units.

  Args:
    grads: leaves float[B, ...], the gradient of each unit's loss.
    mask: bool[B]; False marks padding, which adds exactly zero.
    rule: what each gradient is multiplied with, from its norm.

  Returns:
    The sum as a pair, leaves float32[...], and the norms before clipping, float32[B].
  """
  if mask.shape[0] == 0:
    one = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], jnp.float32), grads)
    return pairs.zeros_like(one), jnp.zeros(0, jnp.float32)
  # What is measured is what is added: a compiler may compute it twice, and round differently.
  grads = jax.lax.optimization_barrier(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
  leaves, structure = jax.tree.flatten(grads)
  parts: list[list[jax.Array]] = [[] for _ in rule.bounds]
  for group, leaf in zip(rule.group_of, leaves, strict=True):
    parts[group].append(leaf)
  norms = jnp.stack([per_unit_norms(part) for part in parts])
  scales = rule.by_leaf(rule.scales(norms, mask))
  kept = [scaled(leaf, scale) for leaf, scale in zip(leaves, scales, strict=True)]
  total = pairs.sum_units(jax.tree.unflatten(structure, kept))
  return total, rule.combine(norms)


def _aux(norms: jax.Array, losses: jax.Array, mask: jax.Array) -> ClipAux:
  losses = losses.astype(jnp.float32)
  return ClipAux(jnp.where(mask, norms, 0.0), jnp.where(mask, losses, 0.0))


def _tell_once(message: str) -> None:
  if message not in _told:
    _told.add(message)
    _log.warning(message)
