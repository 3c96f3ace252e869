"""Subgroups of records, for evaluation: the values of a column, or bands between cut points."""

import itertools
from collections.abc import Sequence

import numpy as np

from dp_jax.errors import UserError

MISSING = "missing"


def bands(values: np.ndarray, cuts: Sequence[float], name: str = "column") -> np.ndarray:
  """The subgroup of each record, as text.

  Args:
    values: [n] numbers or strings; NaN and "" are the group "missing".
    cuts: ascending cut points; (40, 60) gives "below 40", "40 to 60" (60 not included) and "60 and
      above". Declared, never read off the values. None of them keeps the values as they are.
    name: of the column, for errors.

  Returns:
    [n] strings.

  Raises:
    ValueError: if the cut points do not ascend, or there are some and no value is a number.
  """
  if list(cuts) != sorted(set(cuts)):
    raise UserError(f"the cut points of {name!r} must ascend, not {tuple(cuts)}")
  if values.dtype.kind in "SUO":
    text = values.astype(str)
  else:
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    text = np.where(missing, "", values.astype(str))
  if cuts:
    text = _bands(text, cuts, name)
  return np.where(text == "", MISSING, text)


def to_numbers(text: np.ndarray) -> np.ndarray:
  """float64[n] of strings; NaN for what is no finite number, "" among them."""
  distinct, inverse = np.unique(text, return_inverse=True)
  numbers = np.full(len(distinct), np.nan)
  for i, value in enumerate(distinct):
    try:
      numbers[i] = float(value)
    except ValueError:
      continue
  return np.where(np.isfinite(numbers), numbers, np.nan)[inverse]


def _bands(text: np.ndarray, cuts: Sequence[float], name: str) -> np.ndarray:
  # One value that is no number is missing; a column of no numbers at all is a mistake.
  numbers = to_numbers(text)
  if len(numbers) and np.isnan(numbers).all():
    raise UserError(f"column {name!r} has cut points but holds no numbers")
  ends = [f"{cut:g}" for cut in cuts]
  between = [f"{low} to {high}" for low, high in itertools.pairwise(ends)]
  labels = np.array([f"below {ends[0]}", *between, f"{ends[-1]} and above"])
  return np.where(np.isnan(numbers), "", labels[np.digitize(numbers, np.asarray(cuts))])
