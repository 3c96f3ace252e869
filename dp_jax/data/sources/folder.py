"""Images in class folders: PATH/SPLIT/CLASS/*.jpg, as ImageNet and Imagenette are laid out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.data.sources.images import ImageDecoder, ImageOptions
from dp_jax.data.sources.options import Context
from dp_jax.data.sources.source import (
  DataError,
  Record,
  RecordError,
  SourceInfo,
  no_column,
  one_by_one,
)
from dp_jax.errors import UserError
from dp_jax.files.ordinary import sample_digest

EXTENSIONS = (".jpg", ".jpeg", ".png")
# Folders that archives, systems and editors leave, without regard to case. Those whose names begin
# with a dot are left out too.
JUNK = (
  "__macosx", "__pycache__", "lost+found", "@eadir", "#recycle", "#snapshot", "$recycle.bin",
  "system volume information", "cvs",
)  # fmt: skip


@dataclass(frozen=True)
class FolderOptions(ImageOptions):
  """Keys of class folders.

  Attributes:
    class_names: the class folders in the order of their labels; left out, those of the training
      split, sorted, which add_or_remove_one refuses.
  """

  HOLDS = "images"
  class_names: tuple[str, ...] | None = None

  def open(self, split: str, context: Context) -> FolderSource:
    """Lists a split of data.path."""
    path, decoder = context.required_path("a folder"), self.decoder(context.input_shape)
    return FolderSource(path, split, decoder, class_names=self.class_names or context.class_names)

  def reading(self) -> dict[str, Any]:
    """The classes, and how images are decoded."""
    return {"class_names": self.class_names, **super().reading()}


class FolderSource:
  """One split of a folder of images.

  Records are in the order of class and file name, whatever order the file system lists them in.
  Only names and sizes are read when it is opened. Files with another extension than .jpg, .jpeg
  or .png, and hidden ones, are not records. A folder that JUNK names, or a hidden one, is a class
  only if class_names has it.
  """

  def __init__(
    self,
    path: str,
    split: str,
    decoder: ImageDecoder,
    *,
    class_names: tuple[str, ...] | None = None,
  ):
    """Lists the split.

    Args:
      path: the folder that holds one folder a split.
      split: which of them.
      decoder: gives every image its shape.
      class_names: the folders of the classes, in the order of their labels; one may be missing,
        but no other may be there. None takes the folders that are there, sorted: the list of
        classes is then treated as public.

    Raises:
      ValueError: if there is no such folder, it has a folder that is no class, or no image. The
        name of a folder is a detail, since it may be that of a person.
    """
    root = Path(path) / split
    if not root.is_dir():
      raise UserError(f"no such folder: {root} (data.path is {path!r})")
    declared = class_names or ()
    found = sorted(entry.name for entry in os.scandir(root) if _is_class(entry, declared))
    classes = tuple(found) if class_names is None else class_names
    if len({*classes}) != len(classes):
      raise UserError(f"class_names has {len(classes)} names, of which {len({*classes})} differ")
    unknown = sorted({*found} - {*classes})
    if unknown:
      raise DataError(
        f"{root} has a folder that is no class",
        f"it has the folder {unknown[0]!r}, which is not among the classes",
      )
    self._root, self._decoder = root, decoder
    self._files: list[str] = []
    self._sizes: list[int] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
      listed = _images(root / name) if name in found else []
      self._files += [f"{name}/{file}" for file, _ in listed]
      self._sizes += [size for _, size in listed]
      labels += [label] * len(listed)
    if not labels:
      raise UserError(f"{root} has no {', '.join(EXTENSIONS)} files in class folders")
    self._labels = np.asarray(labels, np.int64)
    self._info = SourceInfo(
      name=f"folder/{split}",
      num_records=len(labels),
      input_shape=decoder.shape,
      num_classes=len(classes),
      value_range=(0.0, 255.0),
      class_names=classes,
      read_on_demand=True,
      cut="data.class_names=None" if class_names is None else "",
    )

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" uint8[H, W, C] and "label".

    Raises:
      RecordError: if the file is gone or cannot be decoded.
    """
    return {
      "inputs": self._decoder.read(f"{self._root}/{self._files[index]}"),
      "label": int(self._labels[index]),
    }

  def gather(self, indices: np.ndarray) -> Iterator[Record | RecordError]:
    """The records at `indices` (int64[n]), with the error in place of an unreadable one."""
    return one_by_one(self, indices)

  def file_of(self, index: int) -> str:
    """The file of a record: for messages on public data, since names can tell of people."""
    return f"{self._root}/{self._files[index]}"

  def column(self, name: str) -> np.ndarray:
    """A folder has no columns."""
    raise no_column(self._info, name)

  def fingerprint(self) -> str:
    """SHA-256 over classes, names and sizes of all files, and how they are decoded.

    And over their content where that is 64 MiB or less; else over a sample, as
    `dp_jax.files.ordinary.sample_digest` takes it. Times are left out, so that a copy of the
    folder has the same one.
    """
    digest = hashlib.sha256(repr((self._decoder, self._info.class_names)).encode())
    for file, size in zip(self._files, self._sizes, strict=True):
      digest.update(f"{file}\0{size}\0".encode(errors="surrogateescape"))
    paths = [f"{self._root}/{file}" for file in self._files]
    digest.update(sample_digest(paths, self._sizes).encode())
    return digest.hexdigest()


def _is_class(entry: os.DirEntry[str], declared: tuple[str, ...]) -> bool:
  junk = entry.name.startswith(".") or entry.name.casefold() in JUNK
  return entry.is_dir() and (not junk or entry.name in declared)


def _images(folder: Path) -> list[tuple[str, int]]:
  """Names and sizes of the images in a folder, sorted. A link to nothing has size -1."""
  listed = []
  with os.scandir(folder) as entries:
    for entry in entries:
      if not entry.name.startswith(".") and entry.name.lower().endswith(EXTENSIONS):
        listed.append((entry.name, _size(entry)))
  return sorted(listed)


def _size(entry: os.DirEntry[str]) -> int:
  try:
    return entry.stat().st_size
  except OSError:
    return -1
