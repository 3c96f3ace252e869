"""The target of a private run: what is promised, to whom, and against which neighbours."""

import dataclasses
from typing import Any, Literal, get_args

from dp_jax.errors import UserError
from dp_jax.files import checks

Adjacency = Literal["zero_out", "add_or_remove_one", "replace_one"]
AccountantName = Literal["auto", "pld", "rdp", "analytic_gaussian"]

ADJACENCIES: tuple[str, ...] = get_args(Adjacency)
ACCOUNTANTS: tuple[str, ...] = get_args(AccountantName)


@dataclasses.dataclass(frozen=True)
class PrivacySpec:
  """An (epsilon, delta) target.

  Attributes:
    epsilon: the bound on the privacy loss, above 0.
    delta: the probability left out of it, in (0, 1).
    unit: what one guarantee protects, in words ("record", "patient").
    adjacency: which data sets are neighbours. "zero_out" blanks one unit, so that
      the number of units is public; "add_or_remove_one" hides that number too;
      "replace_one" puts another unit in its place, and needs about twice the noise.
    accountant: which bound is computed; "auto" takes the tightest that the
      mechanism has and that fits the time and memory limits.

  Raises:
    ValueError: if a field is out of its range.
  """

  epsilon: float
  delta: float
  unit: str = "record"
  adjacency: Adjacency = "zero_out"
  accountant: AccountantName = "auto"

  def __post_init__(self) -> None:
    object.__setattr__(self, "epsilon", checks.positive("epsilon", self.epsilon))
    object.__setattr__(self, "delta", checks.open_unit("delta", self.delta))
    if not isinstance(self.unit, str) or not self.unit:
      raise UserError(f"unit is {self.unit!r}; name what is protected, such as 'record'")
    checks.one_of("adjacency", self.adjacency, ADJACENCIES)
    checks.one_of("accountant", self.accountant, ACCOUNTANTS)

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values; `from_dict` gives an equal spec back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "PrivacySpec":
    """Builds a spec from what `to_dict` returned; an unknown key is a ValueError."""
    checks.only_keys("PrivacySpec", data, tuple(f.name for f in dataclasses.fields(cls)))
    return cls(**data)
