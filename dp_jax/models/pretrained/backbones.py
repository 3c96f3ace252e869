"""Public models up to their head, as frozen functions from images to features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.errors import UserError
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, split
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import IMAGENET, Ancestor, Lineage, warnings_of
from dp_jax.models.vision import efficientnet_lite


@dataclass(frozen=True)
class Backbone:
  """A frozen model.

  Attributes:
    arrays: its weights, by name.
    weights_digest: the sha256 of the file that they are from.
    warnings: what users of the features must know of the weights.
    lineage: these weights and all that are behind them, newest first.
    num_features: how many it gives.
    forward: (arrays, inputs) -> float32[N, num_features]; raw inputs [N, H, W, C], to be jitted.
    preprocessing: what happens to raw inputs, as JSON values.
  """

  arrays: Arrays
  weights_digest: str
  warnings: tuple[str, ...]
  num_features: int
  forward: Callable[[Arrays, jax.Array], jax.Array]
  preprocessing: dict[str, Any]
  lineage: Lineage


def load_backbone(
  name: str,
  size: str,
  file: str,
  *,
  layers: Sequence[str],
  input_shape: tuple[int, ...],
  value_range: tuple[float, float],
  compute_dtype: str = "float32",
) -> Backbone:
  """Loads a model of public weights.

  Args:
    name: "efficientnet_lite", or that of the model in `file`.
    size: of efficientnet_lite: "lite0" or "lite2".
    file: "imagenet", or a safetensors file that holds a model of this project.
    layers: what to average over positions and put side by side: "pooled" is what the head reads.
    input_shape: (height, width, channels) of the images; one channel is repeated where the model
      takes three.
    value_range: (low, high) of their raw values, which stand for 0 and 255.
    compute_dtype: "float32" or "bfloat16".

  Raises:
    ValueError: if the weights are not there, not public, or do not fit the images or layers.
  """
  low, high = value_range
  if file == IMAGENET:
    spec, arrays, digest = _imagenet(name, size, input_shape)
    lineage: Lineage = (Ancestor(IMAGENET, digest, protected=False, declared="public"),)
    # Those of the weights, on the scale of the data.
    low, high = (low + (high - low) * each / 255 for each in spec.task["value_range"])
  else:
    lineage = weights.lineage(Path(file))
    spec, arrays, digest = weights.load_with_digest(Path(file))
    if spec.name != name:
      raise UserError(f"{file!r} holds a {spec.name!r}, not a {name!r}.")
  warnings = warnings_of(lineage)
  _check_images(spec, input_shape)
  # Shapes alone: initial values would be thrown away.
  model, fresh = split(nnx.eval_shape(lambda: spec.build(0, compute_dtype)))
  weights.check_fit(fresh, arrays, file)
  module = model.bind(arrays)
  known = module.layer_names() if hasattr(module, "layer_names") else []
  unknown = [layer for layer in layers if layer not in known]
  if unknown or not layers:
    raise UserError(f"layers {unknown or layers} of {name!r}: choose among {', '.join(known)}.")

  channels = spec.task["input_shape"][2]

  def forward(arrays: Arrays, inputs: jax.Array) -> jax.Array:
    x = (inputs.astype(jnp.float32) - low) * (2 / (high - low)) - 1
    x = jnp.repeat(x, channels // input_shape[2], axis=-1)
    return model.bind(arrays).features(x, tuple(layers))  # type: ignore[attr-defined]

  out = jax.eval_shape(forward, arrays, jax.ShapeDtypeStruct((1, *input_shape), np.float32))
  preprocessing = {
    "input_shape": list(input_shape), "value_range": list(value_range), "mapped_to_minus_one": low,
    "mapped_to_one": high, "layers": list(layers), "compute_dtype": compute_dtype,
  }  # fmt: skip
  return Backbone(arrays, digest, warnings, out.shape[1], forward, preprocessing, lineage)


def _imagenet(name: str, size: str, input_shape: tuple[int, ...]) -> tuple[ModelSpec, Arrays, str]:
  if name != "efficientnet_lite":
    raise UserError(
      f"weights {IMAGENET!r} are those of efficientnet_lite; for {name!r} give a safetensors file."
    )
  if size not in efficientnet_lite.SIZES:
    known = ", ".join(efficientnet_lite.SIZES)
    raise UserError(f"backbone.size={size!r} is not one of {known}.")
  arrays, digest = efficientnet_lite.pretrained(size)
  shape = (*input_shape[:2], 3)
  facts = {"input_shape": shape, "num_classes": 1000, "value_range": efficientnet_lite.VALUE_RANGE}
  return ModelSpec(name, {"size": size}, facts), arrays, digest


def _check_images(spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
  """Refuses images that the weights are not for; one channel may stand for three."""
  if len(input_shape) != 3:
    raise UserError(f"a backbone takes images (height, width, channels), not {input_shape}.")
  any_size = spec.name == "efficientnet_lite"
  shape = tuple(spec.task.get("input_shape", ()))
  if not (any_size or shape[:2] == tuple(input_shape[:2])) or (
    input_shape[2] not in (1, *shape[2:])
  ):
    raise UserError(
      f"the weights are for images of shape {shape}, and the data has"
      f" {tuple(input_shape)}: declare data.input_shape."
    )
