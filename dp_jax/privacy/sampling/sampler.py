"""The sampler of a run: the draws of its scheme, for the steps that were planned and no other."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling.draws import Indices, step_generator
from dp_jax.privacy.sampling.scheme import Scheme

_MAX_UNITS = 2**53


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws the units of each step.

  Attributes:
    num_units: N.
    indices: step -> int64[n], sorted, without repeats, in [0, N). The same
      step gives the same indices whenever it is asked for. A ValueError for a
      step that is no whole number from 0 to one less than the planned steps.
  """

  num_units: int
  indices: Callable[[int], Indices]


def make_sampler(sampling: Scheme, key: MasterKey, num_units: int, steps: int) -> Sampler:
  """Returns the sampler of a scheme, for so many steps.

  Args:
    sampling: the scheme.
    key: the master key; each step uses `key.derive("sampling", step, 16)`.
    num_units: N, the number of units in the data.
    steps: how many are accounted for. Steps are numbered from 0; the sampler refuses
      those beyond, under every scheme.

  Raises:
    ValueError: if N or steps is not positive, or N not the one that the scheme was
      accounted with.
  """
  num_units, steps = checks.integer("num_units", num_units), checks.integer("steps", steps)
  if num_units > _MAX_UNITS:
    raise UserError(f"num_units is {num_units}, more than 2^53; split the data")
  declared = getattr(sampling, "num_units", num_units)
  if declared != num_units:
    raise UserError(
      f"the data has {num_units} units, but the mechanism was accounted for {declared};"
      " calibrate it again with the true number"
    )
  if not isinstance(sampling, Scheme):
    raise UserError(f"there is no sampler for {sampling!r}; use one of the sampling schemes")

  def indices(step: int) -> Indices:
    step = _planned(step, steps)
    return sampling.draw(lambda: step_generator(key, "sampling", step), num_units, step)

  return Sampler(num_units, indices)


def _planned(step: Any, steps: int) -> int:
  """Returns a step of the plan as an int, or raises ValueError."""
  if isinstance(step, numbers.Integral) and int(step) >= steps:
    raise UserError(
      f"step is {step!r}, beyond the {steps} planned, which are 0 to {steps - 1}: calibrate a"
      " mechanism for more steps before the first, or go on with another mechanism that has a key"
      " and a ledger entry of its own"
    )
  return checks.integer("step", step, minimum=0)
