"""The sampling schemes: a new one is a file beside this one, and its line here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.sampling.fixed_size import FixedSize
from dp_jax.privacy.sampling.full_batch import FullBatch
from dp_jax.privacy.sampling.poisson import Poisson
from dp_jax.privacy.sampling.scheme import Row, Scheme
from dp_jax.privacy.sampling.stream import Stream
from dp_jax.privacy.sampling.truncated_poisson import TruncatedPoisson

SCHEMES: tuple[type[Scheme], ...] = (Poisson, FullBatch, TruncatedPoisson, FixedSize, Stream)


def names() -> tuple[str, ...]:
  """Of all schemes."""
  return tuple(scheme.name for scheme in SCHEMES)


def rows() -> tuple[Row, ...]:
  """Of all schemes: the closed table of what can be accounted for."""
  return tuple(row for scheme in SCHEMES for row in scheme.ROWS)


def scheme_of(name: Any) -> type[Scheme]:
  """The scheme of a name; a ValueError names those that there are."""
  checks.one_of("sampling", name, names())
  return next(scheme for scheme in SCHEMES if scheme.name == name)


def sampling_from_dict(data: Mapping[str, Any]) -> Scheme:
  """Builds a scheme from what its `to_dict` returned.

  Args:
    data: {"name": ..., and the scheme's fields}.

  Raises:
    ValueError: if the name or a key is unknown, or a value out of range.
  """
  scheme = scheme_of(data.get("name"))
  arguments = {key: value for key, value in data.items() if key != "name"}
  checks.only_keys(
    f"sampling {scheme.name}", arguments, tuple(f.name for f in dataclasses.fields(scheme))
  )
  return scheme(**arguments)


def find_row(sampling: Any, adjacency: str, accountant: str = "auto") -> Row:
  """`Scheme.row`, of what may be no scheme.

  A subclass of a scheme is another scheme: its draws need not be those that the rows account for.
  """
  if type(sampling) not in SCHEMES:
    raise UserError(f"sampling is {sampling!r}; use one of {', '.join(names())}")
  return sampling.row(adjacency, accountant)
