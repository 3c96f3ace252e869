"""Code of other people that a configuration names, "package.module:function".

It is imported from where Python finds it, the current directory among these. What a run used is
recorded by name, arguments and the content of the module's file.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dp_jax.errors import UserError


class Arguments(dict[str, Any]):
  """Keyword arguments of other code in a configuration, which can be compared and hashed."""

  def __hash__(self) -> int:  # type: ignore[override]
    return hash(tuple(sorted((name, repr(value)) for name, value in self.items())))


def tuples(value: Any) -> Any:
  """Lists as tuples, as Python code has them, where JSON has lists."""
  if isinstance(value, Mapping):
    return {key: tuples(item) for key, item in value.items()}
  return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


def load_callable(name: str) -> Callable[..., Any]:
  """Imports what "package.module:function" names: a function or a class.

  Raises:
    UserError: if it is not of this form, cannot be imported, or is nothing to call.
  """
  module, function = _parts(name)
  found = getattr(_imported(name, module), function, None)
  if not callable(found):
    there = "has none of that name" if found is None else f"holds a {type(found).__name__} there"
    raise UserError(f"{name!r} must name a function or a class, but the module {module!r} {there}.")
  return cast("Callable[..., Any]", found)


def check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
  """Checks that `function` takes these keyword arguments, without calling it.

  Args:
    name: what messages call it.
    function: what is to be called.
    arguments: by name.

  Raises:
    UserError: if one is missing or unknown; names it, and what the function takes.
  """
  try:
    signature = signature_of(function)
  except (TypeError, ValueError):  # of some functions in C nothing is known
    return
  try:
    signature.bind(**arguments)
  except TypeError as error:
    raise UserError(
      f"{name}{signature} does not fit the arguments {', '.join(arguments) or '(none)'}: {error}."
    ) from error


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
  """Of a function, or of what a class is made with: a metaclass may hide that of `__init__`."""
  if not inspect.isclass(function) or function.__init__ is object.__init__:
    return inspect.signature(function)
  _, *parameters = inspect.signature(function.__init__).parameters.values()
  return inspect.Signature(parameters)


def described(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
  """What is recorded of code that was used: JSON values, in which any change to it shows.

  Args:
    name: "package.module:function".
    kwargs: what it is called with.

  Returns:
    "name", "kwargs", and "sha256" of the file of the module; not of what that imports.

  Raises:
    UserError: if the module has no file, or an argument is no JSON value.
  """
  file = getattr(_imported(name, _parts(name)[0]), "__file__", None)
  if file is None:
    raise UserError(f"{name!r} is in no file, so that what it does cannot be recorded.")
  try:
    plain = json.loads(json.dumps(dict(kwargs), allow_nan=False))
  except (TypeError, ValueError) as error:
    raise UserError(f"the kwargs of {name!r} must be JSON values: {error}.") from error
  return {
    "name": name,
    "kwargs": plain,
    "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
  }


def _parts(name: str) -> tuple[str, str]:
  module, _, function = name.partition(":")
  if not function.isidentifier() or not all(map(str.isidentifier, module.split("."))):
    raise UserError(f"{name!r} is not of the form package.module:function.")
  return module, function


def _imported(name: str, module: str) -> ModuleType:
  here = os.getcwd()
  if here not in sys.path and "" not in sys.path:  # the command `dp-jax` starts without it
    sys.path.append(here)
  try:
    return importlib.import_module(module)
  except Exception as error:
    # Another exception may quote what a module reads while it is imported.
    told = f": {error}" if isinstance(error, ImportError | SyntaxError) else ""
    raise UserError(
      f"{name!r} cannot be imported from {here} or where Python looks for modules:"
      f" {type(error).__name__}{told}."
    ) from error
