"""The plan of the ghost engine as a table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.clipping import ClippedGrad
from dp_jax.gradients.engines.cost import loop_is_cheaper
from dp_jax.gradients.engines.dispatch import engine_for
from dp_jax.gradients.engines.looped import UNITS_A_TURN
from dp_jax.gradients.ghost import engine as ghost
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.chunks import units_at_a_time
from dp_jax.gradients.ghost.plan import KNOWN, Group
from dp_jax.gradients.ghost.traced import Traced, trace
from dp_jax.gradients.ghost.uses import UnsupportedError
from dp_jax.gradients.parameters import check_params
from dp_jax.gradients.per_unit import check_loss

_HEADER = ("parameters", "uses", "rule", "operations", "bytes")


def explain(grad_fn: ClippedGrad, params: Any, units: Any, key: Any = None) -> str:
  """A table of how the norm of each parameter is computed, and what that costs.

  Nothing is computed: arrays may be `jax.ShapeDtypeStruct`. Under microbatch_size "auto" a few
  sizes are compiled, as in a call.

  Args:
    grad_fn: of `clipped_grad`.
    params: the parameters.
    units: leaves [B, ...].
    key: one key, or None if the loss needs none.

  Returns:
    Lines of text. Operations (floating-point, for the norms) and bytes (of instantiated gradients
    and Gram matrices, as many as are held at a time) are those of one microbatch. Parameters that
    share a line are clipped by one gradient; a parameter whose gradient is always zero is listed
    as unused.

  Raises:
    ValueError: as a call would: if a parameter is not real, units could see each other, or one
      unit does not fit the memory budget.
  """
  params = check_params(params)
  total = jax.tree.leaves(units)[0].shape[0]
  # As a call makes them.
  keys = None if key is None else jax.eval_shape(lambda k: jax.random.split(k, total), key)
  size = _microbatch(grad_fn, params, units, keys, total)
  if grad_fn.engine == "loop":
    return _looped(params)
  unit = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), units)
  no_map: list[str | None] = []
  jax.eval_shape(
    lambda p, u, k: no_map.append(check_loss(grad_fn.loss_fn, p, u, k)), params, unit, key
  )
  if engine_for(grad_fn.engine, no_map[0]) == "loop":
    return f"{_looped(params)}, since vmap over units may mix them: {no_map[0]}"
  if grad_fn.engine == "vmap":
    return _mapped(params, size)
  found: list[Traced] = []
  try:
    jax.eval_shape(lambda p, u, k: found.append(trace(grad_fn.loss_fn, p, u, k)), params, unit, key)
    plan = _lines(found[0], size, grad_fn.memory_budget)
  except UnsupportedError as error:
    plan = [f"{_mapped(params, size)}, since {error}"]
  try:
    jax.eval_shape(functools.partial(_backward, grad_fn, found), params, units, keys)
  except NotImplementedError as error:
    return f"{_looped(params)}, since jax cannot map this loss over units: {error}"
  cheaper = bool(found) and loop_is_cheaper(found[0], params, grad_fn.memory_budget)
  if grad_fn.engine == "auto" and cheaper:
    plan.insert(0, f"{_looped(params)}, since ghost would cost more here:")
  return "\n".join(plan)


def _microbatch(grad_fn: ClippedGrad, params: Any, units: Any, keys: Any, size: int) -> int:
  mask = jax.ShapeDtypeStruct((size,), jnp.bool_)
  return min(size, grad_fn.microbatch(params, units, mask, keys, size))


def _backward(grad_fn: ClippedGrad, found: list[Traced], params: Any, units: Any, keys: Any) -> Any:
  """What is mapped over units: by ghost, or by vmap where there is no plan."""
  if found:
    leaves = jax.tree.leaves(params)
    return Batch.run(found[0], leaves, units, keys, grad_fn.memory_budget).losses
  in_axes = (None, 0, None if keys is None else 0)
  return jax.vmap(jax.value_and_grad(grad_fn.loss_fn), in_axes)(params, units, keys)


def _mapped(params: Any, size: int) -> str:
  return f"vmap: gradients of {size} units, {_gradient_bytes(params, size)} bytes"


def _looped(params: Any) -> str:
  held = _gradient_bytes(params, UNITS_A_TURN)
  return f"loop: gradients of {UNITS_A_TURN} units, {held} bytes"


def _lines(traced: Traced, size: int, memory_budget: int) -> list[str]:
  kept, _ = ghost.kept_groups(traced.groups, size, memory_budget)
  rows = [_HEADER]
  for index, group in enumerate(traced.groups):
    rows.append(_row(traced, group, size, _held(group, size, index in kept, memory_budget)))
  used = {root for group in traced.groups for root in group.roots}
  rows += [(name, "", "unused", "0", "0") for i, name in enumerate(traced.paths) if i not in used]
  widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
  return [
    "  ".join(
      cell.rjust(width) if column > 2 else cell.ljust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def _held(group: Group, size: int, is_kept: bool, memory_budget: int) -> tuple[int, str]:
  """How many units' gradients or Gram matrices there are at a time, in numbers and in words."""
  if is_kept:
    return size, ""
  if group.rule == "instantiate":
    return 1, ", one unit at a time, twice"
  return min(size, units_at_a_time(4 * group.numbers, memory_budget)), ""


def _row(
  traced: Traced, group: Group, size: int, held: tuple[int, str]
) -> tuple[str, str, str, str, str]:
  names = [traced.uses[i].name for i in group.uses]
  counted = [(names.count(name), name) for name in dict.fromkeys(names)]
  uses = ", ".join(f"{count} {name}" if count > 1 else name for count, name in counted)
  units, words = held
  unknown = " (unknown primitive)" if any(name not in KNOWN for name in names) else ""
  rule = f"{group.rule}: {group.how}{unknown}{words}"
  parameters = ", ".join(traced.paths[root] for root in group.roots)
  return parameters, uses, rule, f"{group.flops * size:,}", f"{4 * group.numbers * units:,}"


def _gradient_bytes(params: Any, size: int) -> str:
  return f"{4 * size * sum(leaf.size for leaf in jax.tree.leaves(params)):,}"
