"""Views: random variants of a record that share its place in the unit.

A unit's loss is the mean over its real records and their views, and is clipped once, so views cost
nothing in the accounting (augmentation multiplicity: De et al. 2022, arXiv:2204.13650).

They are made on the device, from the unit's own key: a view depends on the run's secret key, the
step, the unit, the place of its record in the unit, and its own number; not on the microbatch, the
device or the host, nor on how the records were loaded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dp_jax.data.records import RecordSpec
from dp_jax.errors import UserError

Augment = Literal["none", "pad_mirror_crop_flip", "random_resized_crop"]

PAD = 4
# Far from the small numbers by which a model folds its own keys (for dropout) from the unit's.
_STREAM = 0x76696577
_ASPECTS = (3 / 4, 4 / 3)


@dataclasses.dataclass(frozen=True)
class Views:
  """How many views of each record a step sees, and how they vary.

  Attributes:
    augment: "pad_mirror_crop_flip" pads by 4 pixels of the mirrored image, cuts out the original
      size at a random place, and flips left and right in half of the cases (De et al. 2022).
      "random_resized_crop" cuts out a part of random area and proportions, scales it to the
      original size, and flips likewise (Szegedy et al. 2015, arXiv:1409.4842, section 6).
    count: K', views of each record.
    min_crop_area: of random_resized_crop, the smallest share of the image that is kept.
  """

  augment: Augment = "none"
  count: int = 1
  min_crop_area: float = 0.08

  def check(self, record: RecordSpec) -> None:
    """Refuses what has no meaning for records of this kind.

    Raises:
      ValueError: naming the setting.
    """
    if self.count < 1:
      raise UserError(f"data.views={self.count} must be at least 1")
    if self.augment == "none":
      if self.count > 1:
        raise UserError(f"data.views={self.count} would all be the same: set data.augment")
      return
    input_shape = dict(record.fields)["inputs"].shape
    if len(input_shape) != 3:
      raise UserError(f"data.augment={self.augment!r} is for images, not inputs {input_shape}")
    if self.augment == "pad_mirror_crop_flip" and min(input_shape[:2]) <= PAD:
      raise UserError(
        f"data.augment={self.augment!r} mirrors {PAD} pixels, so images must be larger than"
        f" {input_shape[:2]}"
      )
    if not 0 < self.min_crop_area <= 1:
      raise UserError(f"data.min_crop_area={self.min_crop_area} must be above 0 and at most 1")

  def expand(self, unit: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """A unit with each record replaced by its views.

    Args:
      unit: leaves [K, ...], "inputs" [K, H, W, C] among them.
      key: the unit's own, typed.

    Returns:
      The unit with leaves [K * count, ...]: the views of a record are next to each other, and
      have its label and mask.
    """
    if self.augment == "none":
      return unit
    stream = jax.random.fold_in(key, _STREAM)
    size = unit["record_mask"].shape[0]
    record, view = jnp.repeat(jnp.arange(size), self.count), jnp.tile(jnp.arange(self.count), size)
    # So numbered, more views leave the first ones as they are.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(stream, view * size + record)
    # All that is random about a view, uniform on [0, 1): few calls, since each is slow to compile.
    draws = jax.vmap(lambda key: jax.random.uniform(key, (5,)))(keys)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), unit)
    return {**repeated, "inputs": jax.vmap(self._one)(repeated["inputs"], draws)}

  def _one(self, image: jax.Array, draws: jax.Array) -> jax.Array:
    if self.augment == "pad_mirror_crop_flip":
      image = pad_mirror_crop(image, draws[:2])
    else:
      image = random_resized_crop(image, draws[:4], self.min_crop_area)
    return jnp.where(draws[4] < 0.5, image[:, ::-1], image)


def pad_mirror_crop(image: jax.Array, draws: jax.Array) -> jax.Array:
  """Shifts an image by up to 4 pixels each way, filling up with its mirror image.

  Args:
    image: [H, W, C], both sides larger than 4.
    draws: float32[2], uniform on [0, 1), for the vertical and the horizontal place.
  """
  padded = jnp.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
  top, left = jnp.floor(draws * (2 * PAD + 1)).astype(jnp.int32)
  return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)


def random_resized_crop(image: jax.Array, draws: jax.Array, min_area: float) -> jax.Array:
  """Scales a random part of an image to the image's size: float32[H, W, C].

  The area is uniform on min_area..1 of the image, the proportions log-uniform on 3/4..4/3; a side
  that would be longer than the image is cut to it.

  Args:
    image: [H, W, C].
    draws: float32[4], uniform on [0, 1), for place (vertical, horizontal), area and proportions.
    min_area: above 0, at most 1.
  """
  height, width = image.shape[:2]
  area = min_area + (1.0 - min_area) * draws[2]
  low, high = math.log(_ASPECTS[0]), math.log(_ASPECTS[1])
  aspect = jnp.exp(low + (high - low) * draws[3])
  # As shares of the height and width; proportions are those of pixels.
  shape = jnp.asarray([height, width], jnp.float32)
  pixels = jnp.sqrt(area * height * width * jnp.stack([1 / aspect, aspect]))
  share = jnp.minimum(pixels / shape, 1.0)
  start = draws[:2] * (1.0 - share)
  return jax.image.scale_and_translate(
    image.astype(jnp.float32), image.shape, (0, 1), 1.0 / share, -start * shape / share,
    method="linear", antialias=True,
  )  # fmt: skip
