"""What a compute budget buys: the noise of each batch size at one guarantee.

With the units that may be processed fixed, a larger batch means fewer steps. Its noise multiplier
is larger, but the noise on the mean, noise_multiplier / expected_batch_size, is smaller: that is
why large batches win under privacy (Kurakin et al. 2022, arXiv:2201.12328, section 3.4).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import Poisson
from dp_jax.privacy.spec import PrivacySpec


@dataclasses.dataclass(frozen=True)
class PlanRow:
  """One batch size within the budget.

  Attributes:
    expected_batch_size: units a step, on average.
    steps: steps that the budget allows.
    noise_multiplier: the least that meets the target.
    noise_per_unit: noise_multiplier / expected_batch_size, the standard deviation of the noise on
      the mean gradient in clip norms.
    epsilon: recomputed at that noise.
    accountant: that computed it.
  """

  expected_batch_size: float
  steps: int
  noise_multiplier: float
  noise_per_unit: float
  epsilon: float
  accountant: str

  def to_dict(self) -> dict[str, Any]:
    """The fields as JSON values."""
    return dataclasses.asdict(self)


def default_batch_sizes(num_units: int, budget: float) -> list[int]:
  """Powers of two from 64 (or a 1/1024 of the units) up to the units or the whole budget."""
  most = min(num_units, math.floor(budget))
  least = max(1, min(most, max(64, num_units // 1024)))
  sizes = [2**k for k in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1)]
  return [*sizes, *([most] if not sizes or sizes[-1] != most else [])]


def plan(
  spec: PrivacySpec, num_units: int, budget: float, batch_sizes: Sequence[int] | None = None
) -> Iterator[PlanRow]:
  """Yields a row for each batch size, under Poisson sampling, as they are computed.

  Args:
    spec: the target.
    num_units: N.
    budget: units processed over the whole run: epochs x N, or steps x batch.
    batch_sizes: those to tabulate; None takes powers of two.

  Raises:
    ValueError: if a number is out of range, or a batch size does not fit the data or the budget.
  """
  num_units = checks.integer("num_units", num_units)
  budget = checks.positive("budget", budget)
  sizes = default_batch_sizes(num_units, budget) if batch_sizes is None else list(batch_sizes)
  for size in sizes:
    if not 1 <= size <= min(num_units, budget):
      raise UserError(
        f"batch size {size} is outside 1 to {min(num_units, math.floor(budget))}, the number of"
        " units or the whole budget"
      )
  for size in sizes:
    mechanism = _mechanism(spec, num_units, size, max(1, round(budget / size)))
    accounted = mechanism.account(spec.delta)
    yield PlanRow(
      float(size),
      mechanism.steps,
      mechanism.noise_multiplier,
      mechanism.noise_multiplier / size,
      accounted.epsilon,
      accounted.accountant,
    )


def _mechanism(spec: PrivacySpec, num_units: int, size: int, steps: int) -> Mechanism:
  return calibrate(spec, Poisson(size / num_units), steps, declared_batch_size=float(size))
