"""Prepared TensorFlow Datasets data sets, read by index and without TensorFlow."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import (
  DataError,
  Record,
  RecordError,
  SourceInfo,
  no_column,
  one_by_one,
)
from dp_jax.errors import UserError
from dp_jax.files.ordinary import sample_digest, sizes_of


@dataclass(frozen=True)
class TfdsOptions(SourceOptions):
  """Prepared data sets have no keys of their own: data.source has the name."""

  def open(self, split: str, context: Context) -> TfdsSource:
    """Opens a split, prepared in data.path or else in the default folder of TFDS."""
    return TfdsSource(context.source.removeprefix("tfds:"), split, data_dir=context.path)


class TfdsSource:
  """One split of a data set that was prepared as array_record files.

  Reads through `tfds.data_source`, which decodes with NumPy and Pillow. A record that cannot be
  decoded is a RecordError; the files themselves are checked when the source is opened.
  """

  def __init__(
    self,
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    image_key: str = "image",
    label_key: str = "label",
  ):
    """Opens the split.

    Args:
      name: the data set, with or without config and version ("mnist", "mnist:3.0.1").
      split: a split, or a slice of one ("train[:80%]").
      data_dir: where it was prepared; None means the TFDS default.
      image_key: the feature that is the image, an Image or a Tensor of three dimensions.
      label_key: the feature that is the label, a ClassLabel or an integer.

    Raises:
      ValueError: if tensorflow-datasets is not installed, the data set is not there as
        array_record files, or it lacks the split or the features.
    """
    try:
      import tensorflow_datasets as tfds
    except ImportError as error:
      raise UserError(
        f"reading tfds:{name} needs tensorflow-datasets and array_record: "
        f"pip install 'dp_jax[tfds]' ({error})"
      ) from error
    where = data_dir or "the default data_dir of TFDS"
    try:
      builder = tfds.builder(name, data_dir=data_dir)
      self._records = builder.as_data_source(split=split)
    except Exception as error:
      # TFDS raises many types here, with messages of many lines; the first says what is wrong.
      reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
      raise DataError(
        f"cannot open split {split!r} of tfds:{name} in {where}: it must have been prepared with"
        " file_format='array_record'",
        reason,
      ) from None
    features = builder.info.features
    self._keys = (image_key, label_key)
    info = _source_info(f"tfds:{name}/{split}", len(self._records), features, self._keys)
    # A slice counts records from the first or the last, so that one less moves its end.
    self._info = replace(info, cut=f"the split {split!r}") if "[" in split else info
    sizes = {key: [info.num_examples, info.num_bytes] for key, info in builder.info.splits.items()}
    self._shards = sorted(pathlib.Path(builder.data_dir).glob("*array_record*"))
    self._description = [
      builder.info.full_name, split, len(self._records), sorted(sizes.items()),
      [shard.name for shard in self._shards],
    ]  # fmt: skip

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" [H, W, C] and "label".

    Raises:
      RecordError: if it cannot be read or decoded.
    """
    image_key, label_key = self._keys
    try:
      record = self._records[int(index)]
      return {"inputs": np.asarray(record[image_key]), "label": record[label_key]}
    except Exception as error:
      # Whatever the decoder raises (Pillow alone has a dozen types) depends on this record.
      raise RecordError(f"cannot be decoded: {type(error).__name__}") from None

  def gather(self, indices: np.ndarray) -> list[Record | RecordError]:
    """The records at `indices` (int64[n]), with the error in place of an undecodable one."""
    return list(one_by_one(self, indices))

  def column(self, name: str) -> np.ndarray:
    """Columns are not read from this kind of data set."""
    raise no_column(self._info, name)

  def fingerprint(self) -> str:
    """SHA-256 over name, version, split, and names and sizes of the shards of all splits.

    And over their content where that is 64 MiB or less; else over a sample, as
    `dp_jax.files.ordinary.sample_digest` takes it. Times are left out, so that a copy has the
    same one.
    """
    sample = sample_digest(self._shards, sizes_of(self._shards))
    return hashlib.sha256(repr((self._description, sample)).encode()).hexdigest()


def _source_info(
  name: str, num_records: int, features: Mapping[str, Any], keys: tuple[str, str]
) -> SourceInfo:
  """Reads shape, dtype and classes off the declared features."""
  for key in keys:
    if key not in features:
      raise UserError(f"{name} has no feature {key!r}; it has {', '.join(sorted(features))}")
  image, label = (features[key] for key in keys)
  if len(image.shape) != 3:
    raise UserError(f"{name}: feature {keys[0]!r} must be [H, W, C], not {image.shape}")
  is_uint8 = np.dtype(image.np_dtype) == np.uint8
  return SourceInfo(
    name=name,
    num_records=num_records,
    input_shape=None if None in image.shape else tuple(image.shape),
    num_classes=getattr(label, "num_classes", None),
    value_range=(0.0, 255.0) if is_uint8 else (0.0, 1.0),
    class_names=tuple(getattr(label, "names", None) or ()),
    input_dtype="uint8" if is_uint8 else "float32",
  )
