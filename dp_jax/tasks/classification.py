"""Single-label classification of images and feature vectors."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, FunctionalModel
from dp_jax.models.inspect import check_model

# One unit: {"inputs": [K, *input_shape], "label": int32[K], "record_mask": bool[K]}.
Unit = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Classification:
  """Cross-entropy of softmax or sigmoid; the loss of a unit is the mean over its real records.

  Attributes:
    model: the structure.
    spec: what feeds it.
    label_smoothing: the share of the target that is spread evenly over all classes.
    link: "softmax", or "sigmoid": the sum over classes of the loss of "this class or not" (Mehta et
      al. 2022, arXiv:2205.02973, use it for its smaller noise).
  """

  model: FunctionalModel
  spec: ModelSpec
  label_smoothing: float = 0.0
  link: Literal["softmax", "sigmoid"] = "softmax"

  def loss(self, frozen: Arrays, params: Arrays, unit: Unit, key: Any) -> jax.Array:
    """The loss of one unit: float32[]. A unit without real records has loss and gradient zero."""
    logits = self.logits(
      self.model.bind({**params, **frozen}, key), unit["inputs"], unit["record_mask"]
    )
    return _mean(*self.record_losses(logits, unit))

  def record_losses(self, logits: jax.Array, unit: Unit) -> tuple[jax.Array, jax.Array]:
    """Losses float32[K] of records, and bool[K], which of them count."""
    # A label of a masked record may be out of range; it is clipped here, and masked by the caller.
    labels = jnp.clip(unit["label"], 0, logits.shape[-1] - 1)
    cross_entropy = _softmax_loss if self.link == "softmax" else _sigmoid_loss
    return cross_entropy(logits, labels, self.label_smoothing), unit["record_mask"]

  def losses(self, frozen: Arrays, params: Arrays, units: Unit, keys: Any) -> jax.Array:
    """Losses of a batch of units, float32[B]: the vmap of `loss`, by definition."""
    in_axes = (None, None, 0, None if keys is None else 0)
    return jax.vmap(self.loss, in_axes)(frozen, params, units, keys)

  def predict(self, arrays: Arrays, inputs: jax.Array) -> jax.Array:
    """Class probabilities, float32[N, num_classes], of raw inputs [N, *input_shape].

    By softmax under either link, so that they sum to 1: after sigmoid, in proportion to the odds.
    """
    logits = self.logits(self.model.bind(arrays), inputs, jnp.ones(inputs.shape[0], bool))
    return self.probabilities(logits)

  def evaluated(self, arrays: Arrays, inputs: jax.Array) -> jax.Array:
    """What an evaluation needs: probabilities, and beside them the scores that rank records.

    A probability near 0 or 1 is the same float32 for margins that differ, and ranks them as equal;
    logits do not saturate.

    Returns:
      float32[N, num_classes + s]: `predict`, then of two classes the logit of the second over the
      first (s = 1), of several labels their logits (s = num_classes), of more classes nothing.
    """
    logits = self.logits(self.model.bind(arrays), inputs, jnp.ones(inputs.shape[0], bool))
    return jnp.concatenate([self.probabilities(logits), self.scores(logits)], axis=1)

  def probabilities(self, logits: jax.Array) -> jax.Array:
    """Those of `predict`, from logits float32[N, num_classes]."""
    return jax.nn.softmax(logits)

  def scores(self, logits: jax.Array) -> jax.Array:
    """What ranks records, float32[N, s], from logits float32[N, num_classes]."""
    return logits[:, 1:] - logits[:, :1] if logits.shape[1] == 2 else logits[:, :0]

  def logits(self, module: nnx.Module, inputs: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits float32[N, num_classes] of raw inputs [N, *input_shape]; masked ones are zeroed."""
    low, high = self.spec.value_range
    x = inputs.astype(jnp.float32)
    if (low, high) != (-1, 1):  # else the identity, which the formula is only up to rounding
      x = (x - low) * (2 / (high - low)) - 1
    # A masked record may hold NaN, and its gradient would be 0 * NaN.
    x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0)
    return module(x).astype(jnp.float32)  # type: ignore[operator]

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units with random inputs and labels, to compare engines on: [count, K, ...]."""
    rng = np.random.default_rng(0)
    shape = (count, max_records_per_unit)
    low, high = self.spec.value_range
    return {
      "inputs": rng.uniform(low, high, (*shape, *self.spec.input_shape)).astype(np.float32),
      "label": rng.integers(0, self.spec.num_classes, shape, np.int32),
      "record_mask": np.ones(shape, bool),
    }

  def check(self, arrays: Arrays) -> None:
    """Refuses a model for which the loss of one unit is not defined by that unit alone."""
    inputs = jnp.zeros((1, *self.spec.input_shape), jnp.float32)
    check_model(self.model, arrays, lambda module: self.logits(module, inputs, jnp.ones(1, bool)))


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
