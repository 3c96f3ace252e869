"""The table of sources: what data.source may name, and the keys that each one has."""

from __future__ import annotations

import dataclasses
from typing import Any

from dp_jax.data.sources.csv_source import Csv
from dp_jax.data.sources.custom import GIVEN, CustomOptions, GivenOptions
from dp_jax.data.sources.digits import DigitsOptions
from dp_jax.data.sources.folder import FolderOptions
from dp_jax.data.sources.hf_source import HfOptions
from dp_jax.data.sources.npy_shards import NpyOptions
from dp_jax.data.sources.npz import NpzOptions
from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.rendered_digits import RenderedDigitsOptions
from dp_jax.data.sources.source import Head, Source
from dp_jax.data.sources.tfds_source import TfdsOptions
from dp_jax.errors import UserError

_CUSTOM, _TFDS = "package.module:function", "tfds:NAME"
# The modules leave what takes long to import to `open`.
SOURCES: dict[str, type[SourceOptions]] = {
  "digits": DigitsOptions,  # the scans that scikit-learn ships
  "rendered_digits": RenderedDigitsOptions,  # drawn here, public
  "npz": NpzOptions,  # arrays in files
  "npy": NpyOptions,  # memory-mapped shards
  "folder": FolderOptions,  # images in class folders
  "csv": Csv,  # a table of numbers or of image paths
  "hf": HfOptions,  # a Hugging Face data set on disk
  _TFDS: TfdsOptions,  # a prepared TensorFlow Datasets data set
  _CUSTOM: CustomOptions,  # a function of other people
  GIVEN: GivenOptions,  # what a program gives to `dp_jax.train`
}


def options_of(source: str) -> type[SourceOptions]:
  """The options that a source has, by what data.source is; imports nothing of other people.

  Raises:
    UserError: if there is no such source.
  """
  kind = source
  if ":" in source:
    kind = _TFDS if source.startswith("tfds:") else _CUSTOM
  if kind not in SOURCES:
    raise UserError(f"unknown data source {source!r}; use one of {', '.join(SOURCES)}")
  return SOURCES[kind]


def open_split(options: SourceOptions, split: str, context: Context) -> Source:
  """Opens a split of a source, cut to data.num_records.

  Raises:
    UserError: as `SourceOptions.open` does, and for a number of records below 1.
  """
  count = context.num_records
  if count is not None and count < 1:
    raise UserError(f"num_records must be at least 1, not {count}")
  source = options.open(split, context)
  return source if count is None or options.MAKES_RECORDS else Head(source, count)


def open_source(name: str, split: str, options: SourceOptions | None = None, **keys: Any) -> Source:
  """Opens a source by name.

  Args:
    name: what data.source may be: a key of SOURCES, tfds:NAME or package.module:function.
    split: "train", "test", or what the source calls its splits.
    options: the keys of the source's own; None takes their defaults.
    **keys: those of them that differ, and any of `Context`: `path="scans", resize="stretch"`.

  Raises:
    UserError: for an unknown name, key or split, or a file that is missing or malformed. What may
      be a record's, a name in a first line or of a folder, is the detail of a DataError, not its
      text.
  """
  kind = options_of(name)
  names = {field.name for field in dataclasses.fields(kind)}
  own = {key: keys.pop(key) for key in [*keys] if key in names}
  unknown = {*keys} - {field.name for field in dataclasses.fields(Context)}
  if unknown:
    raise UserError(f"the source {name} has no key {min(unknown)!r}")
  options = kind(**own) if options is None else dataclasses.replace(options, **own)
  return open_split(options, split, Context(name, **keys))
