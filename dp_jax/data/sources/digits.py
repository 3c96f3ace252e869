"""The handwritten digits that scikit-learn ships: 1,797 scans of 8x8 pixels.

They are the test part of the UCI "Optical Recognition of Handwritten Digits" data set (Alpaydin
and Kaynak 1998): 32x32 bitmaps, counted in 4x4 blocks, so that a pixel is an integer in 0..16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import ArraySource, SourceInfo
from dp_jax.errors import UserError

IMAGE_SHAPE = (8, 8, 1)
VALUE_RANGE = (0.0, 16.0)
CLASS_NAMES = tuple(str(digit) for digit in range(10))
TRAIN_FRACTION = 0.8


@dataclass(frozen=True)
class DigitsOptions(SourceOptions):
  """The scans have no keys of their own: data.seed picks the split."""

  READS_PATH = False

  def open(self, split: str, context: Context) -> ArraySource:
    """Opens one side of an 80/20 split of the scans.

    The set is the same for everybody, so which scans are in which split is public. Of other data, a
    split by place would let one record decide where others are.

    Args:
      split: "train" (1,437 scans) or "test" (the other 360).
      context: the seed of the permutation that splits them; not secret, and not the data's order.

    Returns:
      A source of uint8[8, 8, 1] images with values 0..16 and labels 0..9, with the column "ink",
      the mean pixel value: whether the writing is faint or heavy.

    Raises:
      ValueError: if `split` is neither "train" nor "test".
    """
    if split not in ("train", "test"):
      raise UserError(f"digits has the splits train and test, not {split!r}")
    from sklearn import datasets  # which takes a second

    scans = datasets.load_digits()
    permutation = np.random.Generator(np.random.PCG64(context.seed)).permutation(len(scans.target))
    num_train = int(TRAIN_FRACTION * len(permutation))
    chosen = permutation[:num_train] if split == "train" else permutation[num_train:]
    info = SourceInfo(
      name=f"digits/{split}",
      num_records=len(chosen),
      input_shape=IMAGE_SHAPE,
      num_classes=10,
      value_range=VALUE_RANGE,
      class_names=CLASS_NAMES,
    )
    images = scans.images[chosen].astype(np.uint8)[..., None]
    ink = images.mean(axis=(1, 2, 3))
    return ArraySource(info, images, scans.target[chosen].astype(np.int64), {"ink": ink})
