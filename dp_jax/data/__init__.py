"""Data: random-access sources of records, and units assembled from them in static shapes."""

from dp_jax.data.records import RecordSpec, check_records
from dp_jax.data.sources.opening import open_source
from dp_jax.data.sources.source import (
  ArraySource,
  DataError,
  Record,
  RecordError,
  Source,
  SourceInfo,
)
from dp_jax.data.units import UnitLoader

__all__ = [
  "ArraySource",
  "DataError",
  "Record",
  "RecordError",
  "RecordSpec",
  "Source",
  "SourceInfo",
  "UnitLoader",
  "check_records",
  "open_source",
]
