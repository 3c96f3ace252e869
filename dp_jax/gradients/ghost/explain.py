"""The plan of the ghost engine as a table."""

from typing import Any

import jax

from dp_jax.gradients.clipping import ClippedGrad
from dp_jax.gradients.cost import loop_is_cheaper
from dp_jax.gradients.ghost import engine as ghost
from dp_jax.gradients.ghost.plan import KNOWN, Group
from dp_jax.gradients.ghost.uses import UnsupportedError
from dp_jax.gradients.looped import UNITS_A_TURN

_HEADER = ("parameters", "uses", "rule", "operations", "bytes")


def explain(grad_fn: ClippedGrad, params: Any, units: Any, key: Any = None) -> str:
  """A table of how the norm of each parameter is computed, and what that costs.

  Nothing is computed: arrays may be `jax.ShapeDtypeStruct`.

  Args:
    grad_fn: of `clipped_grad`.
    params: the parameters.
    units: leaves [B, ...].
    key: one key, or None if the loss needs none.

  Returns:
    Lines of text. Operations (floating-point, for the norms) and bytes (of instantiated gradients
    and Gram matrices) are those of one microbatch. Parameters that share a line are clipped by
    one gradient; a parameter whose gradient is always zero is listed as unused.
  """
  size = jax.tree.leaves(units)[0].shape[0]
  size = min(size, grad_fn.microbatch_size or size)
  made = f"{grad_fn.engine}: gradients of"
  if grad_fn.engine == "vmap":
    return f"{made} {size} units, {_gradient_bytes(params, size)} bytes"
  if grad_fn.engine == "loop":
    return f"{made} {UNITS_A_TURN} units, {_gradient_bytes(params, UNITS_A_TURN)} bytes"
  unit = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), units)
  found: list[ghost.Traced] = []
  try:
    jax.eval_shape(
      lambda p, u, k: found.append(ghost.trace(grad_fn.loss_fn, p, u, k)), params, unit, key
    )
  except UnsupportedError as error:
    return f"vmap: gradients of {size} units, {_gradient_bytes(params, size)} bytes, since {error}"
  lines = _lines(found[0], size, grad_fn.memory_budget)
  if grad_fn.engine == "auto" and loop_is_cheaper(found[0], params, grad_fn.memory_budget):
    held = _gradient_bytes(params, UNITS_A_TURN)
    lines.insert(
      0, f"loop: gradients of {UNITS_A_TURN} units, {held} bytes, since ghost would cost more here:"
    )
  return "\n".join(lines)


def _lines(traced: ghost.Traced, size: int, memory_budget: int) -> list[str]:
  rows = [_HEADER, *(_row(traced, group, size, memory_budget) for group in traced.groups)]
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


def _row(
  traced: ghost.Traced, group: Group, size: int, memory_budget: int
) -> tuple[str, str, str, str, str]:
  names = [traced.uses[i].name for i in group.uses]
  counted = [(names.count(name), name) for name in dict.fromkeys(names)]
  uses = ", ".join(f"{count} {name}" if count > 1 else name for count, name in counted)
  rule = f"{group.rule}: {group.how}"
  if any(name not in KNOWN for name in names):
    rule += " (unknown primitive)"
  held = 4 * group.numbers * size
  if group.rule == "instantiate" and held > memory_budget:
    rule, held = f"{rule}, one unit at a time, twice", 4 * group.numbers
  parameters = ", ".join(traced.paths[root] for root in group.roots)
  return parameters, uses, rule, f"{group.flops * size:,}", f"{held:,}"


def _gradient_bytes(params: Any, size: int) -> str:
  return f"{4 * size * sum(leaf.size for leaf in jax.tree.leaves(params)):,}"
