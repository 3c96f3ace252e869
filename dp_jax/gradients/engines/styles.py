"""Styles of clipping: what a unit's gradient is multiplied with, given its norm."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients.engines.norms import CLIP_MARGIN, LARGEST_RATIO, total_norms
from dp_jax.gradients.options import is_number

PyTree = Any
StyleName = Literal["flat", "automatic"]
# A mapping is kept as sorted pairs, so that what holds it can be hashed.
Shares = tuple[tuple[str, float], ...]

STYLES = ("flat", "automatic")
# The gamma of automatic clipping, in units of the gradient: what Bu et al. use throughout.
GAMMA = 0.01


@dataclasses.dataclass(frozen=True)
class ClipRule:
  """A style of clipping, for given parameters.

  Attributes:
    group_of: for each leaf of the parameters, its clipping group.
    bounds: the clip norm of each group; their squares add up to at most that of the whole.
    gamma: None clips, multiplying with min(1, bound / norm); a number normalises, multiplying with
      bound / (norm + gamma).
  """

  group_of: tuple[int, ...]
  bounds: tuple[float, ...]
  gamma: float | None = None

  def scales(self, norms: jax.Array, mask: jax.Array) -> jax.Array:
    """What the gradient of each group and unit is multiplied with.

    Args:
      norms: float32[G, B], of each group's part of each unit's gradient.
      mask: bool[B].

    Returns:
      float32[G, B]; zero for padding, and for a unit that has a norm that is not finite or above
      2^100 times the bound in any group.
    """
    exact = np.asarray(self.bounds)[:, None] * (1 - CLIP_MARGIN)
    bounds = exact.astype(np.float32)
    largest = np.minimum(exact * LARGEST_RATIO, np.finfo(np.float32).max).astype(np.float32)
    keep = mask & jnp.all(norms <= largest, axis=0)  # false for infinity and NaN
    norms = jnp.where(keep[None], norms, 1.0)
    if self.gamma is None:
      factors = jnp.minimum(1.0, bounds / norms)
    else:
      factors = jnp.divide(bounds, norms + np.float32(self.gamma))
    return jnp.where(keep[None], factors, 0.0)

  def by_leaf(self, scales: jax.Array) -> list[jax.Array]:
    """float32[G, B] -> float32[B] for each leaf of the parameters."""
    return [scales[group] for group in self.group_of]

  def combine(self, norms: jax.Array) -> jax.Array:
    """The norm over all groups: float32[G, B] -> float32[B]."""
    return norms[0] if len(self.bounds) == 1 else total_norms(norms)


def check_style(clipping: Any) -> StyleName | Shares:
  """Refuses what is no style of clipping; makes a mapping, or its pairs, hashable.

  Raises:
    ValueError: for an unknown name, an invalid expression, or shares that are not positive or do
      not sum to 1.
  """
  if isinstance(clipping, str) and clipping in STYLES:
    return clipping  # type: ignore[return-value]
  if isinstance(clipping, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in clipping):
    pairs, clipping = clipping, dict(clipping)
    if len(clipping) != len(pairs):
      raise UserError(f"a clipping group is given twice in {pairs!r}.")
  if not isinstance(clipping, Mapping) or not clipping:
    raise UserError(
      f"clipping {clipping!r} is not one of {', '.join(STYLES)}, or a mapping from regular"
      " expressions on parameter paths to shares of the squared clip norm."
    )
  for pattern, share in clipping.items():
    try:
      re.compile(pattern)
    except (re.error, TypeError) as error:
      raise UserError(f"clipping group {pattern!r} is not a regular expression: {error}.") from None
    if not (is_number(share) and 0 < share <= 1):
      raise UserError(f"the share of clipping group {pattern!r} must be in (0, 1], got {share!r}.")
  total = math.fsum(clipping.values())
  if abs(total - 1) > 1e-9:
    raise UserError(f"the shares of the clipping groups must sum to 1, got {total!r}.")
  return tuple(sorted((pattern, float(share)) for pattern, share in clipping.items()))


def make_rule(clipping: StyleName | Shares, clip_norm: float, params: PyTree) -> ClipRule:
  """The rule of a checked style for these parameters.

  Raises:
    ValueError: if a parameter is in no group or in several, or a group is empty.
  """
  paths = [
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  if isinstance(clipping, str):
    gamma = GAMMA if clipping == "automatic" else None
    return ClipRule((0,) * len(paths), (clip_norm,), gamma)
  group_of = tuple(_only_group(path, [pattern for pattern, _ in clipping]) for path in paths)
  for group, (pattern, _) in enumerate(clipping):
    if group not in group_of:
      raise UserError(f"clipping group {pattern!r} matches none of {', '.join(paths)}.")
  return ClipRule(group_of, tuple(clip_norm * math.sqrt(share) for _, share in clipping))


def _only_group(path: str, patterns: Sequence[str]) -> int:
  found = [i for i, pattern in enumerate(patterns) if re.search(pattern, path)]
  if len(found) == 1:
    return found[0]
  names = ", ".join(repr(patterns[i]) for i in found or range(len(patterns)))
  raise UserError(
    f"parameter {path!r} is in {len(found)} clipping groups and must be in exactly one:"
    f" {'it matches' if found else 'it matches none of'} {names}."
  )
