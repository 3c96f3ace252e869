"""A linear head on normalised features: what the solvers of `dp_jax.solvers` fit."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError

# (columns, factor) of each block of columns, one after the other.
Blocks = tuple[tuple[int, float], ...]

# Below it a row counts as zero: it has no direction.
_SMALLEST_NORM = 1e-12


class FeatureHead(nnx.Module):
  """Logits that are linear in a normalised feature vector.

  The rows are first raised to a power, blocks of their columns multiplied by factors, then scaled
  to norm 1, moved by a centre and scaled again, multiplied by a matrix and scaled again. Each of
  these steps is optional.
  """

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    rngs: nnx.Rngs,
    power: float = 1.0,
    centred: bool = False,
    transformed: bool = False,
    blocks: Sequence[Sequence[float]] = (),
    dtype: DTypeLike = jnp.float32,
  ):
    """Builds the head.

    Args:
      input_shape: (features,).
      num_classes: outputs.
      rngs: of the initial kernel.
      power: x becomes sign(x) |x|^power before anything else.
      centred: whether a centre is subtracted; it starts as zero.
      transformed: whether rows are multiplied by a matrix; it starts as the identity.
      blocks: (columns, factor) of each block of columns; () multiplies none.
      dtype: of the head's product; rows are normalised in float32.

    Raises:
      ValueError: if the input is no vector, the power not positive, or the blocks do not fit.
    """
    if len(input_shape) != 1:
      raise UserError(f"feature_head takes vectors, not inputs of shape {tuple(input_shape)}.")
    if not power > 0:
      raise UserError(f"power={power!r} must be positive.")
    (size,) = input_shape
    self.power, self.blocks = power, check_blocks(blocks, size)
    self.centre = nnx.Param(jnp.zeros(size)) if centred else None
    self.transform = nnx.Param(jnp.eye(size)) if transformed else None
    self.head = nnx.Linear(size, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """float[N, features] -> logits float[N, num_classes]."""
    centre = None if self.centre is None else self.centre[...]
    transform = None if self.transform is None else self.transform[...]
    rows = feature_map(inputs, self.power, centre, transform, self.blocks)
    return self.head(rows).astype(jnp.float32)


def check_blocks(blocks: Sequence[Sequence[float]], size: int) -> Blocks:
  """The blocks as a tuple.

  Raises:
    ValueError: if they are not of all columns, or a factor is not positive and finite.
  """
  for block in blocks:
    if len(block) != 2 or not (0 < block[0] == int(block[0]) and 0 < block[1] < math.inf):
      raise UserError(
        f"blocks: {tuple(block)} must be (columns, factor), a positive whole number and a positive"
        " factor."
      )
  found = tuple((int(columns), float(factor)) for columns, factor in blocks)
  total = sum(columns for columns, _ in found)
  if found and total != size:
    raise UserError(f"blocks={found} are of {total} columns, but there are {size} features.")
  return found


def feature_map(
  x: jax.Array, power: float = 1.0, centre: jax.Array | None = None,
  transform: jax.Array | None = None, blocks: Blocks = (),
) -> jax.Array:  # fmt: skip
  """Normalised features: each row depends on that row alone, and has norm 1 (or is zero).

  Args:
    x: float[N, d].
    power: x becomes sign(x) |x|^power.
    centre: float32[d], subtracted from the rows of norm 1; None leaves them.
    transform: float32[d, d], multiplied from the right; None leaves them.
    blocks: (columns, factor) of each block of columns, multiplied after the power; () leaves them.

  Returns:
    float32[N, d]. A row that is not finite, or overflows on the way, gives zero.
  """
  x = x.astype(jnp.float32)
  if power != 1:
    x = jnp.sign(x) * jnp.abs(x) ** power
  if blocks:
    x = x * np.repeat([np.float32(factor) for _, factor in blocks], [n for n, _ in blocks])
  x = unit_rows(x)
  if centre is not None:
    x = unit_rows(x - centre)
  if transform is not None:
    x = unit_rows(jnp.matmul(x, transform, precision=jax.lax.Precision.HIGHEST))
  return x


def unit_rows(x: jax.Array) -> jax.Array:
  """Scales the rows of float32[N, d] to norm 1; one of almost no or of infinite length is zero."""
  norms = jnp.linalg.norm(x, axis=1, keepdims=True)
  # Not so for a norm that is no number, nor for an infinite one: a row may overflow in a power, a
  # factor or its squares, and would pass on what is no number to the sums of all records.
  fits = (norms > _SMALLEST_NORM) & (norms < jnp.inf)
  return jnp.where(fits, x / jnp.maximum(norms, _SMALLEST_NORM), 0.0)
