"""Single-label classification of images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, FunctionalModel
from dp_jax.models.inspect import check_per_unit

# One unit: {"image": [K, H, W, C], "label": int32[K], "record_mask": bool[K]}.
Unit = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Classification:
  """Softmax cross-entropy; the loss of a unit is the mean over its real records.

  Attributes:
    model: the structure.
    spec: what feeds it.
    label_smoothing: the share of the target that is spread evenly over all classes.
  """

  model: FunctionalModel
  spec: ModelSpec
  label_smoothing: float = 0.0

  def loss(self, frozen: Arrays, params: Arrays, unit: Unit, key: Any) -> jax.Array:
    """The loss of one unit: float32[]. A unit without real records has loss and gradient zero."""
    logits = self.logits(
      self.model.bind({**params, **frozen}, key), unit["image"], unit["record_mask"]
    )
    losses = _cross_entropy(logits, unit["label"], self.label_smoothing)
    return _mean(losses, unit["record_mask"])

  def losses(self, frozen: Arrays, params: Arrays, units: Unit, keys: Any) -> jax.Array:
    """Losses of a batch of units, float32[B]: the vmap of `loss`, by definition."""
    in_axes = (None, None, 0, None if keys is None else 0)
    return jax.vmap(self.loss, in_axes)(frozen, params, units, keys)

  def predict(self, arrays: Arrays, images: jax.Array) -> jax.Array:
    """Class probabilities, float32[N, num_classes], of raw images [N, H, W, C]."""
    logits = self.logits(self.model.bind(arrays), images, jnp.ones(images.shape[0], bool))
    return jax.nn.softmax(logits)

  def logits(self, module: nnx.Module, images: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits float32[N, num_classes] of raw images [N, H, W, C]; masked ones are zeroed first."""
    low, high = self.spec.value_range
    x = (images.astype(jnp.float32) - low) * (2 / (high - low)) - 1
    # A masked record may hold NaN, and its gradient would be 0 * NaN.
    x = jnp.where(mask.reshape(-1, 1, 1, 1), x, 0.0)
    return module(x).astype(jnp.float32)  # type: ignore[operator]

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units with random pixels and labels, to compare engines on: [count, K, ...]."""
    rng = np.random.default_rng(0)
    shape = (count, max_records_per_unit)
    low, high = self.spec.value_range
    return {
      "image": rng.uniform(low, high, (*shape, *self.spec.image_shape)).astype(np.float32),
      "label": rng.integers(0, self.spec.num_classes, shape, np.int32),
      "record_mask": np.ones(shape, bool),
    }

  def check(self, arrays: Arrays) -> None:
    """Refuses a model for which the loss of one unit is not defined by that unit alone."""
    images = jnp.zeros((1, *self.spec.image_shape), jnp.float32)
    check_per_unit(
      self.model, arrays, lambda module: self.logits(module, images, jnp.ones(1, bool))
    )


def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
  # A label of a masked record may be out of range; it is clipped here and masked by the caller.
  labels = jnp.clip(labels, 0, logits.shape[-1] - 1)
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
  return -(1 - smoothing) * chosen - smoothing * log_probs.mean(axis=-1)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  count = jnp.maximum(jnp.sum(mask), 1)
  return jnp.sum(jnp.where(mask, values, 0.0)) / count.astype(jnp.float32)
