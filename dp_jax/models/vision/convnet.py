"""A small convolutional network with group normalisation, for images of a few pixels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError


class ConvNet(nnx.Module):
  """Convolution 3x3, GroupNorm and ReLU, repeated; then a linear head on what is left.

  GroupNorm normalises within one example, so that a per-example gradient exists.

  Wu and He 2018, arXiv:1803.08494; as a replacement of BatchNorm under DP: De et al. 2022,
  arXiv:2204.13650, section 3.1.
  """

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = (32, 64),
    strides: Sequence[int] = (1, 2),
    groups: int = 8,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if len(widths) != len(strides):
      raise UserError(f"widths {tuple(widths)} and strides {tuple(strides)} differ in length.")
    if any(width % groups for width in widths):
      raise UserError(f"every width of {tuple(widths)} must be divisible by groups={groups}.")
    height, width, channels = input_shape
    he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
    convs, norms = [], []
    for out, stride in zip(widths, strides, strict=True):
      convs.append(
        nnx.Conv(
          channels, out, (3, 3), strides=stride, use_bias=False, kernel_init=he_normal, dtype=dtype,
          rngs=rngs,
        )
      )  # fmt: skip
      norms.append(nnx.GroupNorm(out, num_groups=groups, dtype=dtype, rngs=rngs))
      channels, height, width = out, -(-height // stride), -(-width // stride)
    self.convs, self.norms = nnx.List(convs), nnx.List(norms)
    self.head = nnx.Linear(channels * height * width, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> logits float32[N, num_classes]."""
    x = images
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x = nnx.relu(norm(conv(x)))
    return self.head(x.reshape(x.shape[0], -1)).astype(jnp.float32)
