"""Checks of numbers that a user supplies: the message names the value and the fix."""

import math
import numbers
from typing import Any

from dp_jax.errors import UserError

_LARGEST_INTEGER = 2**53


def real(name: str, value: Any, fix: str) -> float:
  """Returns `value` as a finite float.

  Args:
    name: what the value is called, for the message.
    value: anything; numbers (numpy's included) pass, bools do not.
    fix: what to give instead, for the message.

  Raises:
    ValueError: if the value is a bool, not a real number, or not finite.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise UserError(f"{name} is {value!r}, which is not a number; {fix}")
  try:
    result = float(value)
  except OverflowError:  # a whole number that no double holds
    result = math.inf
  if not math.isfinite(result):
    raise UserError(f"{name} is {value!r}, which is not finite; {fix}")
  return result


def positive(name: str, value: Any) -> float:
  """Returns `value` as a finite float above zero, or raises ValueError."""
  fix = "give a number above 0"
  result = real(name, value, fix)
  if result <= 0:
    raise UserError(f"{name} is {value!r}, but it must be above 0; {fix}")
  return result


def non_negative(name: str, value: Any) -> float:
  """Returns `value` as a finite float of at least zero, or raises ValueError."""
  fix = "give 0 or a number above it"
  result = real(name, value, fix)
  if result < 0:
    raise UserError(f"{name} is {value!r}, but it must not be negative; {fix}")
  return result


def open_unit(name: str, value: Any) -> float:
  """Returns `value` as a float in (0, 1), or raises ValueError."""
  fix = "give a number strictly between 0 and 1"
  result = real(name, value, fix)
  if not 0 < result < 1:
    raise UserError(f"{name} is {value!r}, outside (0, 1); {fix}")
  return result


def rate(name: str, value: Any) -> float:
  """Returns `value` as a float in (0, 1], or raises ValueError."""
  fix = "give a probability above 0 and at most 1"
  result = real(name, value, fix)
  if not 0 < result <= 1:
    raise UserError(f"{name} is {value!r}, outside (0, 1]; {fix}")
  return result


def integer(name: str, value: Any, minimum: int = 1) -> int:
  """Returns `value` as an int from `minimum` to 2^53 (a double holds it), or raises ValueError."""
  fix = f"give a whole number of at least {minimum}"
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise UserError(f"{name} is {value!r}, which is not a whole number; {fix}")
  if value < minimum:
    raise UserError(f"{name} is {value!r}, but it must be at least {minimum}; {fix}")
  if int(value) > _LARGEST_INTEGER:
    raise UserError(f"{name} is above 2^53; give fewer")
  return int(value)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
  """Returns `value` if it is one of `choices`, or raises ValueError."""
  if value not in choices:
    raise UserError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
  return value


def only_keys(what: str, data: dict[str, Any], allowed: tuple[str, ...]) -> None:
  """Raises ValueError if `data` lacks one of `allowed` or has another key."""
  unknown = sorted(set(data) - set(allowed))
  missing = sorted(set(allowed) - set(data))
  if unknown or missing:
    raise UserError(
      f"{what} has unknown keys {unknown} and lacks {missing}; it takes exactly {list(allowed)}"
    )
