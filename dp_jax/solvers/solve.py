"""One call from features to a private head: plan, reserve in the ledger, release, solve."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from dp_jax.errors import UserError
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.shares import Part, calibrate_parts
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.feature_units import FeatureData
from dp_jax.solvers.head import Head, Preprocessing
from dp_jax.solvers.noised import Releases


class Method(Protocol):
  """A way to a head: LeastSquares, FeatureCovariance or Newton."""

  @property
  def preprocessing(self) -> Preprocessing:
    """Of the rows."""

  def parts(self) -> tuple[Part, ...]:
    """What it releases, with shares that add up to 1."""

  def solve(self, data: FeatureData, releases: Releases) -> Head:
    """Makes those releases, and no others, and returns the head."""


@dataclasses.dataclass(frozen=True)
class Solution:
  """A head and what it cost.

  Attributes:
    head: the head; a function of the noised releases and of public facts alone.
    mechanisms: what was released, by purpose.
    ledger: where they were entered.
  """

  head: Head
  mechanisms: Mapping[str, Mechanism]
  ledger: Ledger


def plan(
  method: Method, spec: PrivacySpec, declared_batch_size: float | None = None
) -> dict[str, Mechanism]:
  """The mechanisms of a method that together meet a target, by purpose.

  Args:
    method: with its shares of the budget.
    spec: the target.
    declared_batch_size: the public number of units where N is not public (add_or_remove_one).

  Raises:
    ValueError: if shares do not add up to 1 or the target cannot be met.
  """
  parts = method.parts()
  mechanisms = calibrate_parts(spec, parts, declared_batch_size)
  return {part.purpose: each for part, each in zip(parts, mechanisms, strict=True)}


def solve(
  data: FeatureData,
  method: Method,
  spec: PrivacySpec,
  *,
  key: MasterKey | None = None,
  ledger: Ledger | None = None,
) -> Solution:
  """Fits a private head.

  Formal guarantee: the head is (epsilon, delta)-DP for each unit of the data, under the adjacency
  of `spec`: it is a function of Gaussian releases alone, entered in the ledger before any is made,
  whose composition is at most the target.

  Args:
    data: the features; under add_or_remove_one its num_units must be declared, not counted.
    method: LeastSquares, FeatureCovariance or Newton.
    spec: the target.
    key: a fixed key for tests, whose results are not private; None draws one from the operating
      system. A key that served twice would put the same noise on two results.
    ledger: of these data; None keeps one in memory for this call.

  Raises:
    ValueError: if the target cannot be met, the ledger's budget does not allow it, the number of
      units is secret but was counted, or the key is no test key.
  """
  secret = spec.adjacency == "add_or_remove_one"
  if secret and not data.declared:
    raise UserError(
      "add_or_remove_one keeps the number of units secret: declare the data's num_units, the number"
      " to divide by, or use zero_out."
    )
  if key is not None and not key.is_test:
    raise UserError(
      "give no key: one is drawn for each call. A fixed one, for tests, must say is_test=True."
    )
  mechanisms = plan(method, spec, data.num_units if secret else None)
  ledger = Ledger() if ledger is None else ledger
  ledger.reserve_all(mechanisms, unit=spec.unit)
  head = method.solve(data, Releases(mechanisms, key or MasterKey.from_os()))
  return Solution(head, mechanisms, ledger)
