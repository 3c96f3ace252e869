"""The models by name."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dp_jax.errors import UserError
from dp_jax.models.feature_head import FeatureHead
from dp_jax.models.linear import Linear
from dp_jax.models.vision import vit
from dp_jax.models.vision.convnet import ConvNet
from dp_jax.models.vision.efficientnet_lite import EfficientNetLite
from dp_jax.models.vision.resnet import ResNet
from dp_jax.models.vision.wide_resnet import WideResNet

# Each takes input_shape, num_classes, dtype (of the computation) and rngs, and sizes that JSON
# can hold.
MODELS: dict[str, Callable[..., nnx.Module]] = {
  "convnet": ConvNet,
  "efficientnet_lite": EfficientNetLite,
  "feature_head": FeatureHead,
  "linear": Linear,
  "resnet": ResNet,
  "vit": vit.build,
  "wide_resnet": WideResNet,
}

# Those that take feature vectors.
VECTORS = ("feature_head", "linear")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Everything that rebuilds a model and feeds it: it travels in the header of its weights.

  Attributes:
    name: a key of MODELS.
    sizes: the keyword arguments of that model.
    input_shape: (height, width, channels) of its input, or (features,).
    num_classes: the number of its outputs.
    value_range: (low, high) of the raw values, mapped to [-1, 1] before the model.
    class_names: names of the classes, or () where they have none.
    multilabel: the outputs are yes-or-no labels of their own, not classes of which one is right.
    reading: how a record became these inputs, by the names of the data section: JSON values. Empty
      where nothing is known of it.
  """

  name: str
  sizes: Mapping[str, Any]
  input_shape: tuple[int, ...]
  num_classes: int
  value_range: tuple[float, float]
  class_names: tuple[str, ...] = ()
  multilabel: bool = False
  reading: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def build(self, seed: int, compute_dtype: str = "float32") -> nnx.Module:
    """A freshly initialised module.

    Args:
      seed: for initial values only, never for noise.
      compute_dtype: "float32" or "bfloat16", of activations; parameters are float32 under both.

    Raises:
      ValueError: if the name is unknown, or a size or the shape of the inputs does not fit.
    """
    if self.name not in MODELS:
      raise UserError(f"model.name={self.name!r} is not one of {', '.join(sorted(MODELS))}.")
    if self.name not in VECTORS and len(self.input_shape) != 3:
      raise UserError(
        f"model {self.name!r} takes images (height, width, channels), not inputs of shape"
        f" {tuple(self.input_shape)}; use model.name=linear."
      )
    try:
      return MODELS[self.name](
        input_shape=self.input_shape,
        num_classes=self.num_classes,
        dtype=jnp.dtype(compute_dtype),
        # The generator is named, so that a process with another default draws the same values.
        rngs=nnx.Rngs(jax.random.key(seed, impl="threefry2x32")),
        **self.sizes,
      )
    except TypeError as error:
      raise UserError(f"the sizes {dict(self.sizes)} do not fit {self.name}: {error}.") from error

  def to_json(self) -> str:
    fields = dataclasses.asdict(self)
    if not self.reading:  # as before there was one
      del fields["reading"]
    return json.dumps(fields, sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> "ModelSpec":
    """Inverse of `to_json`.

    Raises:
      ValueError: if the text does not describe a model.
    """
    try:
      fields = json.loads(text)
      for name in ("input_shape", "value_range", "class_names"):
        fields[name] = tuple(fields[name])
      return cls(**fields)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
      raise UserError(f"not a model description: {error!r}.") from error
