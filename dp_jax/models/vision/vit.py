"""The vision transformer, by name of its published sizes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError
from dp_jax.models.layers.transformer import Block, BlockConfig, make_norm

# Dosovitskiy et al. 2021, table 1 (B/16); Touvron et al. 2021, arXiv:2012.12877, table 1 (Ti, S).
SIZES: dict[str, dict[str, int]] = {
  "ti16": {"patch": 16, "width": 192, "depth": 12, "heads": 3},
  "s16": {"patch": 16, "width": 384, "depth": 12, "heads": 6},
  "b16": {"patch": 16, "width": 768, "depth": 12, "heads": 12},
}


def build(size: str = "ti16", **arguments: Any) -> "ViT":
  """A vision transformer of a published size.

  Args:
    size: a key of SIZES.
    **arguments: the other arguments of `ViT` (input_shape, num_classes and rngs at least); they
      may also replace a number of the size.

  Raises:
    ValueError: if the size is unknown or the numbers do not fit each other.
  """
  if size not in SIZES:
    raise UserError(f"size={size!r} is not one of {', '.join(SIZES)}.")
  return ViT(**{**SIZES[size], **arguments})


class ViT(nnx.Module):
  """Patches and a class token, learned positions, pre-norm blocks, and a head on the class token.

  The hidden layers have four times the width. Dosovitskiy et al. 2021, arXiv:2010.11929, section
  3.1; initial values after Touvron et al. 2021, arXiv:2012.12877.
  """

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    """Builds the model with fresh parameters.

    Args:
      input_shape: (height, width, channels); positions are learned for this size.
      num_classes: outputs of the head.
      patch: side of a patch in pixels; must divide height and width.
      width: features of a token.
      depth: blocks.
      heads: attention heads; must divide the width.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.

    Raises:
      ValueError: if the image or the width cannot be divided as asked.
    """
    rows, columns, channels = input_shape
    if rows % patch or columns % patch:
      raise UserError(f"input_shape={tuple(input_shape)} must be divisible by patch={patch}.")
    self.dtype = jnp.dtype(dtype)
    init = nnx.initializers.truncated_normal(0.02)
    config = BlockConfig(width, heads, 4 * width, 1e-6, False, init, init, 0.0, self.dtype)
    self.patches = nnx.Conv(
      channels, width, (patch, patch), strides=(patch, patch), padding="VALID",
      dtype=self.dtype, rngs=rngs,
    )  # fmt: skip
    num_tokens = 1 + (rows // patch) * (columns // patch)
    self.class_token = nnx.Param(init(rngs.params(), (width,), jnp.float32))
    self.positions = nnx.Param(init(rngs.params(), (num_tokens, width), jnp.float32))
    self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(depth)])
    self.norm = make_norm(config, rngs)
    self.head = nnx.Linear(width, num_classes, dtype=self.dtype, kernel_init=init, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> logits float32[N, num_classes]."""
    return self.head(self._token(images)).astype(jnp.float32)

  def features(self, images: jax.Array, layers: Sequence[str] = ("pooled",)) -> jax.Array:
    """What the head reads, float32[N, width]; "pooled" is the only layer."""
    del layers
    return self._token(images).astype(jnp.float32)

  def layer_names(self) -> list[str]:
    """The layers that `features` can give."""
    return ["pooled"]

  def _token(self, images: jax.Array) -> jax.Array:
    """The class token after the last block."""
    x = self.patches(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    token = self.class_token[...].astype(self.dtype)
    token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(self.dtype)
    for block in self.blocks:
      x = block(x)
    # The norm is per position, so only the one that the head reads is normalised.
    return self.norm(x[:, 0])


# The names of its further arguments, for messages before anything is built.
build.hands_on_to = ViT  # type: ignore[attr-defined]
