"""What a well-formed record looks like, and what is done with one that is not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dp_jax.data.sources.source import Record, RecordError, Source, Unlabelled
from dp_jax.errors import UserError

# How many records `check_records` asks for at once.
_CHECK_CHUNK = 1024
_ALIGNMENT = 64


@dataclass(frozen=True)
class RecordSpec:
  """What a well-formed record looks like; declared, never read off the records.

  Attributes:
    input_shape: (height, width, channels) of an image, (features,) of a vector.
    num_classes: labels are 0..num_classes - 1.
    value_range: the pixel values that the model maps to its input range. A value outside it is
      no error (clipping bounds what it can do); one that is not finite is.
    multilabel: the label is not one integer but a vector of num_classes: 1 for yes, 0 for no, -1
      for not known.
  """

  input_shape: tuple[int, ...]
  num_classes: int
  value_range: tuple[float, float]
  multilabel: bool = False

  def __post_init__(self) -> None:
    """Refuses a spec that no record could meet."""
    if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
      raise UserError(
        f"input_shape must be (height, width, channels) or (features,), not {self.input_shape}"
      )
    if self.num_classes < 1:
      raise UserError(f"num_classes must be at least 1, not {self.num_classes}")
    if not self.value_range[0] < self.value_range[1]:
      raise UserError(f"value_range must be (low, high) with low < high, not {self.value_range}")

  def no_labels(self, *shape: int) -> np.ndarray:
    """Labels of padding: int32[*shape], or float32[*shape, num_classes] if multilabel."""
    if self.multilabel:
      return np.zeros((*shape, self.num_classes), np.float32)
    return np.zeros(shape, np.int32)

  def label_problem(self, label: np.ndarray) -> str | None:
    """What is wrong with one label, or None."""
    if self.multilabel:
      if label.shape != (self.num_classes,) or label.dtype.kind not in "iuf":
        return f"the label must be {self.num_classes} numbers, not {label.dtype} of {label.shape}"
      return None if np.isin(label, (0, 1, -1)).all() else "a label is neither 0, 1 nor -1"
    if label.shape != () or label.dtype.kind not in "ui":
      return f"the label must be one integer, not {label.dtype} of shape {label.shape}"
    if not 0 <= label < self.num_classes:
      return f"label {label} is outside 0..{self.num_classes - 1}"
    return None

  def good_labels(self, labels: np.ndarray) -> np.ndarray:
    """bool[n], which of n stacked labels have nothing wrong in their values."""
    if self.multilabel:
      return np.asarray(np.isin(labels, (0, 1, -1)).all(axis=1))
    return np.asarray((labels >= 0) & (labels < self.num_classes))


def check_records(source: Source, spec: RecordSpec, *, show: bool = True) -> None:
  """Reads every record and refuses the first malformed one.

  For public data, or where the owner of private data asks for it: on private data the message,
  and the mere fact of a crash, tells of a record.

  Args:
    source: the records.
    spec: what they must look like.
    show: whether the message may say what is wrong, and so what the record holds.

  Raises:
    ValueError: names the first bad record and, if `show`, what is wrong with it.
  """
  for start in range(0, len(source), _CHECK_CHUNK):
    indices = np.arange(start, min(start + _CHECK_CHUNK, len(source)))
    *_, problems = read_records(source, indices, spec)
    if problems:
      index = min(problems)
      raise UserError(complaint(source, index, problems[index], show=show))


def complaint(source: Source, index: int, problem: str, *, show: bool) -> str:
  """An error message that names a record; what is wrong with it only if that may be shown."""
  if show:
    return f"record {index} of {source.info.name}: {problem}"
  return (
    f"record {index} of {source.info.name} is malformed, or of no unit; of private data it is not"
    " said how: without data.strict, private/bad_records.json of a run does."
  )


def read_records(
  source: Source, indices: np.ndarray, spec: RecordSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, str]]:
  """Reads records: inputs [n, *input_shape], labels [n, ...], bool[n] and what is wrong with which.

  A record that cannot be used is False in the third, and all zeros in the others.
  """
  gathered = source.gather(indices)
  dtype = source.info.dtype
  images = aligned_empty((len(indices), *spec.input_shape), dtype)
  labels, usable = spec.no_labels(len(indices)), np.ones(len(indices), bool)
  problems: dict[int, str] = {}
  if isinstance(gathered, dict):
    alike = gathered["label"].shape == labels.shape and gathered["inputs"].shape == images.shape
    good = alike and spec.good_labels(gathered["label"]).all()
    if good and _finite(gathered["inputs"]).all():
      return (
        gathered["inputs"].astype(dtype, copy=False), gathered["label"].astype(labels.dtype),
        usable, {},
      )  # fmt: skip
    gathered = [
      {"inputs": image, "label": label}
      for image, label in zip(gathered["inputs"], gathered["label"], strict=True)
    ]
  with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
    for row, (index, record) in enumerate(zip(indices, gathered, strict=True)):
      problem = _problem(record, spec, dtype)
      if problem is not None:
        problems[int(index)] = problem
      if problem is not None or isinstance(record, RecordError):
        usable[row], images[row] = False, 0
      else:
        images[row], labels[row] = record["inputs"], record["label"]
  return images, labels, usable, problems


def _finite(inputs: np.ndarray) -> np.ndarray:
  """bool[n], which of n inputs hold finite numbers alone."""
  if inputs.dtype.kind in "iub":
    return np.ones(len(inputs), bool)
  return np.asarray(np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim))))


def _problem(record: Record | RecordError, spec: RecordSpec, dtype: np.dtype) -> str | None:
  """What is wrong with one record, or None."""
  if isinstance(record, RecordError):
    return None if isinstance(record, Unlabelled) else str(record)
  image = np.asarray(record["inputs"])
  problem = spec.label_problem(np.asarray(record["label"]))
  if problem is not None:
    return problem
  if image.shape != tuple(spec.input_shape):
    return f"the image has shape {image.shape}, not {tuple(spec.input_shape)}"
  numeric = image.dtype.kind in "uif" and np.can_cast(image.dtype, dtype, "same_kind")
  if not numeric and image.dtype != dtype:
    return f"the image has dtype {image.dtype}, not {dtype}"
  if not _finite(image.astype(dtype, copy=False)[None])[0]:
    return "the inputs hold numbers that are not finite"
  return None


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An array, not yet filled, at a multiple of 64 bytes: jax on a CPU uses it without a copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)
