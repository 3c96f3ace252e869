"""Clipped sums of per-unit gradients: `clipped_grad` takes the place of `jax.grad`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.norms import clip_scales, per_unit_norms, scaled

PyTree = Any
LossFn = Callable[[PyTree, PyTree, Any], jax.Array]
Engine = Literal["auto", "vmap"]

ENGINES = ("auto", "vmap")


class ClipAux(NamedTuple):
  """What clipping saw of each unit. Not private: write it only under `private/`.

  Attributes:
    norms: float32[B], the L2 norms before clipping; 0 for padding.
    losses: float32[B], the losses of the units; 0 for padding.
  """

  norms: jax.Array
  losses: jax.Array


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
  """`(params, units, mask, key) -> (total, aux)`, with the sensitivity that it guarantees.

  Formal guarantee: let S be the value of the total. For any units whatever, and any position,
  setting the mask of one unit to False, or replacing the unit by one that is all padding, moves S
  by at most `clip_norm` in L2; exchanging a unit for another moves it by at most twice that. With
  `compensated=True` this holds for the pair that is returned, the rounding included. A total that
  is collapsed to float32 (the default) adds the rounding of the collapse, at most 2^-23 * B *
  clip_norm between neighbours; above about 10,000 units a step use the pair.
  """

  loss_fn: LossFn
  clip_norm: float
  engine: Engine = "auto"
  microbatch_size: int | None = None
  compensated: bool = False

  def sensitivity(self, adjacency: str) -> float:
    """L2 sensitivity of the total, in units of the gradient, under an adjacency.

    Raises:
      ValueError: if the adjacency is not one of the three.
    """
    factors = {"zero_out": 1.0, "add_or_remove_one": 1.0, "replace_one": 2.0}
    if adjacency not in factors:
      raise ValueError(f"adjacency {adjacency!r} is not one of {', '.join(factors)}.")
    return factors[adjacency] * self.clip_norm

  def __call__(
    self, params: PyTree, units: PyTree, mask: Any = None, key: Any = None
  ) -> tuple[Any, ClipAux]:
    """Clips each unit's gradient and sums over the units.

    Args:
      params: the trained parameters, floating-point leaves.
      units: leaves [B, ...]; B may be 0.
      mask: bool[B], False marks padding, which adds exactly zero; None means all True.
      key: None, one key, which is split by position, or a key array [B] with a key per unit.

    Returns:
      The total, leaves float32 with the shapes of `params` (or a `Compensated` pair of such
      trees), and the `ClipAux` of the units.

    Raises:
      ValueError: if the loss is not one real scalar, or the shapes do not fit.
    """
    size = _num_units(units)
    mask = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != (size,) or mask.dtype != jnp.bool_:
      raise ValueError(f"mask must be bool[{size}], got {mask.dtype}{list(mask.shape)}.")
    keys = _keys_per_unit(key, size)
    if size == 0:
      total = pairs.zeros_like(params)
      aux = ClipAux(jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32))
    else:
      _check_loss(self.loss_fn, params, units, keys)
      total, aux = self._in_microbatches(params, units, mask, keys, size)
    return (total if self.compensated else pairs.collapse(total)), aux

  def _in_microbatches(
    self, params: PyTree, units: PyTree, mask: jax.Array, keys: Any, size: int
  ) -> tuple[Compensated, ClipAux]:
    step = self.microbatch_size
    if step is None or step >= size:
      return _vmap_engine(self.loss_fn, params, units, mask, keys, self.clip_norm)
    count = -(-size // step)

    def chunk(x: jax.Array) -> jax.Array:
      # The filler repeats the last unit, so that it is a valid input; the mask makes it zero.
      filled = x[jnp.minimum(jnp.arange(count * step), size - 1)]
      return filled.reshape(count, step, *x.shape[1:])

    mask = jnp.pad(mask, (0, count * step - size)).reshape(count, step)

    def body(total: Compensated, xs: Any) -> tuple[Compensated, ClipAux]:
      some_units, some_mask, some_keys = xs
      part, aux = _vmap_engine(
        self.loss_fn, params, some_units, some_mask, some_keys, self.clip_norm
      )
      return pairs.add(total, part), aux

    inputs = (jax.tree.map(chunk, units), mask, jax.tree.map(chunk, keys))
    total, aux = jax.lax.scan(body, pairs.zeros_like(params), inputs)
    return total, ClipAux(*(x.reshape(-1)[:size] for x in aux))


def clipped_grad(
  loss_fn: LossFn,
  clip_norm: float,
  *,
  engine: Engine = "auto",
  microbatch_size: int | None = None,
  compensated: bool = False,
) -> ClippedGrad:
  """Replaces `jax.grad`: the sum over units of their gradients, each clipped to `clip_norm`.

  A unit whose gradient norm is not finite, or beyond 2^100 clip_norm, counts as zero. Norms and
  sums are float32 whatever the compute dtype, and units are clipped to clip_norm (1 - 2^-10), so
  that rounding stays inside.

  Args:
    loss_fn: `(params, unit, key) -> scalar`, the loss of *one* unit. It never sees two units, so
      an operation across examples (batch normalisation in training mode, a loss that is normalised
      over the batch) cannot be written by accident.
    clip_norm: the bound C > 0, in units of the gradient.
    engine: how the sum is computed; `vmap` is the reference, `auto` chooses.
    microbatch_size: the most units whose gradients are held at a time; None means all.
    compensated: return the total as a `Compensated` (sum, error) pair.

  Returns:
    A `ClippedGrad`, to be called with `(params, units, mask, key)`.

  Raises:
    ValueError: if clip_norm is not positive and finite, the engine is unknown, or the
      microbatch size is below 1.

  Abadi et al. 2016, arXiv:1607.00133, Algorithm 1.
  """
  if not (isinstance(clip_norm, int | float) and math.isfinite(clip_norm) and clip_norm > 0):
    raise ValueError(f"clip_norm must be a positive number, got {clip_norm!r}.")
  if engine not in ENGINES:
    raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}.")
  if microbatch_size is not None and microbatch_size < 1:
    raise ValueError(f"microbatch_size must be at least 1 or None, got {microbatch_size!r}.")
  return ClippedGrad(loss_fn, float(clip_norm), engine, microbatch_size, compensated)


def clip_and_sum(grads: PyTree, mask: jax.Array, clip_norm: float) -> tuple[Compensated, jax.Array]:
  """Clips each unit's gradient to `clip_norm` in L2 and sums over units.

  Adding or removing one unit moves the sum by at most `clip_norm`, whatever the unit holds: one
  whose norm is not finite counts as zero.

  Args:
    grads: leaves float[B, ...], the gradient of each unit's loss.
    mask: bool[B]; False marks padding, which adds exactly zero.
    clip_norm: the bound C > 0, in units of the gradient.

  Returns:
    The sum, a pair of leaves float32[...], and the norms before clipping, float32[B]. The norms
    are not private.
  """
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  norms = per_unit_norms(grads)
  scales = clip_scales(norms, mask, clip_norm)
  return pairs.sum_units(jax.tree.map(lambda g: scaled(g, scales), grads)), norms


def _vmap_engine(
  loss_fn: LossFn, params: PyTree, units: PyTree, mask: jax.Array, keys: Any, clip_norm: float
) -> tuple[Compensated, ClipAux]:
  """The reference engine: every unit's gradient is materialised."""
  in_axes = (None, 0, None if keys is None else 0)
  losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes)(params, units, keys)
  total, norms = clip_and_sum(grads, mask, clip_norm)
  zero = jnp.zeros_like(norms)
  losses = losses.astype(jnp.float32)
  return total, ClipAux(jnp.where(mask, norms, zero), jnp.where(mask, losses, zero))


