"""Images or feature vectors, and labels, in NumPy's .npz files."""

from __future__ import annotations

import pathlib
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import ArraySource, DataError, SourceInfo
from dp_jax.errors import UserError

# Tried in this order; SPLIT stands for the name of the split.
_IMAGE_KEYS = ("SPLIT_image", "SPLIT_images", "x_SPLIT", "SPLIT_features")
_LABEL_KEYS = ("SPLIT_label", "SPLIT_labels", "y_SPLIT")


@dataclass(frozen=True)
class NpzOptions(SourceOptions):
  """Arrays in a file have no keys of their own."""

  HOLDS = "arrays"

  def open(self, split: str, context: Context) -> ArraySource:
    """Opens a split of data.path, as `open_npz` says."""
    return open_npz(context.required_path("a file or folder"), split)


def open_npz(path: str, split: str) -> ArraySource:
  """Opens one split of an .npz file, or of a folder with one such file per split.

  Pixel values keep their dtype if it is uint8 and become float32 otherwise. The number of
  classes is not read off the labels, since that would make it depend on the records: it has to
  be declared. The declared range is 0..255 for uint8 and 0..1 for anything else.

  Args:
    path: FILE.npz with the arrays train_image, train_label, test_image, test_label (or x_train,
      y_train, x_test, y_test, as in mnist.npz; train_features and test_features for vectors), or
      a folder with train.npz and test.npz, each with the arrays image and label. Any other array
      train_NAME, or NAME in a folder, of one value for each record is a column NAME, for units and
      groups.
    split: "train", "test" or any other for which the file has arrays.

  Returns:
    A source of [H, W, C] images; [H, W] images get a channel axis. Or one of vectors [d].

  Raises:
    ValueError: if the path is missing, is no .npz file, lacks an array, or the arrays are not
      [N, H, W] or [N, H, W, C] numbers, or [N, d] numbers that are not uint8, and N integers.
  """
  location = pathlib.Path(path)
  if location.is_dir():
    file = location / f"{split}.npz"
    image_keys: tuple[str, ...] = ("image", "images", "features")
    label_keys: tuple[str, ...] = ("label", "labels")
  else:
    file = location
    image_keys = tuple(key.replace("SPLIT", split) for key in _IMAGE_KEYS)
    label_keys = tuple(key.replace("SPLIT", split) for key in _LABEL_KEYS)
  if not file.is_file():
    raise UserError(f"no such file: {file} (data.path is {path!r})")
  images, labels = _read_arrays(file, image_keys, label_keys)
  images, labels = _checked(file, images, labels)
  prefix = "" if location.is_dir() else f"{split}_"
  columns = _read_columns(file, prefix, {*image_keys, *label_keys}, len(labels))
  info = SourceInfo(
    name=f"{file.name}/{split}",
    num_records=len(labels),
    input_shape=images.shape[1:],
    num_classes=None,
    value_range=_value_range(images),
    input_dtype=images.dtype.name,
  )
  return ArraySource(info, images, labels, columns)


def _value_range(images: np.ndarray) -> tuple[float, float]:
  if images.ndim == 2:
    return (-1.0, 1.0)
  return (0.0, 255.0) if images.dtype == np.uint8 else (0.0, 1.0)


def _load(file: pathlib.Path) -> Any:
  try:
    # Pickled objects are refused: loading one can run any code.
    return np.load(file, allow_pickle=False)
  except Exception as error:  # of a dozen types, down to those of Python's own parser
    reason = " ".join(str(error).split())
    raise DataError(f"cannot read {file}: {type(error).__name__}", reason) from None


def _read_arrays(
  file: pathlib.Path, image_keys: tuple[str, ...], label_keys: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
  """Reads the two arrays under the first of their names that the file has."""
  if not zipfile.is_zipfile(file):
    raise UserError(f"{file} is not an .npz archive")
  found = []
  with _load(file) as arrays:
    for keys in (image_keys, label_keys):
      present = [key for key in keys if key in arrays.files]
      if not present:
        raise DataError(
          f"{file} has no array {keys[0]!r} (nor {', '.join(keys[1:])})",
          f"it has {', '.join(sorted(arrays.files)) or 'none'}",
        )
      try:
        found.append(arrays[present[0]])
      except Exception as error:
        reason = " ".join(str(error).split())  # which may quote the file
        kind = type(error).__name__
        raise DataError(f"{file}: cannot read the array {present[0]!r}: {kind}", reason) from None
  return found[0], found[1]


def _read_columns(
  file: pathlib.Path, prefix: str, others: set[str], num_records: int
) -> dict[str, np.ndarray]:
  """The arrays that hold one number or string for each record, by name."""
  columns = {}
  with _load(file) as arrays:
    for key in arrays.files:
      if key in others or not key.startswith(prefix):
        continue
      try:
        values = arrays[key]
      except Exception:
        continue  # pickled or damaged: no column, and said so when it is asked for
      if values.shape == (num_records,) and values.dtype.kind in "USbiuf":
        columns[key.removeprefix(prefix)] = values
  return columns


def _checked(
  file: pathlib.Path, images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Checks the schema of both arrays and brings them to the dtypes of a source."""
  numeric = images.dtype.kind in "uif"
  vectors = images.ndim == 2 and images.dtype != np.uint8
  if (images.ndim not in (3, 4) and not vectors) or not numeric:
    raise DataError(
      f"{file}: images must be numbers of shape [N, H, W] or [N, H, W, C], or features numbers of "
      "shape [N, d] other than uint8",
      f"not {images.dtype} {images.shape}",
    )
  if labels.ndim == 2 and labels.shape[1] == 1:
    labels = labels[:, 0]
  if labels.dtype.kind not in "ui" or labels.shape != images.shape[:1]:
    raise DataError(
      f"{file}: labels must be integers, one per image",
      f"they must be {len(images)} integers, one per image, not {labels.dtype} {labels.shape}",
    )
  if not len(images):
    raise UserError(f"{file}: the arrays are empty")
  if images.ndim == 3:
    images = images[..., None]
  if images.dtype != np.uint8:
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
      images = images.astype(np.float32)
  return images, labels.astype(np.int64)
