"""One class a record, of images and feature vectors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.data.records import Field, Numbers, RecordSpec
from dp_jax.errors import UserError
from dp_jax.evaluation.class_metrics import class_details, class_metrics, class_rows, class_scalars
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.tasks.labels import ClassLabel
from dp_jax.tasks.task import BaseTask, Model, Unit


@dataclasses.dataclass(frozen=True)
class Classification(BaseTask):
  """Cross-entropy of softmax or sigmoid; the loss of a unit is the mean over its real records.

  A unit is {"inputs": [K, *input_shape], "label": int32[K], "record_mask": bool[K]}.

  Attributes:
    input_shape: (height, width, channels) of an image, (features,) of a vector.
    num_classes: the number of outputs of the model.
    value_range: (low, high) of the raw values, mapped to [-1, 1] before the model.
    class_names: names of the classes, or () where they have none.
    label_smoothing: the share of the target that is spread evenly over all classes.
    link: "softmax", or "sigmoid": the sum over classes of the loss of "this class or not" (Mehta et
      al. 2022, arXiv:2205.02973, use it for its smaller noise).
  """

  input_shape: tuple[int, ...]
  num_classes: int
  value_range: tuple[float, float]
  class_names: tuple[str, ...] = ()
  label_smoothing: float = 0.0
  link: Literal["softmax", "sigmoid"] = "softmax"

  def __post_init__(self) -> None:
    """Refuses what no record could meet."""
    if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
      raise UserError(
        f"input_shape must be (height, width, channels) or (features,), not {self.input_shape}"
      )
    if self.num_classes < 1:
      raise UserError(f"num_classes must be at least 1, not {self.num_classes}")
    if not self.value_range[0] < self.value_range[1]:
      raise UserError(f"value_range must be (low, high) with low < high, not {self.value_range}")
    if not 0 <= self.label_smoothing < 1:
      raise UserError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")
    if self.link not in ("softmax", "sigmoid"):
      raise UserError(f"the loss {self.link!r} is not one of softmax, sigmoid")

  @property
  def record(self) -> RecordSpec:
    """Inputs and a label."""
    return RecordSpec((("inputs", Numbers(tuple(self.input_shape))), ("label", self.label)))

  @property
  def label(self) -> Field:
    """What a label looks like."""
    return ClassLabel(self.num_classes)

  def facts(self) -> Mapping[str, Any]:
    """What is public of records, as JSON values."""
    return {
      "input_shape": list(self.input_shape),
      "num_classes": self.num_classes,
      "value_range": list(self.value_range),
      "class_names": list(self.class_names),
      "multilabel": False,
    }

  def loss(self, model: Model, unit: Unit, key: Any) -> jax.Array:
    """The loss of one unit: float32[]. A unit without real records has loss and gradient zero."""
    logits = self.logits(model, unit["inputs"], unit["record_mask"])
    return _mean(*self.record_losses(logits, unit))

  def record_losses(self, logits: jax.Array, unit: Unit) -> tuple[jax.Array, jax.Array]:
    """Losses float32[K] of records, and bool[K], which of them count."""
    # A label of a masked record may be out of range; it is clipped here, and masked by the caller.
    labels = jnp.clip(unit["label"], 0, logits.shape[-1] - 1)
    cross_entropy = _softmax_loss if self.link == "softmax" else _sigmoid_loss
    return cross_entropy(logits, labels, self.label_smoothing), unit["record_mask"]

  def predict(self, model: Model, inputs: jax.Array) -> jax.Array:
    """Class probabilities, float32[N, num_classes], of raw inputs [N, *input_shape].

    By softmax under either link, so that they sum to 1: after sigmoid, in proportion to the odds.
    """
    return self.probabilities(self.logits(model, inputs, jnp.ones(inputs.shape[0], bool)))

  def evaluated(self, model: Model, inputs: jax.Array) -> jax.Array:
    """What an evaluation needs: probabilities, and beside them the scores that rank records.

    A probability near 0 or 1 is the same float32 for margins that differ, and ranks them as equal;
    logits do not saturate.

    Returns:
      float32[N, num_classes + s]: `predict`, then of two classes the logit of the second over the
      first (s = 1), of several labels their logits (s = num_classes), of more classes nothing.
    """
    logits = self.logits(model, inputs, jnp.ones(inputs.shape[0], bool))
    return jnp.concatenate([self.probabilities(logits), self.scores(logits)], axis=1)

  def probabilities(self, logits: jax.Array) -> jax.Array:
    """Those of `predict`, from logits float32[N, num_classes]."""
    return jax.nn.softmax(logits)

  def scores(self, logits: jax.Array) -> jax.Array:
    """What ranks records, float32[N, s], from logits float32[N, num_classes]."""
    return logits[:, 1:] - logits[:, :1] if logits.shape[1] == 2 else logits[:, :0]

  def logits(self, model: Model, inputs: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits float32[N, num_classes] of raw inputs [N, *input_shape]; masked ones are zeroed."""
    low, high = self.value_range
    x = inputs.astype(jnp.float32)
    if (low, high) != (-1, 1):  # else the identity, which the formula is only up to rounding
      x = (x - low) * (2 / (high - low)) - 1
    # A masked record may hold NaN, and its gradient would be 0 * NaN.
    x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0)
    return jnp.asarray(model(x)).astype(jnp.float32)

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units with random inputs and labels, to compare engines on: [count, K, ...]."""
    rng = np.random.default_rng(0)
    shape = (count, max_records_per_unit)
    low, high = self.value_range
    return {
      "inputs": rng.uniform(low, high, (*shape, *self.input_shape)).astype(np.float32),
      "label": rng.integers(0, self.num_classes, shape, np.int32),
      "record_mask": np.ones(shape, bool),
    }

  def rows(self, outputs: np.ndarray, fields: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The columns of a table of predictions."""
    probabilities, scores = np.split(outputs, [self.num_classes], axis=1)
    return class_rows(probabilities, fields["label"], scores)

  def scalars(self, table: PredictionTable) -> dict[str, float | None]:
    """As `class_scalars`."""
    return class_scalars(table, self.num_classes)

  def details(self, table: PredictionTable) -> dict[str, Any]:
    """As `class_details`."""
    return class_details(table, self.num_classes)

  @property
  def metrics(self) -> tuple[str, ...]:
    """Names of metrics by which a checkpoint may be chosen."""
    return class_metrics(self.num_classes)

  @property
  def names(self) -> tuple[str, ...]:
    """A name for each class."""
    return tuple(self.class_names) or tuple(map(str, range(self.num_classes)))

  @property
  def columns(self) -> Sequence[str]:
    """What is predicted, and a probability a class."""
    return ("prediction", *(f"probability_{name}" for name in self.names))

  def cells(self, prediction: np.ndarray) -> Sequence[str]:
    """A row of probabilities, and what they say."""
    return (self.named(prediction), *(f"{p:.6g}" for p in prediction))

  def named(self, probabilities: np.ndarray) -> str:
    """The most probable class."""
    return self.names[int(probabilities.argmax())]


def _softmax_loss(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
  # As log_softmax has it, but without a matrix of log probabilities.
  logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
  return jnp.log(jnp.exp(logits).sum(axis=-1)) - _targets(logits, labels, smoothing)


def _sigmoid_loss(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
  # -t log sigmoid(z) - (1 - t) log sigmoid(-z) = softplus(z) - t z, with t the smoothed target.
  return jax.nn.softplus(logits).sum(axis=-1) - _targets(logits, labels, smoothing)


def _targets(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
  """Logits float32[K, C] times the smoothed targets, summed over classes: float32[K]."""
  chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
  if smoothing == 0:
    return chosen
  return (1 - smoothing) * chosen + smoothing * logits.mean(axis=-1)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  count = jnp.maximum(jnp.sum(mask), 1)
  return jnp.sum(jnp.where(mask, values, 0.0)) / count.astype(jnp.float32)
