"""The task of a model."""

from typing import Literal

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import FunctionalModel
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.multilabel import MultiLabel


def build_task(
  model: FunctionalModel,
  spec: ModelSpec,
  label_smoothing: float = 0.0,
  link: Literal["softmax", "sigmoid"] = "softmax",
) -> Classification:
  """Classification, or several labels at once where the spec says so, which are always sigmoid."""
  if spec.multilabel:
    return MultiLabel(model, spec, label_smoothing, "sigmoid")
  return Classification(model, spec, label_smoothing, link)
