"""Residual networks with group normalisation: ResNet-18 and ResNet-50."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError

# Depth -> blocks in each stage, and whether they are bottlenecks. He et al. 2015, table 1.
STAGES: dict[int, tuple[tuple[int, ...], bool]] = {
  18: ((2, 2, 2, 2), False),
  50: ((3, 4, 6, 3), True),
}


class ResNet(nnx.Module):
  """Convolutional stem, four stages of residual blocks, mean over positions, linear head.

  He et al. 2015, arXiv:1512.03385 (a bottleneck's stride is in its 3x3 convolution, as in later
  work); pre-activation: He et al. 2016, arXiv:1603.05027; GroupNorm in the place of BatchNorm: Wu
  and He 2018, arXiv:1803.08494. Padding is the same on both sides, as published weights expect.
  """

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    depth: int = 18,
    width: int = 64,
    groups: int = 32,
    stem: Literal["3x3", "7x7"] = "7x7",
    preactivation: bool = False,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    """Builds the network with fresh parameters.

    Args:
      input_shape: (height, width, channels); only the channels shape parameters.
      num_classes: outputs of the head.
      depth: a key of STAGES.
      width: channels of the first stage, before a bottleneck's factor of four; each stage doubles.
      groups: of every GroupNorm; must divide the width.
      stem: "7x7" with stride 2 and max pooling (224 pixels), or "3x3" with neither (32 pixels).
      preactivation: norm and ReLU before each convolution rather than after it.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.

    Raises:
      ValueError: if the depth or stem is unknown, or groups does not divide the width.
    """
    if depth not in STAGES:
      raise UserError(f"depth={depth} is not one of {', '.join(map(str, STAGES))}.")
    if stem not in ("3x3", "7x7"):
      raise UserError(f"stem={stem!r} must be '3x3' or '7x7'.")
    if width % groups:
      raise UserError(f"width={width} must be divisible by groups={groups}.")
    self.dtype, self.preactivation, self.pooled = jnp.dtype(dtype), preactivation, stem == "7x7"
    size, stride = (7, 2) if self.pooled else (3, 1)
    self.stem = _conv(input_shape[-1], width, size, stride, self.dtype, rngs)
    blocks, channels = [], width
    counts, bottleneck = STAGES[depth]
    for stage, count in enumerate(counts):
      for index in range(count):
        block = Block(
          channels, width * 2**stage, 2 if stage and not index else 1, bottleneck=bottleneck,
          groups=groups, preactivation=preactivation, dtype=self.dtype, rngs=rngs,
        )  # fmt: skip
        blocks.append(block)
        channels = block.out_channels
    self.blocks = nnx.List(blocks)
    # After the stem, or with pre-activation after the last block.
    norm_channels = channels if preactivation else width
    self.norm = nnx.GroupNorm(norm_channels, num_groups=groups, dtype=self.dtype, rngs=rngs)
    self.head = nnx.Linear(channels, num_classes, dtype=self.dtype, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> logits float32[N, num_classes]."""
    x = self.stem(images)
    if not self.preactivation:
      x = nnx.relu(self.norm(x))
    if self.pooled:
      x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    for block in self.blocks:
      x = block(x)
    if self.preactivation:
      x = nnx.relu(self.norm(x))
    return self.head(x.mean((1, 2), dtype=jnp.float32)).astype(jnp.float32)


class Block(nnx.Module):
  """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, beside a shortcut.

  Attributes:
    out_channels: channels of the output: `channels`, or four times that for a bottleneck.
  """

  def __init__(
    self,
    in_channels: int,
    channels: int,
    stride: int,
    *,
    bottleneck: bool,
    groups: int,
    preactivation: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.preactivation = preactivation
    self.out_channels = 4 * channels if bottleneck else channels
    widths = [in_channels, channels, *([channels] if bottleneck else []), self.out_channels]
    kernels = (1, 3, 1) if bottleneck else (3, 3)
    strides = (1, stride, 1) if bottleneck else (stride, 1)
    self.convs = nnx.List(
      _conv(i, o, k, s, dtype, rngs)
      for i, o, k, s in zip(widths, widths[1:], kernels, strides, strict=False)
    )
    normed = widths[:-1] if preactivation else widths[1:]
    self.norms = nnx.List(
      nnx.GroupNorm(w, num_groups=groups, dtype=dtype, rngs=rngs) for w in normed
    )
    self.project = stride != 1 or in_channels != self.out_channels
    if self.project:
      self.shortcut = _conv(in_channels, self.out_channels, 1, stride, dtype, rngs)
      if not preactivation:
        self.shortcut_norm = nnx.GroupNorm(
          self.out_channels, num_groups=groups, dtype=dtype, rngs=rngs
        )

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[N, H, W, in_channels] -> float[N, H / stride, W / stride, out_channels]."""
    return self._before(x) if self.preactivation else self._after(x)

  def _before(self, x: jax.Array) -> jax.Array:
    """Norm and ReLU before each convolution; a projection shares the first ones."""
    shortcut = x
    for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
      x = nnx.relu(norm(x))
      if index == 0 and self.project:
        shortcut = self.shortcut(x)
      x = conv(x)
    return shortcut + x

  def _after(self, x: jax.Array) -> jax.Array:
    """Norm and ReLU after each convolution, the last ReLU after the sum."""
    shortcut = x
    if self.project:
      shortcut = self.shortcut_norm(self.shortcut(x))
    for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
      x = norm(conv(x if index == 0 else nnx.relu(x)))
    return nnx.relu(shortcut + x)


def _conv(
  in_channels: int, out_channels: int, size: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Conv:
  """A square convolution without bias, padded so that stride 1 keeps the size."""
  he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
  return nnx.Conv(
    in_channels, out_channels, (size, size), strides=stride, padding=size // 2, use_bias=False,
    kernel_init=he_normal, dtype=dtype, rngs=rngs,
  )  # fmt: skip
