"""Writes .npy shards one by one and keeps those that are done when it is stopped half way.

The layout is that of `dp_jax.data.sources.npy_shards`. The manifest is known before the first
shard, and stands beside them under another name until the last one is written.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.data.sources.npy_shards import MANIFEST, as_stored, file_name
from dp_jax.errors import UserError
from dp_jax.files.folder_lock import held

_PLAN = "unfinished_manifest.json"
# What depends on private records.
_SECRET = {
  "splits": "the records, or how many of them a shard holds, differ",
  "origin.source_sha256": "the records differ",
}


class ResumableShards:
  """A folder of shards that is filled over several processes, one after the other or together.

  Of those that work together one holds the folder open, and each writes shards of its own.
  """

  def __init__(self, folder: Path, manifest: Mapping[str, Any], *, private: bool):
    """Describes the folder; nothing is written yet.

    Args:
      folder: new, empty, or left by a process of the same manifest.
      manifest: JSON values as `NpyShards` reads them, "splits" with the records of each shard
        included.
      private: whether the owner alone may read what is written.
    """
    self._folder, self._private = folder, private
    self._manifest: dict[str, Any] = json.loads(json.dumps(manifest))

  @contextmanager
  def open(self) -> Iterator[None]:
    """Holds the folder for one process.

    Raises:
      ValueError: if it cannot be written, is held by another process, or holds anything else than
        shards of this manifest; each difference is named. Nothing in it has been changed then.
    """
    with held(self._folder, doing="writing to"):
      self._claim()
      yield

  @property
  def complete(self) -> bool:
    """Whether all shards and the manifest are there."""
    return (self._folder / MANIFEST).exists()

  def has(self, split: str, shard: int) -> bool:
    """Whether a shard is done: its labels are written last."""
    return (self._folder / file_name(split, "labels", shard)).exists()

  def write(self, split: str, shard: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a shard: "inputs", "labels" and every column."""
    for name in sorted(arrays, key=lambda name: name == "labels"):
      self._write_array(file_name(split, name, shard), arrays[name])

  def note(self, name: str, content: Any) -> None:
    """Writes JSON values beside the shards."""
    with self._replacing(self._folder / name) as file:
      file.write(json.dumps(content, indent=2).encode() + b"\n")

  def finish(self) -> None:
    """Gives the manifest its name, which marks the folder as complete.

    Raises:
      ValueError: if a shard is not there.
    """
    for split, counts in self._manifest["splits"].items():
      for shard in range(len(counts)):
        if not self.has(split, shard):
          raise UserError(
            f"{str(self._folder)!r} lacks shards of {split!r}: give the same command again."
          )
    self.note(MANIFEST, self._manifest)
    (self._folder / _PLAN).unlink(missing_ok=True)

  def _claim(self) -> None:
    """Checks whose folder it is, and writes the plan of a new one."""
    for name in (MANIFEST, _PLAN):
      file = self._folder / name
      if not file.exists():
        continue
      try:
        found = json.loads(file.read_text())
      except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): choose a new folder.") from error
      different = list(_differences(found, self._manifest, hidden=_SECRET if self._private else {}))
      if different:
        raise UserError(
          f"{str(self._folder)!r} holds other arrays: {'; '.join(different)}. Choose a new folder."
        )
      for left in self._folder.glob(".*.tmp"):
        left.unlink()
      return
    # Hidden files: the lock, and what a process left that was killed while it wrote the plan.
    others = sorted(each.name for each in self._folder.iterdir() if not each.name.startswith("."))
    if others:
      raise UserError(
        f"{str(self._folder)!r} is not empty ({', '.join(others[:3])}): choose a new folder."
      )
    if self._private:
      self._folder.chmod(0o700)
    self.note(_PLAN, self._manifest)

  def _write_array(self, name: str, array: np.ndarray) -> None:
    with self._replacing(self._folder / name) as file:
      np.save(file, as_stored(array), allow_pickle=False)

  @contextmanager
  def _replacing(self, path: Path) -> Iterator[Any]:
    """A file that takes its name once it is whole and on disk."""
    # A name of its own: a host may still be at a shard that is given to another after a restart.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    mode = 0o600 if self._private else 0o666
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)


def _differences(
  found: Any, wanted: Any, where: str = "", *, hidden: Mapping[str, str]
) -> Iterator[str]:
  """Where two JSON values differ, by dotted name; of what is hidden, in words."""
  if where in hidden:
    if found != wanted:
      yield hidden[where]
  elif isinstance(found, dict) and isinstance(wanted, dict):
    for key in sorted({*found, *wanted}):
      name = f"{where}.{key}" if where else key
      yield from _differences(found.get(key), wanted.get(key), name, hidden=hidden)
  elif found != wanted:
    yield f"{where} is {found!r} there and {wanted!r} here"
