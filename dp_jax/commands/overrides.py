"""What flags of a configuration can say beyond what ml_collections reads.

`--config.section.key=none` unsets a key that a file sets, `--config.data.features=age,bmi` names
two columns, and `--config.model.kwargs.depth=3` sets an argument that no file needs to have.
"""

import ast
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from dp_jax.config.sections import LEFT_OUT, keys_of
from dp_jax.errors import UserError

UNSET = "unset_key"
SET = "set_key"
_PREFIX = "config."


def rewrite(argv: Sequence[str], kinds: Sequence[Any]) -> list[str]:
  """The arguments with such overrides in the form that the parser of flags reads.

  Args:
    argv: of a command.
    kinds: the dataclasses that its --config may be of.

  Raises:
    ValueError: if a key that cannot be left out is set to none.
  """
  result: list[str] = []
  rest = list(argv)
  while rest:
    argument = rest.pop(0)
    name, equals, value = argument.partition("=")
    key = name.lstrip("-").removeprefix(_PREFIX)
    hint = None
    if name.startswith("-") and name.lstrip("-").startswith(_PREFIX):
      hint = next((each for each in (_hint(kind, key) for kind in kinds) if each), None)
    if hint is not None and hint.is_argument and equals:
      result = [each for each in result if not each.startswith(f"--{SET}={key}=")]
      result.append(f"--{SET}={key}={value}")
      continue
    if hint is None or (not equals and (hint.is_switch or not rest)):
      result.append(argument)
      continue
    if not equals:
      value = rest.pop(0)
    # The last one of several for a key counts.
    result = [each for each in result if each != f"--{UNSET}={key}"]
    if value.strip().lower() == "none" and not hint.says_none:
      if not hint.optional:
        raise UserError(f"--{_PREFIX}{key}=none: this key cannot be unset; give it a value.")
      result.append(f"--{UNSET}={key}")
    else:
      result.append(f"--{_PREFIX}{key}={_names(value) if hint.is_names else value}")
  return result


def unset(content: dict[str, Any], keys: Sequence[str]) -> None:
  """Sets these keys of a configuration to None, in place."""
  for key in keys:
    *sections, name = key.split(".")
    place = content
    for section in sections:
      place = place[section]
    place[name] = None


def set_arguments(content: dict[str, Any], arguments: Sequence[str]) -> None:
  """Sets "section.kwargs.name=value" in a configuration, in place; "none" unsets it.

  A value is what Python reads it as, or else a text.
  """
  for argument in arguments:
    key, _, text = argument.partition("=")
    section, kwargs, name = key.split(".")
    place = content[section].get(kwargs) or {}
    content[section][kwargs] = place
    place.pop(name, None)
    if text.strip().lower() == "none":
      continue
    try:
      place[name] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      place[name] = text


class _Key(typing.NamedTuple):
  """What a key takes.

  Attributes:
    optional: whether it may be left out.
    is_names: whether it is a tuple of strings.
    says_none: whether "none" is a value of it.
    is_switch: whether it needs no value.
    is_argument: whether it is one of the arguments of other code: section.kwargs.name.
  """

  optional: bool
  is_names: bool
  says_none: bool
  is_switch: bool
  is_argument: bool = False


def _hint(kind: Any, key: str) -> _Key | None:
  """What a dotted key of a configuration takes; None where there is no such key."""
  *sections, name = key.split(".")
  if sections[1:] == ["kwargs"]:
    known = _hint(kind, ".".join(sections))
    return known and _Key(True, False, False, False, True)
  for section in sections:
    kind = typing.get_type_hints(kind).get(section)
    if not dataclasses.is_dataclass(kind):
      return None
  kind = keys_of(kind)
  hint = typing.get_type_hints(kind).get(name)
  if hint is None or dataclasses.is_dataclass(hint):
    return None
  (field,) = (each for each in dataclasses.fields(kind) if each.name == name)
  several = typing.get_origin(hint) in (types.UnionType, typing.Union)
  arms = typing.get_args(hint) if several else (hint,)
  optional = types.NoneType in arms or bool(field.metadata.get(LEFT_OUT))
  says_none = any("none" in typing.get_args(arm) for arm in arms) or hint is str
  return _Key(optional, tuple[str, ...] in arms, says_none, bool in arms)


def _names(value: str) -> str:
  """ "a,b" as the tuple ("a", "b"); what is written as a tuple or in quotes stays as it is."""
  if value.strip()[:1] in ("(", "[", "'", '"'):
    return value
  return repr(tuple(name.strip() for name in value.split(",")))
