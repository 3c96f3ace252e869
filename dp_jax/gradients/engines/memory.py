"""How many units fit in memory at a time, as XLA's memory analysis says before anything runs."""

import bisect
import math
from collections.abc import Callable
from typing import Any

import jax

from dp_jax.errors import UserError


def temporary_bytes(function: Callable[..., Any], *args: Any) -> float:
  """The temporary memory of a function in bytes; infinite if it is too much to compile.

  Args:
    function: what to compile.
    *args: trees of arrays, or of their shapes.

  Raises:
    ValueError: if the backend gives no analysis.
  """
  try:
    compiled = jax.jit(function).lower(*args).compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return math.inf
  analysis = compiled.memory_analysis()
  if analysis is None:
    raise UserError(
      f"the backend {jax.default_backend()!r} gives no memory analysis, which microbatch_size"
      " 'auto' needs: give a number."
    )
  return analysis.temp_size_in_bytes


def largest_microbatch(bytes_of: Callable[[int], float], num_units: int, budget: float) -> int:
  """The most units that fit: all of them, or else a power of two.

  Args:
    bytes_of: the memory of so many units at a time; does not fall with their number.
    num_units: of the batch, at least 1.
    budget: bytes.

  Raises:
    ValueError: if one unit does not fit.
  """
  if bytes_of(num_units) <= budget:
    return num_units
  exponents = range(math.ceil(math.log2(num_units)))
  fitting = bisect.bisect_left(exponents, True, key=lambda e: bytes_of(2**e) > budget)
  if fitting == 0:
    raise UserError(
      f"one unit takes {bytes_of(1):,.0f} bytes of temporary memory, more than memory_budget="
      f"{budget:,.0f}: raise the budget, use engine 'ghost' or train fewer parameters."
    )
  return 2 ** exponents[fitting - 1]
