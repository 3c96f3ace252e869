"""Labels as fields of a record: one class, or several questions of yes and no."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dp_jax.data.records import Field
from dp_jax.data.sources.source import SourceInfo


@dataclass(frozen=True)
class ClassLabel(Field):
  """One integer, 0..num_classes - 1."""

  num_classes: int
  shape: tuple[int, ...] = ()
  dtype: str | None = "int32"

  def problem(self, value: np.ndarray, dtype: np.dtype) -> str | None:
    """Not one integer, or out of range."""
    if value.shape != () or value.dtype.kind not in "ui":
      return f"the label must be one integer, not {value.dtype} of shape {value.shape}"
    if not 0 <= value < self.num_classes:
      return f"label {value} is outside 0..{self.num_classes - 1}"
    return None

  def good(self, values: np.ndarray) -> np.ndarray:
    """bool[n], which are in range."""
    return np.asarray((values >= 0) & (values < self.num_classes))

  def contradiction(self, info: SourceInfo) -> str | None:
    """Another number of classes, or several labels a record."""
    if info.num_classes is not None and info.num_classes != self.num_classes:
      return f"has {info.num_classes} classes, but {self.num_classes} are declared"
    if info.label_shape:
      return "has several labels a record, but one label a record is declared"
    return None


@dataclass(frozen=True)
class YesNoLabels(Field):
  """A vector of labels: 1 for yes, 0 for no, -1 for not known."""

  shape: tuple[int, ...]
  dtype: str | None = "float32"

  def problem(self, value: np.ndarray, dtype: np.dtype) -> str | None:
    """Not so many numbers, or another number."""
    if value.shape != self.shape or value.dtype.kind not in "iuf":
      return f"the label must be {self.shape[0]} numbers, not {value.dtype} of {value.shape}"
    return None if self.good(value[None])[0] else "a label is neither 0, 1 nor -1"

  def good(self, values: np.ndarray) -> np.ndarray:
    """bool[n], which hold nothing else."""
    return np.asarray(np.isin(values, (0, 1, -1)).all(axis=1))

  def known(self, values: np.ndarray) -> np.ndarray:
    """bool[n], of which some label is known."""
    return np.asarray((values != -1).any(axis=1))

  def contradiction(self, info: SourceInfo) -> str | None:
    """Another number of labels, or one label a record."""
    if info.num_classes is not None and info.num_classes != self.shape[0]:
      return f"has {info.num_classes} classes, but {self.shape[0]} are declared"
    if not info.label_shape:
      return "has one label a record, but several labels a record are declared"
    return None
