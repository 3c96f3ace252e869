"""A linear head alone, for features of a frozen backbone and for tables of numbers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class Linear(nnx.Module):
  """Logits that are a linear function of the flattened input."""

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    use_bias: bool = True,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    size = 1
    for length in input_shape:
      size *= length
    self.head = nnx.Linear(size, num_classes, use_bias=use_bias, dtype=dtype, rngs=rngs)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """float[N, *input_shape] -> logits float32[N, num_classes]."""
    return self.head(inputs.reshape(inputs.shape[0], -1)).astype(jnp.float32)
