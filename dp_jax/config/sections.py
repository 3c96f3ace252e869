"""From nested dictionaries to the dataclasses of a configuration, with checks of keys and types."""

import dataclasses
import difflib
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dp_jax.errors import UserError
from dp_jax.files.code import Arguments, tuples

# Metadata of a field: None leaves it out, though it is never None itself.
LEFT_OUT = "left_out"


def plain(value: Any) -> Any:
  """The content of a configuration with lists for tuples, as it is read back from JSON."""
  if isinstance(value, dict):
    return {key: plain(item) for key, item in value.items()}
  return [plain(item) for item in value] if isinstance(value, tuple) else value


def keys_of(cls: Any) -> Any:
  """The dataclass whose fields are the keys of a section, as files and flags have them.

  It is the section itself; but one that keeps keys elsewhere has `keys()`, which gives such a
  dataclass, and `from_section(values, where)`, which is its `from_mapping`.
  """
  return cls.keys() if hasattr(cls, "keys") else cls


def refuse_unknown(values: Iterable[str], known: Iterable[str], where: str) -> None:
  """Refuses a key that is not known, with the one that may be meant."""
  known = list(known)
  for key in values:
    if key not in known:
      close = difflib.get_close_matches(key, known, 1)
      hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}."
      if "kwargs" in known:
        hint += f" Arguments of its own code are {where}.kwargs.{key}."
      raise UserError(f"unknown key {where}.{key}{hint}")


def from_mapping(cls: Any, values: Mapping[str, Any], where: str) -> Any:
  """Builds a dataclass, and those that it holds, from nested dictionaries.

  Args:
    cls: the dataclass; its fields are of the types that a configuration has.
    values: by name of the field; a field that is left out keeps its default.
    where: what the section is called in messages.

  Raises:
    ValueError: for an unknown key or a value of the wrong type; names the key.
  """
  hints = typing.get_type_hints(cls)
  refuse_unknown(values, hints, where)
  left_out = {each.name for each in dataclasses.fields(cls) if each.metadata.get(LEFT_OUT)}
  return cls(
    **{
      k: _convert(hints[k], v, f"{where}.{k}")
      for k, v in values.items()
      if not (v is None and k in left_out)
    }
  )


def _convert(hint: Any, value: Any, where: str) -> Any:
  """The value as the type that the field declares, or a ValueError that names the field."""
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise UserError(f"{where} must be a section, got {value!r}.")
    return getattr(hint, "from_section", functools.partial(from_mapping, hint))(value, where)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    if value is None:
      return None
    (hint,) = (arg for arg in args if arg is not types.NoneType)
    return _convert(hint, value, where)
  if origin is Literal:
    if value not in args:
      raise UserError(f"{where}={value!r} is not one of {', '.join(map(repr, args))}.")
    return value
  if origin in (Mapping, dict):
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
      raise UserError(f"{where} must be a dictionary from names to values, got {value!r}.")
    return Arguments({key: tuples(item) for key, item in value.items()})
  if origin is tuple:
    if not isinstance(value, list | tuple):
      raise UserError(f"{where} must be a sequence, got {value!r}.")
    return tuple(_convert(args[0], item, where) for item in value)
  return _convert_scalar(hint, value, where)


def _convert_scalar(hint: type, value: Any, where: str) -> Any:
  # Numbers of numpy are numbers; True and False are none.
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if hint is float and is_number:
    if not math.isfinite(value):
      raise UserError(f"{where} must be finite, got {value!r}.")
    return float(value)
  if hint is int and is_number and math.isfinite(value) and value == int(value):
    return int(value)
  if hint in (bool, str) and isinstance(value, hint):
    return value
  raise UserError(f"{where} must be {hint.__name__}, got {value!r}.")
