"""The configurations that come with dp_jax, and files that stand beside a configuration."""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError

_FOLDER = "configs"


def beside(file: str, name: str) -> Callable[[], Any]:
  """`get_config` of another configuration in the folder of this one.

  Args:
    file: `__file__` of the one that asks.
    name: of the other, without ".py".

  Raises:
    ValueError: if there is none.
  """
  path = Path(file).with_name(f"{name}.py")
  spec = importlib.util.spec_from_file_location(f"dp_jax_config_{name}", path)
  if not path.is_file() or spec is None or spec.loader is None:
    raise UserError(f"there is no configuration {str(path)!r}.")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config  # type: ignore[no-any-return]


def located(argument: str) -> str:
  """A flag --config=FILE with the file where it is: here, or among those that come with dp_jax.

  Its folder and the current one are then places to import from, as `python -m dp_jax` has them.
  """
  name, equals, text = argument.partition("=")
  if name.lstrip("-") != "config" or not equals:
    return argument
  file = Path(text.partition(":")[0])
  if not file.is_file() and file.parts[:1] == (_FOLDER,):
    file = next((each for each in _shipped(file) if each.is_file()), file)
    text = str(file)
  for folder in (os.getcwd(), str(file.absolute().parent)):
    if folder not in sys.path:
      sys.path.append(folder)
  return f"{name}={text}"


def _shipped(file: Path) -> list[Path]:
  """Where "configs/NAME.py" may be: beside the package, or where an installer put it."""
  beside_package = Path(__file__).parents[2]
  share = Path("share") / "dp_jax" / file
  return [
    beside_package / file,
    Path(sysconfig.get_path("data")) / share,
    beside_package / share,  # of pip install --target
  ]
