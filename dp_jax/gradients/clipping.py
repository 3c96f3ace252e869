"""Clipped sums of per-unit gradients: `clipped_grad` takes the place of `jax.grad`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.arguments import check_mesh, keys_per_unit, num_units
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.dispatch import (
  ENGINES,
  ClipAux,
  Engine,
  LossFn,
  clipped_sum,
  engine_for,
)
from dp_jax.gradients.engines.filling import in_blocks
from dp_jax.gradients.engines.memory import largest_microbatch, temporary_bytes
from dp_jax.gradients.engines.styles import Shares, StyleName, check_style, make_rule
from dp_jax.gradients.noise.add_noise import is_tracing
from dp_jax.gradients.options import (
  MicrobatchSize,
  checked_budget,
  checked_flag,
  checked_microbatch_size,
  is_number,
)
from dp_jax.gradients.parameters import check_params
from dp_jax.gradients.per_unit import check_in_one_piece, check_loss

PyTree = Any

MEMORY_BUDGET = 2**30

# Units of one backward pass, but under vmap: the whole numbers of `ghost/lookups.py` hold as many.
MOST_UNITS = 4096

# Far below, squares of what is clipped leave the range of float32, and far above, its ratios.
_SMALLEST_CLIP, _LARGEST_CLIP = 1e-12, 1e12


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
  """`(params, units, mask, key) -> (total, aux)`, with the sensitivity that it guarantees.

  Formal guarantee: let S be the value of the total. For any units whatever, and any position,
  setting the mask of one unit to False, or replacing the unit by one that is all padding, moves S
  by at most `clip_norm` in L2; exchanging a unit for another moves it by at most twice that. So
  does taking a unit out, which moves later ones to other places, in any order of units: with
  `exact=True`, and under `vmap`. With `compensated=True` this holds for the pair that is returned,
  the rounding included: units are clipped to clip_norm (1 - 2^-10), norms and scales round by less
  than 2^-12, and float32 sums by at most 2^-11 of clip_norm between neighbours, a bound that is
  derived (`ghost/rounding.py`) for any units and tokens. A total that is collapsed to float32 (the
  default) adds the rounding of the collapse, at most 2^-23 * B * clip_norm between neighbours;
  above about 10,000 units a step use the pair.

  Where the loss draws random numbers, this holds for any fixed assignment of keys to units: a unit
  that is taken out must not move the others to other keys. So with `exact=True` one key, which is
  split by position, is refused: give a key a unit. Keys by a unit's index do, though an index may
  move as well: fresh keys that are secret all have one law, so that the total with a unit and the
  total without it can be coupled such that every other unit has the same key in both, and under any
  such coupling they differ by at most `clip_norm`. It follows that the keys of the units must be
  secret, as those of the noise are, and fresh at every call.

  The guarantee is for a loss of one unit that sees no other. What would let units see each other is
  refused by name: axes of an outer vmap, pmap or shard_map, side effects, references from outside,
  and values that differ between the devices of a shard_map with check_vma=True. Operations whose
  batching rule may not be the map over units (custom_vmap, kernels, callbacks that are not
  sequential, the generators rbg and unsafe_rbg) are refused by the engines "vmap" and "ghost", and
  "auto" takes one unit at a time. A pure_callback must be pure. What jax.debug prints is not
  covered.
  """

  loss_fn: LossFn
  clip_norm: float
  engine: Engine = "auto"
  clipping: StyleName | Shares = "flat"
  microbatch_size: MicrobatchSize = None
  compensated: bool = False
  memory_budget: int = MEMORY_BUDGET
  exact: bool = False

  def __post_init__(self) -> None:
    """Refuses what `clipped_grad` refuses, however it is made."""
    if not callable(self.loss_fn):
      raise UserError(f"loss_fn must be a function (params, unit, key) -> loss: {self.loss_fn!r}.")
    if self.engine not in ENGINES:
      raise UserError(f"engine {self.engine!r} is not one of {', '.join(ENGINES)}.")
    check_clip_norm(self.clip_norm)
    exact = checked_flag("exact", self.exact)
    checked = {
      "clip_norm": float(self.clip_norm),
      "clipping": check_style(self.clipping),
      "microbatch_size": checked_microbatch_size(self.microbatch_size),
      "compensated": checked_flag("compensated", self.compensated) or exact,
      "memory_budget": checked_budget(self.memory_budget),
      "exact": exact,
    }
    for name, value in checked.items():
      object.__setattr__(self, name, value)

  def sensitivity(self, adjacency: str) -> float:
    """L2 sensitivity of the total, in units of the gradient, under an adjacency.

    Raises:
      ValueError: if the adjacency is not one of the three.
    """
    return sensitivity(self.clip_norm, adjacency)

  def __call__(
    self, params: PyTree, units: PyTree, mask: Any = None, key: Any = None
  ) -> tuple[Any, ClipAux]:
    """Clips each unit's gradient and sums over the units.

    Args:
      params: the trained parameters, real floating-point leaves; a Python number is a scalar.
      units: leaves [B, ...]; B may be 0.
      mask: bool[B], False marks padding, which adds exactly zero; None means all True.
      key: None, one key, which is split by position (not with `exact`), or a key array [B] with a
        key a unit: secret, fresh at each call, and of the unit, not of its place.

    Returns:
      The total, leaves float32 with the shapes of `params` (or a `Compensated` pair of such
      trees), and the `ClipAux` of the units.

    Raises:
      ValueError: if the loss is not one real scalar, a parameter is not real, there is none, the
        shapes do not fit, or units could see each other, naming the operation.
    """
    params, units = check_params(params), jax.tree.map(jnp.asarray, units)
    check_mesh(params, units)
    check_in_one_piece({"params": params, "units": units, "mask": mask, "key": key})
    size = num_units(units)
    mask = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != (size,) or mask.dtype != jnp.bool_:
      raise UserError(f"mask must be bool[{size}], got {mask.dtype}{list(mask.shape)}.")
    keys = keys_per_unit(key, size, self.exact)
    if size == 0:
      total = pairs.zeros_like(params)
      aux = ClipAux(jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32))
    else:
      one, one_key = jax.tree.map(lambda x: x[0], (units, keys))
      no_map = check_loss(self.loss_fn, params, one, one_key)
      served = dataclasses.replace(self, engine=engine_for(self.engine, no_map))
      alone = no_map is not None
      total, aux = served._in_microbatches(params, units, mask, keys, size, alone)
    return (total if self.compensated else pairs.collapse(total)), aux

  def _in_microbatches(
    self, params: PyTree, units: PyTree, mask: jax.Array, keys: Any, size: int, alone: bool
  ) -> tuple[Compensated, ClipAux]:
    step = self.microbatch(params, units, mask, keys, size)
    if self.engine != "vmap":
      step = min(step, MOST_UNITS)
    if step >= size:
      return self._clipped_sum(params, units, mask, keys, alone)
    count = -(-size // step)
    step = -(-size // count)  # evenly, so that little is filled up
    inputs = in_blocks((units, keys), mask, (count, step))

    def body(total: Compensated, xs: Any) -> tuple[Compensated, ClipAux]:
      (some_units, some_keys), some_mask = xs
      part, aux = self._clipped_sum(params, some_units, some_mask, some_keys, alone)
      return pairs.add(total, part), aux

    total, aux = jax.lax.scan(body, pairs.zeros_like(params), inputs)
    return total, ClipAux(*(x.reshape(-1)[:size] for x in aux))

  def microbatch(self, params: PyTree, units: PyTree, mask: Any, keys: Any, size: int) -> int:
    """The most units whose gradients are held at a time; under "auto", by compiling a few sizes.

    Args:
      params: the parameters, arrays or their shapes, as the others.
      units: leaves [B, ...].
      mask: bool[B].
      keys: a key array [B], or None.
      size: B.

    Raises:
      ValueError: if one unit does not fit the memory budget.
    """
    if self.microbatch_size != "auto":
      return self.microbatch_size or size
    leaves, structure = jax.tree.flatten((params, units, mask, keys))
    shapes = tuple(jax.eval_shape(lambda *x: x, *leaves))
    # Traced, it happens once, and a cache would keep what the loss closes over alive.
    choose = _auto_size.__wrapped__ if is_tracing() else _auto_size
    return choose(self, structure, shapes, size)

  def _clipped_sum(
    self, params: PyTree, units: PyTree, mask: jax.Array, keys: Any, alone: bool
  ) -> tuple[Compensated, ClipAux]:
    rule = make_rule(self.clipping, self.clip_norm, params)
    return clipped_sum(
      self.engine, self.loss_fn, params, units, mask, keys, rule, self.memory_budget, self.exact,
      alone,
    )  # fmt: skip


def clipped_grad(
  loss_fn: LossFn,
  clip_norm: float,
  *,
  engine: Engine = "auto",
  clipping: StyleName | Mapping[str, float] = "flat",
  microbatch_size: MicrobatchSize = None,
  compensated: bool = False,
  memory_budget: int = MEMORY_BUDGET,
  exact: bool = False,
) -> ClippedGrad:
  """Replaces `jax.grad`: the sum over units of their gradients, each clipped to `clip_norm`.

  A unit whose gradient norm is not finite, or beyond 2^100 clip_norm, counts as zero. Norms and
  sums are float32 whatever the compute dtype, and units are clipped to clip_norm (1 - 2^-10), so
  that rounding stays inside.

  Args:
    loss_fn: `(params, unit, key) -> scalar`, the loss of *one* unit. It never sees two units, so
      an operation across examples (a loss that is normalised over the batch) cannot be written by
      accident, and what reaches other units in another way is refused. Batch normalisation in
      training mode then normalises one example by itself: `check_per_unit` finds it.
    clip_norm: the bound C, from 1e-12 to 1e12, in units of the gradient.
    engine: `vmap` makes every unit's gradient, and is the reference; `ghost` makes none where a
      rule allows it, and refuses a primitive that it has no rule for; `loop` makes those of two
      units at a time, without vmap. `auto` is loop where vmap may mix units or jax cannot map the
      loss, vmap where ghost is not sound, loop on one CPU where the norms of ghost would be dear,
      and ghost elsewhere.
    clipping: "flat" multiplies a unit's gradient with min(1, C / norm); "automatic" normalises it,
      multiplying with C / (norm + 0.01), so that the learning rate alone sets the size of a step
      (Bu et al. 2022, arXiv:2206.07136). A mapping from regular expressions, searched in the dotted
      path of each parameter, to shares that sum to 1 clips each group of parameters on its own, to
      C sqrt(share). The sensitivity is C under each.
    microbatch_size: the most units whose gradients are held at a time; None means all. "auto" is
      the most that fit the memory budget: all, or else a power of two. It compiles a few sizes
      when a batch of new shapes is first met, and asks XLA what they would take on one device.
    compensated: return the total as a `Compensated` (sum, error) pair.
    memory_budget: bytes of instantiated gradients that the ghost engine may keep at a time, and
      of the Gram matrices beside them (256 MB at most, and those of one unit at least); of all
      temporary memory of a call under microbatch_size "auto".
    exact: add units in float64, or as pairs from the first addition, where neighbours may lack a
      unit (add_or_remove_one); implies `compensated`, since collapsing to float32 would undo it.
      Slower: a product over units takes several times as long.

  Returns:
    A `ClippedGrad`, to be called with `(params, units, mask, key)`.

  Raises:
    ValueError: if clip_norm is not in [1e-12, 1e12], engine or clipping are unknown, shares do
      not sum to 1, the microbatch size is below 1, the budget is negative, or a flag is no truth
      value; the class refuses the same. When called: if there is no parameter or one is not real, a
      parameter is not in exactly one clipping group, one unit does not fit the memory budget, or
      an argument lies on a mesh with Explicit axes.

  Abadi et al. 2016, arXiv:1607.00133, Algorithm 1.
  """
  return ClippedGrad(
    loss_fn, clip_norm, engine, check_style(clipping), microbatch_size, compensated, memory_budget,
    exact,
  )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _auto_size(grad_fn: ClippedGrad, structure: Any, leaves: tuple[Any, ...], size: int) -> int:
  """The microbatch size that "auto" stands for, at these shapes."""
  args = jax.tree.unflatten(structure, leaves)

  @functools.cache
  def bytes_of(count: int) -> float:
    return temporary_bytes(dataclasses.replace(grad_fn, microbatch_size=count), *args)

  return largest_microbatch(bytes_of, size, grad_fn.memory_budget)


def sensitivity(clip_norm: float, adjacency: str) -> float:
  """L2 sensitivity of a sum over units of vectors that are at most `clip_norm` long.

  Raises:
    ValueError: if the adjacency is not one of the three, or clip_norm is out of range.
  """
  factors = {"zero_out": 1.0, "add_or_remove_one": 1.0, "replace_one": 2.0}
  if adjacency not in factors:
    raise UserError(f"adjacency {adjacency!r} is not one of {', '.join(factors)}.")
  check_clip_norm(clip_norm)
  return factors[adjacency] * clip_norm


def check_clip_norm(clip_norm: Any) -> None:
  """Refuses a clip norm that float32 does not serve.

  Raises:
    ValueError: naming the value and the range.
  """
  if not is_number(clip_norm) or not _SMALLEST_CLIP <= clip_norm <= _LARGEST_CLIP:
    raise UserError(
      f"clip_norm must be a number from {_SMALLEST_CLIP} to {_LARGEST_CLIP}, got {clip_norm!r}."
    )
