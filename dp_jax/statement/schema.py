"""Checks privacy.json against its schema: the keywords that this schema uses, and no others."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from dp_jax.privacy.sampling.schemes import names

_TYPES = {
  "object": lambda v: isinstance(v, dict),
  "array": lambda v: isinstance(v, list),
  "string": lambda v: isinstance(v, str),
  "boolean": lambda v: isinstance(v, bool),
  "null": lambda v: v is None,
  "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
  "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v),
}

_BOUNDS = {
  "minimum": (lambda value, bound: value >= bound, "at least"),
  "maximum": (lambda value, bound: value <= bound, "at most"),
  "exclusiveMinimum": (lambda value, bound: value > bound, "above"),
}

_ANNOTATIONS = {"$schema", "$defs", "title", "description"}
_HANDLED = {
  "$ref",
  "anyOf",
  "const",
  "enum",
  "type",
  "required",
  "properties",
  "additionalProperties",
  "minItems",
  "items",
  "minLength",
  "pattern",
  *_BOUNDS,
}


@functools.cache
def load() -> dict[str, Any]:
  """The JSON schema (draft 2020-12) of privacy.json, with the schemes that there are."""
  text = resources.files("dp_jax.statement").joinpath("privacy.schema.json").read_text("utf-8")
  schema = json.loads(text)
  schema["properties"]["sampling"] = {"enum": list(names())}
  return schema


def problems(record: Mapping[str, Any]) -> list[str]:
  """What in `record` is not as the schema asks: one line each, with the path; empty if valid."""
  return list(_check(dict(record), load(), "privacy.json"))


def _check(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
  unknown = set(schema) - _HANDLED - _ANNOTATIONS
  if unknown:
    raise RuntimeError(f"the schema uses {sorted(unknown)}, which this checker does not know")
  if "$ref" in schema:
    yield from _check(value, load()["$defs"][schema["$ref"].removeprefix("#/$defs/")], path)
  if "anyOf" in schema:
    branches = [list(_check(value, branch, path)) for branch in schema["anyOf"]]
    if all(branches):
      yield branches[0][0]
  if "const" in schema and not _equal(value, schema["const"]):
    yield f"{path} is {value!r}; it must be {schema['const']!r}"
  if "enum" in schema and value not in schema["enum"]:
    yield f"{path} is {value!r}; it must be one of {', '.join(map(str, schema['enum']))}"
  if "type" in schema and not _TYPES[schema["type"]](value):
    yield f"{path} is {value!r}; it must be of type {schema['type']}"
  elif isinstance(value, dict):
    yield from _check_object(value, schema, path)
  elif isinstance(value, list):
    yield from _check_array(value, schema, path)
  elif isinstance(value, str):
    yield from _check_string(value, schema, path)
  elif _TYPES["number"](value):
    for keyword, (holds, words) in _BOUNDS.items():
      if keyword in schema and not holds(value, schema[keyword]):
        yield f"{path} is {value!r}; it must be {words} {schema[keyword]}"


def _check_object(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
  for name in schema.get("required", ()):
    if name not in value:
      yield f"{path} lacks {name}"
  named = schema.get("properties", {})
  others = schema.get("additionalProperties", True)
  for name, item in value.items():
    if name in named:
      yield from _check(item, named[name], f"{path}.{name}")
    elif others is False:
      yield f"{path} has {name!r}, which the schema does not know"
    elif isinstance(others, dict):
      yield from _check(item, others, f"{path}.{name}")


def _check_array(value: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
  if len(value) < schema.get("minItems", 0):
    yield f"{path} is too short; it needs at least {schema['minItems']}"
  if "items" in schema:
    for i, item in enumerate(value):
      yield from _check(item, schema["items"], f"{path}[{i}]")


def _check_string(value: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
  if len(value) < schema.get("minLength", 0):
    yield f"{path} is empty"
  if "pattern" in schema and not re.search(schema["pattern"], value):
    yield f"{path} is {value!r}; it must match {schema['pattern']}"


def _equal(value: Any, wanted: Any) -> bool:
  """JSON equality: true is not 1."""
  return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)
