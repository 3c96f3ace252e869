"""Several yes-or-no labels of one record, some of them not known."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dp_jax.data.records import Field
from dp_jax.evaluation.label_metrics import RANKS, label_details, label_rows, label_scalars
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.labels import YesNoLabels
from dp_jax.tasks.task import Unit


@dataclasses.dataclass(frozen=True)
class MultiLabel(Classification):
  """Sigmoid cross-entropy; of a record the mean over its known labels, of a unit over its records.

  A unit is {"inputs": [K, *input_shape], "label": float32[K, num_classes], "record_mask": bool[K]}
  with labels 1 (yes), 0 (no) and -1 (not known). A record of which nothing is known does not count.
  """

  @property
  def label(self) -> Field:
    """What a label looks like."""
    return YesNoLabels((self.num_classes,))

  def facts(self) -> Mapping[str, Any]:
    """What is public of records, as JSON values."""
    return {**super().facts(), "multilabel": True}

  def record_losses(self, logits: jax.Array, unit: Unit) -> tuple[jax.Array, jax.Array]:
    """Losses float32[K] of records, and bool[K], which of them count."""
    labels = unit["label"]
    known = labels >= 0
    smoothed = jnp.where(known, labels, 0.0) * (1 - self.label_smoothing) + self.label_smoothing / 2
    losses = optax.sigmoid_binary_cross_entropy(logits, smoothed)
    count = jnp.maximum(known.sum(axis=-1), 1).astype(jnp.float32)
    means = jnp.where(known, losses, 0.0).sum(axis=-1) / count
    return means, unit["record_mask"] & known.any(axis=-1)

  def probabilities(self, logits: jax.Array) -> jax.Array:
    """The probability of yes, from logits float32[N, num_classes]."""
    return jax.nn.sigmoid(logits)

  def scores(self, logits: jax.Array) -> jax.Array:
    """The logit of each label, float32[N, num_classes]."""
    return logits

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units with random inputs and labels, the first of them known: [count, K, ...]."""
    units = super().made_up_units(count, max_records_per_unit)
    shape = (count, max_records_per_unit, self.num_classes)
    labels = np.random.default_rng(1).integers(-1, 2, shape).astype(np.float32)
    labels[..., 0] = np.maximum(labels[..., 0], 0)
    return {**units, "label": labels}

  def rows(self, outputs: np.ndarray, fields: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The columns of a table of predictions."""
    probabilities, logits = np.split(outputs, [self.num_classes], axis=1)
    return label_rows(probabilities, fields["label"], logits)

  def scalars(self, table: PredictionTable) -> dict[str, float | None]:
    """As `label_scalars`."""
    return label_scalars(table)

  def details(self, table: PredictionTable) -> dict[str, Any]:
    """As `label_details`."""
    return label_details(table)

  @property
  def metrics(self) -> tuple[str, ...]:
    """Names of metrics by which a checkpoint may be chosen."""
    return ("accuracy", "loss", *RANKS)

  def named(self, probabilities: np.ndarray) -> str:
    """The labels that are more likely than not, with ";" between."""
    return ";".join(name for name, p in zip(self.names, probabilities, strict=True) if p > 0.5)
