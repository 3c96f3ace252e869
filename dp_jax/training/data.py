"""From the data section of a configuration to sources, units and groups."""

import hashlib
from pathlib import Path

import numpy as np

from dp_jax.data.groups import bands
from dp_jax.data.source import Source, open_source
from dp_jax.data.units import RecordSpec, UnitLoader
from dp_jax.training.config import Config, DataConfig


def open_split(
  data: DataConfig,
  name: str,
  *,
  input_shape: tuple[int, ...] | None = None,
  class_names: tuple[str, ...] | None = None,
) -> Source:
  """Opens a split of the configured data.

  Args:
    data: where the records are.
    name: of the split.
    input_shape: what data.input_shape is by default.
    class_names: what data.class_names is by default, so that all splits number classes alike.

  Raises:
    ValueError: if it is not there or malformed.
  """
  return open_source(
    data.source, name, path=data.path, seed=data.seed, num_records=data.num_records,
    input_shape=data.input_shape or input_shape, resize=data.resize,
    crop_fraction=data.crop_fraction, class_names=data.class_names or class_names,
  )  # fmt: skip


def is_strict(data: DataConfig) -> bool:
  """Whether a malformed record is an error rather than one of zero weight."""
  return data.strict or data.declared == "public"


def training_units(config: Config, source: Source, record: RecordSpec) -> UnitLoader:
  """The training records, grouped into what the guarantee protects.

  Raises:
    ValueError: if the source has no column privacy.unit, or the list of units cannot be read; on
      public data, and with data.strict, also if a record has no unit.
  """
  data, unit = config.data, config.privacy.unit
  ids = None if unit == "record" else source.column(unit)
  units = None if data.units is None or ids is None else _read_units(Path(data.units), ids)
  return UnitLoader(
    source, record, max_records_per_unit=config.max_records_per_unit,
    strict=is_strict(data), unit_ids=ids, units=units,
  )  # fmt: skip


def units_digest(data: DataConfig) -> str | None:
  """A hash of the public list of units, if there is one."""
  return None if data.units is None else hashlib.sha256(Path(data.units).read_bytes()).hexdigest()


def read_groups(data: DataConfig, source: Source) -> dict[str, np.ndarray]:
  """The subgroup of every record, [num_records] of strings for each column of data.groups.

  Raises:
    ValueError: if the source lacks a column, or one with cut points holds no numbers.
  """
  cuts = data.group_bins or ((),) * len(data.groups or ())
  return {
    name: bands(source.column(name), points, name)
    for name, points in zip(data.groups or (), cuts, strict=True)
  }


def _read_units(path: Path, ids: np.ndarray) -> np.ndarray:
  """The ids in a file, one a line, as numbers where the column holds numbers."""
  try:
    lines = path.read_text("utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"data.units={str(path)!r} cannot be read: {error}") from error
  listed = np.array([line.strip() for line in lines if line.strip()])
  if not len(listed):
    raise ValueError(f"data.units={str(path)!r} lists no unit")
  if ids.dtype.kind not in "biuf":
    return listed
  try:
    return listed.astype(ids.dtype)
  except (ValueError, OverflowError) as error:
    raise ValueError(
      f"data.units={str(path)!r} lists what is no number, but the column holds numbers: {error}"
    ) from error
