"""The models by name."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from dp_jax.models import vit
from dp_jax.models.convnet import ConvNet
from dp_jax.models.linear import Linear
from dp_jax.models.resnet import ResNet
from dp_jax.models.wide_resnet import WideResNet

# Each takes input_shape, num_classes and rngs, and sizes that JSON can hold.
MODELS: dict[str, Callable[..., nnx.Module]] = {
  "convnet": ConvNet,
  "linear": Linear,
  "resnet": ResNet,
  "vit": vit.build,
  "wide_resnet": WideResNet,
}


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
  """

  name: str
  sizes: Mapping[str, Any]
  input_shape: tuple[int, ...]
  num_classes: int
  value_range: tuple[float, float]
  class_names: tuple[str, ...] = ()

  def build(self, seed: int) -> nnx.Module:
    """A freshly initialised module; `seed` is for initial values only, never for noise.

    Raises:
      ValueError: if the name is unknown or a size does not fit.
    """
    if self.name not in MODELS:
      raise ValueError(f"model.name={self.name!r} is not one of {', '.join(sorted(MODELS))}.")
    try:
      return MODELS[self.name](
        input_shape=self.input_shape,
        num_classes=self.num_classes,
        # The generator is named, so that a process with another default draws the same values.
        rngs=nnx.Rngs(jax.random.key(seed, impl="threefry2x32")),
        **self.sizes,
      )
    except TypeError as error:
      raise ValueError(f"the sizes {dict(self.sizes)} do not fit {self.name}: {error}.") from error

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), sort_keys=True)

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
      raise ValueError(f"not a model description: {error!r}.") from error
