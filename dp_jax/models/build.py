"""The models by name, those of other people among them, and what rebuilds one."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dp_jax.errors import UserError
from dp_jax.files.code import load_callable, signature_of, tuples
from dp_jax.models.feature_head import FeatureHead
from dp_jax.models.linear import Linear
from dp_jax.models.vision import vit
from dp_jax.models.vision.convnet import ConvNet
from dp_jax.models.vision.efficientnet_lite import EfficientNetLite
from dp_jax.models.vision.resnet import ResNet
from dp_jax.models.vision.wide_resnet import WideResNet

# Each takes rngs, dtype (of the computation), facts of its task ("input_shape", "num_classes"), and
# sizes that JSON can hold.
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
# What the trainer gives.
_GIVEN = ("rngs", "dtype")


def constructor(name: str) -> Callable[..., Any]:
  """What builds the model of this name, or that "package.module:function" names.

  Raises:
    ValueError: if there is none.
  """
  if ":" in name:
    return load_callable(name)
  if name not in MODELS:
    raise UserError(
      f"model.name={name!r} is not one of {', '.join(sorted(MODELS))}, nor of the form"
      " package.module:function."
    )
  return MODELS[name]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Everything that rebuilds a model and feeds it: it travels in the header of its weights.

  Attributes:
    name: a key of MODELS, or "package.module:function".
    kwargs: keyword arguments of its constructor: its sizes.
    task: what the task says of records (`Task.facts`), JSON values. The constructor gets those that
      its signature names.
    reading: how a record became these inputs, by the names of the data section: JSON values. Empty
      where nothing is known of it.
  """

  name: str
  kwargs: Mapping[str, Any]
  task: Mapping[str, Any]
  reading: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def build(self, seed: int, compute_dtype: str = "float32") -> nnx.Module:
    """A freshly initialised module.

    Args:
      seed: for initial values only, never for noise.
      compute_dtype: "float32" or "bfloat16", of activations; parameters are float32 under both.

    Raises:
      ValueError: if the name is unknown, or a size or the shape of the inputs does not fit.
    """
    make = constructor(self.name)
    self.check()
    names = _names(self.name, make)
    given = {
      "dtype": jnp.dtype(compute_dtype),
      # The generator is named, so that a process with another default draws the same values.
      "rngs": nnx.Rngs(jax.random.key(seed, impl="threefry2x32")),
    }
    facts = {name: tuples(value) for name, value in self.task.items() if name in names}
    sizes = {name: tuples(value) for name, value in self.kwargs.items()}
    return make(**facts, **{k: v for k, v in given.items() if k in names}, **sizes)

  def check(self) -> None:
    """Checks names of arguments against the signature, before anything is built.

    Raises:
      ValueError: naming those that do not fit, and those that would.
    """
    shape = self.task.get("input_shape")
    if self.name in MODELS and self.name not in VECTORS and len(shape or ()) != 3:
      raise UserError(
        f"model {self.name!r} takes images (height, width, channels), not inputs of shape"
        f" {tuple(shape or ())}; use model.name=linear."
      )
    parameters = _signature(constructor(self.name)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
      return
    taken = [each for each in parameters if each.name not in (*_GIVEN, *self.task)]
    names = [each.name for each in taken]
    unknown = [name for name in self.kwargs if name not in names]
    if unknown:
      raise UserError(
        f"model.kwargs.{unknown[0]}: model.name={self.name!r} has no {', '.join(unknown)}; it takes"
        f" {', '.join(names) or 'no arguments'}. Leave out what does not fit:"
        " --config.model.kwargs=none unsets all that a file sets."
      )
    needed = [each.name for each in taken if each.default is each.empty]
    missing = [name for name in needed if name not in self.kwargs]
    if missing:
      raise UserError(f"model.kwargs: model.name={self.name!r} needs {', '.join(missing)}.")

  def to_json(self) -> str:
    fields = {"name": self.name, "sizes": dict(self.kwargs), **self.task}
    if self.reading:  # as before there was one
      fields["reading"] = dict(self.reading)
    return json.dumps(fields, sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> "ModelSpec":
    """Inverse of `to_json`, but for tuples, which become lists.

    Raises:
      ValueError: if the text does not describe a model.
    """
    try:
      fields = json.loads(text)
      name, kwargs = fields.pop("name"), fields.pop("sizes")
      return cls(name, dict(kwargs), reading=fields.pop("reading", {}), task=fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise UserError(f"not a model description: {error!r}.") from error


def _signature(make: Callable[..., Any]) -> inspect.Signature:
  """Of the constructor; where it hands all else on to a class (`hands_on_to`), of both."""
  signature, further = signature_of(make), getattr(make, "hands_on_to", None)
  if further is None:
    return signature
  own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
  optional = [
    each.replace(kind=each.KEYWORD_ONLY, default=None)
    for each in signature_of(further).parameters.values()
  ]
  return inspect.Signature([*own, *optional])


def _names(name: str, make: Callable[..., Any]) -> set[str]:
  """What may be given to a constructor."""
  of_tasks = ("input_shape", "num_classes")
  return {*_signature(make).parameters, *((*_GIVEN, *of_tasks) if name in MODELS else ())}
