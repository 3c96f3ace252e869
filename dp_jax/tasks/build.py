"""The task of a model."""

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import FunctionalModel
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.multilabel import MultiLabel


def build_task(
  model: FunctionalModel, spec: ModelSpec, label_smoothing: float = 0.0
) -> Classification:
  """Classification, or several labels at once where the spec says so."""
  kind = MultiLabel if spec.multilabel else Classification
  return kind(model, spec, label_smoothing)
