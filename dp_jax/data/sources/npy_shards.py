"""Large arrays on disk: memory-mapped .npy shards.

A folder holds, for each split, SPLIT_inputs_00000.npy, SPLIT_labels_00000.npy and one file a
further column, then _00001 and so on; and manifest.json:

  {"input_shape": [1280], "input_dtype": "float16", "num_classes": 10, "class_names": [...],
   "value_range": [-1, 1], "columns": ["patient"], "splits": {"train": [65536, 3000]},
   "origin": {...}}

where `splits` gives the records of each shard, and `origin` says where the arrays come from; its
"declared", if it is "private", that no run may declare them public; its "cut" by which setting
other records decided which are here, for each split for which one did. Labels are integers [n], or
numbers [n, num_classes] that say of each label 1 for yes, 0 for no, -1 for not known. Where
input_dtype is bfloat16, which NumPy does not know, files hold its bits as uint16.
`dp_jax.data.sources.npy_writer` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import DataError, SourceInfo, no_column
from dp_jax.errors import UserError
from dp_jax.files.ordinary import WHOLE_BYTES

MANIFEST = "manifest.json"
INPUT_DTYPES = ("uint8", "float16", "bfloat16", "float32")
_BFLOAT16 = "bfloat16"
# How many rows of a large shard's inputs are hashed: all would take minutes on a large set.
_HASHED_ROWS = 1024


@dataclass(frozen=True)
class NpyOptions(SourceOptions):
  """Shards have no keys of their own."""

  HOLDS = "arrays"

  def open(self, split: str, context: Context) -> NpyShards:
    """Opens a split of data.path."""
    return NpyShards(context.required_path("a folder of .npy shards"), split)


class NpyShards:
  """One split of a folder of .npy shards, read through memory maps: only what is asked for."""

  def __init__(self, path: str, split: str):
    """Opens the split.

    Args:
      path: a folder as described above. Without a manifest the shards are counted, and
        num_classes has to be declared; value_range is 0..255 for uint8, else -1..1.
      split: which of its splits.

    Raises:
      ValueError: if the folder or split is not there, or the files do not fit each other.
    """
    self._folder, self._split = Path(path), split
    manifest = _read_manifest(self._folder, split)
    inputs = self._open("inputs", manifest)
    declared = manifest.get("input_dtype")
    self._inputs = [_from_stored(array) for array in inputs] if declared == _BFLOAT16 else inputs
    self._labels = self._open("labels", manifest)
    self._columns = {name: self._open(name, manifest) for name in manifest.get("columns", ())}
    first = self._inputs[0]
    for shard, array in enumerate(self._inputs):
      if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
        name = file_name(split, "inputs", shard)
        raise DataError(
          f"{name} has another dtype or shape than the first shard",
          f"{array.dtype} {array.shape}",
        )
    dtype = first.dtype.name
    if dtype not in INPUT_DTYPES or first.ndim not in (2, 4):
      raise UserError(
        f"{self._folder}: inputs must be {', '.join(INPUT_DTYPES)} of shape [n, features] or"
        f" [n, H, W, C], not {dtype} of {first.ndim} dimensions"
      )
    if declared not in (None, dtype):
      raise UserError(f"{self._folder}: inputs are {dtype}, but {MANIFEST} says {declared}")
    num_classes = self._num_classes(manifest.get("num_classes"))
    self._starts = np.cumsum([0, *map(len, self._inputs)])
    origin = manifest.get("origin")
    origin = origin if isinstance(origin, dict) else {}
    low_high = manifest.get("value_range") or ((0.0, 255.0) if dtype == "uint8" else (-1.0, 1.0))
    self._info = SourceInfo(
      name=f"{self._folder.name}/{split}",
      num_records=int(self._starts[-1]),
      input_shape=first.shape[1:],
      num_classes=num_classes,
      value_range=(float(low_high[0]), float(low_high[1])),
      class_names=tuple(manifest.get("class_names") or ()),
      input_dtype=dtype,
      read_on_demand=True,
      label_shape=self._labels[0].shape[1:],
      private=origin.get("declared") == "private",
      origin=origin,
      cut=_cut(origin, split),
    )

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One record: "inputs" [*input_shape] and "label"."""
    row = self.gather(np.asarray([index]))
    return {"inputs": row["inputs"][0], "label": row["label"][0]}

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The records at `indices` (int64[n]), stacked."""
    labels = self._take(self._labels, indices)
    if self._info.label_shape:
      labels = labels.astype(np.float32)
    return {"inputs": self._take(self._inputs, indices), "label": labels}

  def column(self, name: str) -> np.ndarray:
    """A further column, [num_records].

    Raises:
      ValueError: if there is none of that name.
    """
    if name not in self._columns:
      raise no_column(self._info, name, self._columns)
    return np.concatenate(self._columns[name])

  def fingerprint(self) -> str:
    """SHA-256 over labels, columns, sizes, and the inputs of each shard of 64 MiB or less.

    Of a larger shard's inputs over 1,024 to 2,047 rows that are spread evenly.
    """
    info = self._info
    digest = hashlib.sha256(repr((info.num_classes, info.value_range, info.class_names)).encode())
    for arrays in (self._labels, *self._columns.values()):
      for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    for array in self._inputs:
      digest.update(f"{array.dtype.str}{array.shape}".encode())
      step = max(1, len(array) // _HASHED_ROWS) if array.nbytes > WHOLE_BYTES else 1
      rows = array[::step]
      digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()

  def _take(self, shards: list[np.ndarray], indices: np.ndarray) -> np.ndarray:
    """Rows of all shards, one read a shard."""
    owners = np.searchsorted(self._starts, indices, side="right") - 1
    result = np.empty((len(indices), *shards[0].shape[1:]), shards[0].dtype)
    for shard in np.unique(owners):
      wanted = owners == shard
      result[wanted] = shards[shard][indices[wanted] - self._starts[shard]]
    return result

  def _num_classes(self, declared: int | None) -> int | None:
    """How many labels there are, if the files say; checks their shapes."""
    first = self._labels[0]
    for array in self._labels:
      kinds = "ui" if array.ndim == 1 else "uif"
      if array.ndim > 2 or array.shape[1:] != first.shape[1:] or array.dtype.kind not in kinds:
        raise DataError(
          f"{self._folder}: labels must be integers [n], or numbers [n, num_classes]",
          f"not {array.dtype} {array.shape}",
        )
    if first.ndim == 1:
      return declared
    if declared not in (None, first.shape[1]):
      raise UserError(f"{self._folder}: {first.shape[1]} labels a record, not {declared}")
    return int(first.shape[1])

  def _open(self, name: str, manifest: Mapping[str, Any]) -> list[np.ndarray]:
    """The shards of one column, mapped; checks that they hold the records of the manifest."""
    arrays = []
    for shard, count in enumerate(manifest["shards"]):
      file = self._folder / file_name(self._split, name, shard)
      try:
        # Pickled objects are refused: loading one can run any code.
        array = np.load(file, mmap_mode="r", allow_pickle=False)
      except Exception as error:  # of a dozen types, down to those of Python's own parser
        reason = " ".join(str(error).split())  # which may quote the file
        raise DataError(f"cannot read {file}: {type(error).__name__}", reason) from None
      if array.ndim < 1 or len(array) != count:
        raise DataError(
          f"{file} does not hold the records that the manifest or the labels say",
          f"it has shape {array.shape}, but {count} records are expected",
        )
      arrays.append(array)
    return arrays


def _cut(origin: Mapping[str, Any], split: str) -> str:
  """By which setting the records were cut that these were made from; "" if by none."""
  cuts = origin.get("cut")
  cut = cuts.get(split) if isinstance(cuts, dict) else None
  return f"the manifest's {cut}" if cut else ""


def as_stored(array: np.ndarray) -> np.ndarray:
  """An array as its file holds it."""
  return array.view(np.uint16) if array.dtype.name == _BFLOAT16 else array


def _from_stored(array: np.ndarray) -> np.ndarray:
  """The bfloat16 numbers of a file; a file of anything else is left as it is."""
  return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def file_name(split: str, name: str, shard: int) -> str:
  """The file of one shard of a column; `name` is "inputs", "labels" or a further column's."""
  return f"{split}_{name}_{shard:05d}.npy"


def _length(shard: Path) -> int:
  try:
    return int(np.load(shard, mmap_mode="r", allow_pickle=False).shape[0])
  except Exception as error:
    reason = " ".join(str(error).split())
    raise DataError(f"cannot read {shard}: {type(error).__name__}", reason) from None


def _read_manifest(folder: Path, split: str) -> dict[str, Any]:
  """The manifest, with "shards", the number of records of each shard of the split."""
  if not folder.is_dir():
    raise UserError(f"no such folder: {folder}")
  file = folder / MANIFEST
  if not file.exists():
    shards = sorted(folder.glob(f"{split}_labels_*.npy"))
    if not shards:
      raise UserError(f"{folder} has neither {MANIFEST} nor {split}_labels_00000.npy")
    return {"shards": [_length(shard) for shard in shards]}
  try:
    manifest = json.loads(file.read_text())
    splits = manifest["splits"]
    if splits.get(split):
      return {**manifest, "shards": [int(count) for count in splits[split]]}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise DataError(f"{file} is no manifest of .npy shards", repr(error)) from None
  raise UserError(f"{folder} has no split {split!r}; it has {', '.join(splits) or 'none'}")
