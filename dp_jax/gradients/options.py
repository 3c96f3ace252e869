"""Checks of the options of `clipped_grad`."""

import math
import sys
from typing import Any, Literal

import numpy as np

from dp_jax.errors import UserError

MicrobatchSize = int | Literal["auto"] | None


def is_number(value: Any) -> bool:
  """Whether it is a real number of Python or numpy; True and False are none."""
  return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def checked_microbatch_size(size: Any) -> MicrobatchSize:
  """A number of units, None, or "auto".

  Raises:
    ValueError: if it is neither.
  """
  if size is None:
    return None
  if isinstance(size, str) and size == "auto":
    return "auto"
  if isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1:
    return int(size)
  raise UserError(f"microbatch_size must be at least 1, None or 'auto', got {size!r}.")


def checked_budget(budget: Any) -> int:
  """Bytes; infinity is as many as there can be.

  Raises:
    ValueError: if it is no number, or negative.
  """
  if not is_number(budget) or not budget >= 0:
    raise UserError(f"memory_budget must be a number of bytes, at least 0, got {budget!r}.")
  return int(budget) if math.isfinite(budget) else sys.maxsize


def checked_flag(name: str, value: Any) -> bool:
  """A truth value.

  Raises:
    ValueError: if it is none.
  """
  if not isinstance(value, bool | np.bool_):
    raise UserError(f"{name} must be True or False, got {value!r}.")
  return bool(value)
