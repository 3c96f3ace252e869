"""A linear head alone, for features of a frozen backbone and for tables of numbers."""

from collections.abc import Sequence

import jax
from flax import nnx


class Linear(nnx.Module):
  """Logits that are a linear function of the flattened input."""

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    rngs: nnx.Rngs,
    use_bias: bool = True,
  ):
    size = 1
    for length in input_shape:
      size *= length
    self.head = nnx.Linear(size, num_classes, use_bias=use_bias, rngs=rngs)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """float[N, *input_shape] -> logits float[N, num_classes]."""
    return self.head(inputs.reshape(inputs.shape[0], -1))
