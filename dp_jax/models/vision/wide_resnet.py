"""Wide residual networks for small images, as trained with differential privacy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError


class StandardisedConv(nnx.Module):
  """A convolution whose kernel is standardised in each output channel, with a gain and a bias.

  The kernel that is applied has mean 0 and variance gain^2 / fan_in. Its statistics are those of
  the parameter, not of data, so no example sees another; they are taken in float32.

  Qiao et al. 2019, arXiv:1903.10520; scaled, with a gain: Brock et al. 2021, arXiv:2101.08692,
  section 4.
  """

  # Of variance times fan_in: keeps the root away from zero where a kernel is constant.
  FLOOR = 1e-4

  def __init__(
    self, in_channels: int, out_channels: int, size: int, stride: int, dtype: DTypeLike,
    rngs: nnx.Rngs,
  ):  # fmt: skip
    """Square, padded so that stride 1 keeps the size; parameters are float32."""
    init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    shape = (size, size, in_channels, out_channels)
    self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
    self.gain = nnx.Param(jnp.ones(out_channels, jnp.float32))
    self.bias = nnx.Param(jnp.zeros(out_channels, jnp.float32))
    self.stride, self.padding, self.dtype = stride, size // 2, jnp.dtype(dtype)

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[N, H, W, in_channels] -> float[N, H / stride, W / stride, out_channels]."""
    padding = (self.padding, self.padding)
    y = jax.lax.conv_general_dilated(
      x.astype(self.dtype), self.standardised().astype(self.dtype), (self.stride, self.stride),
      (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return y + self.bias[...].astype(self.dtype)

  def standardised(self) -> jax.Array:
    """The kernel that is applied: float32[size, size, in_channels, out_channels]."""
    kernel = self.kernel[...]
    fan_in = kernel[..., 0].size
    centred = kernel - kernel.mean((0, 1, 2))
    spread = jnp.maximum(jnp.square(centred).mean((0, 1, 2)) * fan_in, self.FLOOR)
    return centred * (self.gain[...] * jax.lax.rsqrt(spread))


class WideResNet(nnx.Module):
  """WRN-depth-width: three stages of (depth - 4) / 6 blocks, of 16, 32 and 64 x width channels.

  Each convolution follows ReLU and then GroupNorm, in this order, and a projected shortcut has a
  norm of its own, as in De et al. 2022, arXiv:2204.13650, section 3 (WRN-16-4, WRN-40-4, 16
  groups, weight standardisation). The network: Zagoruyko and Komodakis 2016, arXiv:1605.07146.
  """

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    depth: int = 16,
    width: int = 4,
    groups: int = 16,
    weight_standardisation: bool = True,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    """Builds the network with fresh parameters.

    Args:
      input_shape: (height, width, channels); only the channels shape parameters.
      num_classes: outputs of the head.
      depth: convolutions along the network; 4 more than a multiple of 6.
      width: the factor on the channels.
      groups: of every GroupNorm; must divide 16.
      weight_standardisation: StandardisedConv in the place of convolutions without bias.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.

    Raises:
      ValueError: if no network has this depth, or groups does not divide 16.
    """
    if depth < 10 or depth % 6 != 4:
      raise UserError(f"depth={depth} must be 4 more than a multiple of 6: 10, 16, 22, 28, 40.")
    if 16 % groups:
      raise UserError(f"groups={groups} must divide 16, the channels of the first convolution.")
    self.dtype = jnp.dtype(dtype)
    self.stem = _conv(input_shape[-1], 16, 3, 1, self.dtype, weight_standardisation, rngs)
    blocks, channels = [], 16
    for stage in range(3):
      for index in range((depth - 4) // 6):
        out = 16 * width * 2**stage
        block = Block(
          channels, out, 2 if stage and not index else 1, project=not index, groups=groups,
          standardise=weight_standardisation, dtype=self.dtype, rngs=rngs,
        )  # fmt: skip
        blocks.append(block)
        channels = out
    self.blocks = nnx.List(blocks)
    self.norm = nnx.GroupNorm(channels, num_groups=groups, dtype=self.dtype, rngs=rngs)
    self.head = nnx.Linear(channels, num_classes, dtype=self.dtype, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> logits float32[N, num_classes]."""
    x = self.stem(images)
    for block in self.blocks:
      x = block(x)
    x = self.norm(nnx.relu(x)).mean((1, 2), dtype=jnp.float32)
    return self.head(x).astype(jnp.float32)


class Block(nnx.Module):
  """Two convolutions 3x3 beside a shortcut, which is a projection in a stage's first block."""

  def __init__(
    self,
    in_channels: int,
    out_channels: int,
    stride: int,
    *,
    project: bool,
    groups: int,
    standardise: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.norms = nnx.List(
      nnx.GroupNorm(channels, num_groups=groups, dtype=dtype, rngs=rngs)
      for channels in (in_channels, out_channels)
    )
    self.convs = nnx.List([
      _conv(in_channels, out_channels, 3, stride, dtype, standardise, rngs),
      _conv(out_channels, out_channels, 3, 1, dtype, standardise, rngs),
    ])  # fmt: skip
    self.project = project
    if project:
      self.shortcut = _conv(in_channels, out_channels, 1, stride, dtype, standardise, rngs)
      self.shortcut_norm = nnx.GroupNorm(in_channels, num_groups=groups, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[N, H, W, in_channels] -> float[N, H / stride, W / stride, out_channels]."""
    shortcut = x
    if self.project:
      shortcut = self.shortcut(self.shortcut_norm(nnx.relu(x)))
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x = conv(norm(nnx.relu(x)))
    return shortcut + x


def _conv(
  in_channels: int, out_channels: int, size: int, stride: int, dtype: DTypeLike,
  standardise: bool, rngs: nnx.Rngs,
) -> nnx.Module:  # fmt: skip
  """A square convolution, padded so that stride 1 keeps the size."""
  if standardise:
    return StandardisedConv(in_channels, out_channels, size, stride, dtype, rngs)
  he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
  return nnx.Conv(
    in_channels, out_channels, (size, size), strides=stride, padding=size // 2, use_bias=False,
    kernel_init=he_normal, dtype=dtype, rngs=rngs,
  )  # fmt: skip
