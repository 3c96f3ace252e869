"""The closed table of mechanisms: which event, neighbours and accountants each row has.

A pair of scheme and adjacency that is not here is refused. dp-accounting's
accountants read `noise_multiplier` differently under REPLACE_ONE (PLD doubles the
sensitivity itself, RDP does not), so each row says what is handed to them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import dp_accounting
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation

from dp_jax.errors import UserError
from dp_jax.privacy.sampling import (
  FixedSize,
  FullBatch,
  Poisson,
  Sampling,
  Stream,
  TruncatedPoisson,
)

# (scheme, noise_multiplier) -> the event of one release.
EventOf = Callable[[Any, float], dp_accounting.DpEvent]


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table.

  Attributes:
    scheme: the sampling scheme's name.
    adjacency: the neighbours.
    release: the event of one release, given the scheme and the noise multiplier.
    relation: dp-accounting's neighbouring relation for that event.
    accountants: those that can compose it; the first is the default.
    sensitivity_factor: by how many clip norms the sums of neighbours can differ.
  """

  scheme: str
  adjacency: str
  release: EventOf
  relation: NeighboringRelation
  accountants: tuple[str, ...]
  sensitivity_factor: float


def _gaussian(sampling: Sampling, noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_accounting.GaussianDpEvent(noise_multiplier)


def _gaussian_of_twice(sampling: Sampling, noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_accounting.GaussianDpEvent(noise_multiplier / 2)


def _poisson(sampling: Sampling, noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_accounting.PoissonSampledDpEvent(
    sampling.sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
  )


def _truncated(sampling: TruncatedPoisson, noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_event.TruncatedSubsampledGaussianDpEvent(
    sampling.num_units, sampling.rate, sampling.cap, noise_multiplier
  )


def _fixed_size(sampling: FixedSize, noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_accounting.SampledWithoutReplacementDpEvent(
    sampling.num_units,
    sampling.expected_batch_size,
    dp_accounting.GaussianDpEvent(noise_multiplier / 2),
  )


_ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
_GAUSSIAN_ACCOUNTANTS = ("analytic_gaussian", "pld", "rdp")

ROWS: tuple[Row, ...] = (
  Row("full_batch", "zero_out", _gaussian, _ADD_REMOVE, _GAUSSIAN_ACCOUNTANTS, 1.0),
  Row("full_batch", "add_or_remove_one", _gaussian, _ADD_REMOVE, _GAUSSIAN_ACCOUNTANTS, 1.0),
  Row("full_batch", "replace_one", _gaussian_of_twice, _ADD_REMOVE, _GAUSSIAN_ACCOUNTANTS, 2.0),
  Row("poisson", "zero_out", _poisson, _ADD_REMOVE, ("pld", "rdp"), 1.0),
  Row("poisson", "add_or_remove_one", _poisson, _ADD_REMOVE, ("pld", "rdp"), 1.0),
  Row("poisson", "replace_one", _poisson, _REPLACE_ONE, ("pld",), 2.0),
  Row("truncated_poisson", "zero_out", _truncated, _REPLACE_SPECIAL, ("pld",), 1.0),
  Row("fixed_size", "replace_one", _fixed_size, _REPLACE_ONE, ("rdp",), 2.0),
  Row("stream", "zero_out", _gaussian, _ADD_REMOVE, _GAUSSIAN_ACCOUNTANTS, 1.0),
  Row("stream", "replace_one", _gaussian_of_twice, _ADD_REMOVE, _GAUSSIAN_ACCOUNTANTS, 2.0),
)


def find_row(sampling: Sampling, adjacency: str, accountant: str = "auto") -> Row:
  """Returns the row of a scheme under an adjacency.

  Args:
    sampling: the scheme.
    adjacency: the neighbours.
    accountant: "auto", or one that the row must have.

  Raises:
    ValueError: if the table has no such row, or the row no such accountant; the
      message names the nearest that exists.
  """
  if not isinstance(sampling, FullBatch | Poisson | TruncatedPoisson | FixedSize | Stream):
    raise UserError(f"sampling is {sampling!r}; use one of {', '.join(r.scheme for r in ROWS)}")
  same_scheme = [row for row in ROWS if row.scheme == sampling.name]
  for row in same_scheme:
    if row.adjacency == adjacency:
      if accountant == "auto" or accountant in row.accountants:
        return row
      raise UserError(
        f"accountant {accountant!r} cannot compose {sampling.name} under {adjacency};"
        f" nearest that can: {row.accountants[0]!r}"
      )
  nearest = same_scheme[0]
  raise UserError(
    f"sampling {sampling.name} has no accounting under adjacency {adjacency!r};"
    f" nearest row: {nearest.scheme} under {nearest.adjacency!r} by {nearest.accountants[0]}"
  )


def releases(sampling: Sampling, steps: int) -> int:
  """Returns how many releases `steps` steps compose to: for a stream, passes over the data."""
  return sampling.epochs(steps) if isinstance(sampling, Stream) else steps