def _check_loss(loss_fn: LossFn, params: PyTree, units: PyTree, keys: Any) -> None:
  """Refuses, before anything runs, a loss that is not the scalar loss of one unit."""
  one, one_key = jax.tree.map(lambda x: x[0], (units, keys))
  try:
    out = jax.eval_shape(loss_fn, params, one, one_key)
  except NameError as error:  # jax's error for a collective over an axis that is not bound
    raise ValueError(
      f"the loss of one unit uses a collective across units ({error}); a per-unit gradient does"
      " not exist for it. Remove the cross-example operation (for example BatchNorm's axis_name)."
    ) from error
  leaves = jax.tree.leaves(out)
  if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
    raise ValueError(
      "loss_fn must return the loss of one unit, a real scalar; it returned"
      f" {[f'{x.dtype}{list(x.shape)}' for x in leaves]}. Per-unit losses of a batch are its vmap."
    )


def _num_units(units: PyTree) -> int:
  sizes = {jnp.shape(x)[0] if jnp.ndim(x) else -1 for x in jax.tree.leaves(units)}
  if len(sizes) != 1 or -1 in sizes:
    raise ValueError(f"every leaf of units needs the same first axis, got sizes {sizes}.")
  return sizes.pop()


def _keys_per_unit(key: Any, size: int) -> Any:
  if key is None:
    return None
  if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
    raise ValueError("key must be a typed key (jax.random.key or wrap_key_data) or None.")
  if key.ndim == 0:
    return jax.random.split(key, size)
  if key.shape != (size,):
    raise ValueError(f"key must be one key or {size} keys, one a unit; got shape {key.shape}.")
  return key
