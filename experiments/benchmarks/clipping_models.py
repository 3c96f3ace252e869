"""The models of the clipping benchmark, each as the loss of one unit, at random values."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.models.functional import Arrays, partition, split
from dp_jax.models.language import gpt2
from dp_jax.models.layers.lora import add_lora
from dp_jax.models.vision import vit
from dp_jax.models.vision.resnet import ResNet
from dp_jax.models.vision.wide_resnet import WideResNet


@dataclasses.dataclass(frozen=True)
class Case:
  """One model at one batch size.

  Attributes:
    params: the trained parameters, as numpy arrays.
    frozen: the others.
    units: leaves [B, ...].
    loss: (params, frozen, unit) -> the loss of one unit.
  """

  params: Arrays
  frozen: Arrays
  units: dict[str, np.ndarray]
  loss: Callable[[Any, Any, Any], jax.Array]


def _head(batch: int) -> Case:
  random = np.random.default_rng(0)
  params = {
    "bias": np.zeros(1000, np.float32),
    "kernel": _normal(random, (1280, 1000), 1280**-0.5),
  }
  units = {
    "features": _normal(random, (batch, 1280)),
    "label": random.integers(0, 1000, batch, np.int32),
  }

  def loss(params: Any, frozen: Any, unit: Any) -> jax.Array:
    del frozen
    return _cross_entropy(unit["features"] @ params["kernel"] + params["bias"], unit["label"])

  return Case(params, {}, units, loss)


def _image_model(build: Callable[[], nnx.Module], side: int, classes: int, batch: int) -> Case:
  functional, params = _filled(build)
  random = np.random.default_rng(1)
  units = {
    "inputs": _normal(random, (batch, side, side, 3)),
    "label": random.integers(0, classes, batch, np.int32),
  }

  def loss(params: Any, frozen: Any, unit: Any) -> jax.Array:
    del frozen
    return _cross_entropy(functional.bind(params)(unit["inputs"][None])[0], unit["label"])

  return Case(params, {}, units, loss)


def _language_model(size: str, batch: int, length: int, lora_rank: int = 0) -> Case:
  trainable = [".*"]

  def build() -> nnx.Module:
    model = gpt2.build(size, rngs=nnx.Rngs(0))
    if lora_rank:
      trainable[0] = add_lora(
        model, lambda name: True, rank=lora_rank, alpha=2.0 * lora_rank, rngs=nnx.Rngs(1)
      )
    return model

  functional, arrays = _filled(build)
  params, frozen = partition(functional, arrays, trainable[0])
  tokens = np.random.default_rng(1).integers(
    0, gpt2.SIZES[size]["vocab"], (batch, length + 1), np.int32
  )

  def loss(params: Any, frozen: Any, unit: Any) -> jax.Array:
    logits = functional.bind({**params, **frozen})(unit["tokens"][None, :-1])[0]
    return jnp.mean(_cross_entropy(logits, unit["tokens"][1:]))

  return Case(params, frozen, {"tokens": tokens}, loss)


def _resnet(batch: int) -> Case:
  shape = {"input_shape": (32, 32, 3), "num_classes": 10}
  return _image_model(lambda: ResNet(stem="3x3", rngs=nnx.Rngs(0), **shape), 32, 10, batch)


def _wide_resnet(batch: int) -> Case:
  shape = {"input_shape": (32, 32, 3), "num_classes": 10}
  return _image_model(lambda: WideResNet(rngs=nnx.Rngs(0), **shape), 32, 10, batch)


def _vit(size: str, batch: int) -> Case:
  shape = {"input_shape": (224, 224, 3), "num_classes": 1000}
  return _image_model(lambda: vit.build(size, rngs=nnx.Rngs(0), **shape), 224, 1000, batch)


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the table.

  Attributes:
    title: for people.
    batch: units of a step.
    make: the case of a batch size.
    memory_budget: of `clipped_grad`; None for its default.
    microbatch_size: of `clipped_grad`.
    target_time, target_memory: ratios to the plain gradient that ghost is meant to keep, or None.
  """

  title: str
  batch: int
  make: Callable[[int], Case]
  memory_budget: int | None = None
  microbatch_size: int | None = None
  target_time: float | None = None
  target_memory: float | None = None


ROWS: dict[str, Row] = {
  "head": Row("head 1280x1000", 4096, _head, target_time=1.05, target_memory=1.1),
  "resnet18": Row("ResNet-18-GN 32x32", 64, _resnet, target_time=1.45, target_memory=2.5),
  "resnet18_low": Row(
    "the same, low memory", 64, _resnet, memory_budget=0, target_time=1.9, target_memory=1.5
  ),
  "wrn16_4": Row("WRN-16-4 32x32", 64, _wide_resnet),
  "vit_ti": Row("ViT-Ti/16 224x224", 16, lambda b: _vit("ti16", b)),
  "vit_s": Row(
    "ViT-S/16 224x224", 16, lambda b: _vit("s16", b), target_time=1.2, target_memory=1.2
  ),
  "gpt_10m": Row(
    "GPT 10M, 128 tokens", 8, lambda b: _language_model("10m", b, 128),
    target_time=1.15, target_memory=1.15,
  ),
  "gpt_124m": Row(
    "GPT 124M tied, 128 tokens", 4, lambda b: _language_model("124m", b, 128),
    target_time=1.2, target_memory=1.25,
  ),
  "lora": Row(
    "LoRA rank 8 on GPT 124M", 4, lambda b: _language_model("124m", b, 128, lora_rank=8),
    target_time=1.1, target_memory=1.1,
  ),
}  # fmt: skip


def _filled(build: Callable[[], nnx.Module]) -> tuple[Any, Arrays]:
  """Structure and random arrays; drawn by numpy, which compiles nothing."""
  functional, arrays = split(nnx.eval_shape(build))
  random = np.random.default_rng(0)
  values: Arrays = {}
  for name, x in arrays.items():
    if len(x.shape) > 1:
      fan_in = x.shape[-1] if "tokens" in name or "positions" in name else math.prod(x.shape[:-1])
      values[name] = _normal(random, x.shape, fan_in**-0.5)
    else:
      values[name] = np.full(x.shape, name.endswith(("scale", "gain")), np.float32)
  return functional, values


def _normal(random: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
  return np.float32(scale) * random.standard_normal(shape, np.float32)


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
  logits = logits.astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - chosen
