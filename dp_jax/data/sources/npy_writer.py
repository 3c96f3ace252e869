"""Writes the .npy shards that `dp_jax.data.sources.npy_shards` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.data.sources.npy_shards import INPUT_DTYPES, MANIFEST, as_stored, file_name
from dp_jax.errors import UserError

_RESERVED = ("inputs", "labels")


class ShardWriter:
  """Writes a folder that the `npy` source reads.

  Several splits are written one after the other. The manifest comes last, so that a folder that was
  meant to have one and has not is unfinished.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    class_names: tuple[str, ...] = (),
    value_range: tuple[float, float] = (-1.0, 1.0),
    origin: Mapping[str, Any] | None = None,
    records_per_shard: int = 65_536,
  ):
    """Starts an empty folder.

    Args:
      folder: new, or empty.
      num_classes: labels are 0..num_classes - 1; None leaves it to be declared.
      class_names: one name per label, or empty.
      value_range: what the model maps to -1..1; (-1, 1) leaves features as they are.
      origin: JSON values that say where the arrays come from.
      records_per_shard: the size of all shards of a split but the last.

    Raises:
      ValueError: if the folder holds something.
    """
    self._folder = Path(folder)
    self._folder.mkdir(parents=True, exist_ok=True)
    if any(self._folder.iterdir()):
      raise UserError(f"{str(self._folder)!r} is not empty: choose a new folder")
    if records_per_shard < 1:
      raise UserError(f"records_per_shard must be at least 1, not {records_per_shard}")
    self._records_per_shard = records_per_shard
    self._kinds: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    self._waiting: dict[str, list[np.ndarray]] = {}
    self._split: str | None = None
    self._manifest: dict[str, Any] = {
      "num_classes": num_classes,
      "class_names": list(class_names),
      "value_range": list(value_range),
      "splits": {},
      "origin": dict(origin or {}),
    }

  def append(
    self,
    split: str,
    inputs: np.ndarray,
    labels: np.ndarray,
    columns: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Adds records to a split.

    Args:
      split: its name; one that is left cannot be gone on with.
      inputs: [n, *input_shape], uint8, float16, bfloat16 or float32.
      labels: int[n], or numbers [n, num_classes], of each label 1 for yes, 0 for no, -1 for not
        known.
      columns: further arrays [n] of numbers or strings, the same ones in every call.

    Raises:
      ValueError: if the arrays do not fit each other or what was added before.
    """
    arrays = {"inputs": inputs, "labels": labels, **(columns or {})}
    self._check(arrays)
    if split != self._split:
      self._end_split()
      if split in self._manifest["splits"]:
        raise UserError(f"split {split!r} was written before: append its records in one go")
      self._manifest["splits"][split] = []
      self._split = split
    for name, array in arrays.items():
      self._waiting.setdefault(name, []).append(np.asarray(array))
    while self._num_waiting() >= self._records_per_shard:
      self._write(self._records_per_shard)

  def close(self) -> None:
    """Writes what is left, and the manifest.

    Raises:
      ValueError: if nothing was added.
    """
    self._end_split()
    if not self._kinds:
      raise UserError(f"{str(self._folder)!r}: no records were added")
    shape, dtype = self._kinds["inputs"]
    self._manifest |= {
      "input_shape": list(shape),
      "input_dtype": dtype.name,
      "columns": sorted({*self._kinds} - {*_RESERVED}),
    }
    temporary = self._folder / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps(self._manifest, indent=2) + "\n")
    os.replace(temporary, self._folder / MANIFEST)

  def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
    kinds = {name: (array.shape[1:], array.dtype) for name, array in arrays.items()}
    sizes = {len(array) for array in arrays.values()}
    if len(sizes) != 1:
      raise UserError(f"inputs, labels and columns have different lengths: {sorted(sizes)}")
    if kinds["inputs"][1].name not in INPUT_DTYPES:
      raise UserError(f"inputs must be {', '.join(INPUT_DTYPES)}, not {kinds['inputs'][1]}")
    shape, dtype = kinds["labels"]
    if len(shape) > 1 or dtype.kind not in ("uif" if shape else "ui"):
      raise UserError(
        f"labels must be integers [n], or numbers [n, num_classes], not {dtype} [n, {shape}]"
      )
    for name in {*kinds} - {*_RESERVED}:
      if kinds[name][0] != () or kinds[name][1].kind not in "biufU":
        raise UserError(f"column {name!r} must be numbers or strings of shape [n]")
    # Strings of other lengths have other dtypes.
    strings = {name for name, (_, dtype) in kinds.items() if dtype.kind == "U"}
    if self._kinds and (
      {*kinds} != {*self._kinds}
      or any(kinds[name] != self._kinds[name] for name in {*kinds} - strings)
    ):
      raise UserError(f"records of shape and dtype {kinds} after {self._kinds}")
    self._kinds = kinds

  def _num_waiting(self) -> int:
    return sum(map(len, self._waiting.get("labels", ())))

  def _end_split(self) -> None:
    if self._split is not None and self._num_waiting():
      self._write(self._num_waiting())

  def _write(self, count: int) -> None:
    shards = self._manifest["splits"][self._split]
    for name, parts in self._waiting.items():
      whole = np.concatenate(parts)
      file = self._folder / file_name(str(self._split), name, len(shards))
      np.save(file, as_stored(whole[:count]))
      self._waiting[name] = [whole[count:]]
    shards.append(count)
