"""Private selection: the best of a random number of private runs.

Training several times and keeping the best reveals more than one run does. If the
number of runs is itself random, the cost is small and known (Papernot and Steinke
2021, arXiv:2110.03620). The score by which the best is chosen must be part of what
each run releases, or be computed on public data.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import optimize

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting import accountants, tails
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import draws

_MAX_RUNS = 10**6


@dataclasses.dataclass(frozen=True)
class Selection:
  """How many runs there are: a random number, drawn before any of them.

  Attributes:
    mean_runs: the expected number of runs, at least 1.
    shape: of the truncated negative binomial distribution: 1 is geometric, 0
      logarithmic; infinity is Poisson. The number of runs may then be 0: what is
      released must be something that does not depend on the data.
  """

  mean_runs: float
  shape: float = 1.0

  def __post_init__(self) -> None:
    mean_runs = checks.positive("mean_runs", self.mean_runs)
    if mean_runs < 1:
      raise UserError(f"mean_runs is {self.mean_runs!r}; give at least 1")
    shape = self.shape
    if not (isinstance(shape, float) and math.isinf(shape) and shape > 0):
      shape = checks.non_negative("shape", shape)
    object.__setattr__(self, "mean_runs", mean_runs)
    object.__setattr__(self, "shape", shape)

  def event(self, mechanism: Mechanism) -> dp_event.RepeatAndSelectDpEvent:
    """Returns the event of releasing the best of the runs of `mechanism`."""
    return dp_event.RepeatAndSelectDpEvent(mechanism.event(), self.mean_runs, self.shape)

  def draw(self, key: MasterKey) -> int:
    """Draws the number of runs: a function of the key alone, so it cannot be drawn again.

    Args:
      key: the master key of the whole selection.
    """
    bits = draws.step_generator(key, "number of runs", 0)
    if math.isinf(self.shape):
      return int(np.random.Generator(bits).poisson(self.mean_runs))
    # One uniform from the exponential's 64 bits: exp(-E) is uniform.
    tail = math.exp(-float(draws.exponentials(bits, 1)[0]))
    return _inverse_survival(self.mean_runs, self.shape, tail)

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values; the shape of Poisson is the string "infinity"."""
    shape = "infinity" if math.isinf(self.shape) else self.shape
    return {"mean_runs": self.mean_runs, "shape": shape}

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "Selection":
    """Builds a selection from what `to_dict` returned; an unknown key is a ValueError."""
    checks.only_keys("Selection", data, ("mean_runs", "shape"))
    shape = math.inf if data["shape"] == "infinity" else data["shape"]
    return cls(data["mean_runs"], shape)


def account_selection(
  mechanism: Mechanism, selection: Selection, delta: float
) -> accountants.Accounted:
  """Returns the epsilon of releasing the best of a random number of runs.

  Args:
    mechanism: one run, its score included.
    selection: how many runs.
    delta: in (0, 1).

  Raises:
    ValueError: if RDP, the only accountant of selection, does not have the mechanism.
    tails.SamplerTailError: if the noise is too small for the sampler at this delta.

  Papernot and Steinke 2021, arXiv:2110.03620, theorems 2 and 6.
  """
  delta = checks.open_unit("delta", delta)
  check(mechanism)
  residual = tail_delta(mechanism, selection)
  usable = tails.usable_delta(delta, residual, mechanism.noise_multiplier)
  parts = ((selection.event(mechanism), 1),)
  found = accountants.account_parts(parts, relation(mechanism), ("rdp",), "auto", usable)
  reason = f"the best of {selection.mean_runs:g} runs on average; {found.reason}"
  return dataclasses.replace(found, delta=delta, tail_delta=residual, reason=reason)


def check(mechanism: Mechanism) -> None:
  """Raises ValueError if selection over `mechanism` cannot be accounted."""
  if "rdp" not in mechanism.row.accountants:
    raise UserError(
      f"selection is accounted by RDP, which has no event for {mechanism.sampling.name} under"
      f" {mechanism.adjacency}; nearest that can: poisson under zero_out"
    )


def relation(mechanism: Mechanism) -> NeighboringRelation:
  """Returns dp-accounting's neighbouring relation for selection over `mechanism`."""
  return mechanism.row.relation


def tail_delta(mechanism: Mechanism, selection: Selection) -> float:
  """Returns what the finite range of the sampler costs over the expected number of runs."""
  return min(1.0, selection.mean_runs * mechanism.tail_delta())


def _inverse_survival(mean: float, shape: float, tail: float) -> int:
  """Returns the smallest k with P(K > k) <= tail."""
  if mean == 1:
    return 1
  gamma = _gamma(mean, shape)
  # P(K = 1), then P(k + 1) / P(k) = (1 - gamma) (k + shape) / (k + 1).
  if shape == 0:
    probability = (1 - gamma) / -math.log(gamma)
  else:
    probability = shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
  remaining, runs = 1.0 - probability, 1
  while remaining > tail and runs < _MAX_RUNS:
    probability *= (1 - gamma) * (runs + shape) / (runs + 1)
    remaining -= probability
    runs += 1
  return runs


def _gamma(mean: float, shape: float) -> float:
  """Returns the parameter of a truncated negative binomial with this mean.

  Papernot and Steinke 2021, arXiv:2110.03620, definition 1.
  """

  def mean_of(log_gamma: float) -> float:
    gamma = math.exp(log_gamma)
    if shape == 0:
      return (1 - 1 / gamma) / log_gamma
    return shape * (1 / gamma - 1) / -math.expm1(shape * log_gamma)

  lowest = math.log(1e-12)
  return math.exp(optimize.brentq(lambda x: mean_of(x) - mean, lowest, -1e-9, xtol=1e-14))
