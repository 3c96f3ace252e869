"""A model as a pure function of flat dictionaries: {"head.kernel": array, ...}.

Everything above the models works on these dictionaries: their order is that of the sorted names,
which is also the order of leaves that the noise keys follow.
"""

import dataclasses
import re
from typing import Any

import jax
from flax import nnx

from dp_jax.errors import UserError

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
  """The structure of a module without its arrays.

  Attributes:
    graphdef: the static part of the module.
    variables: name -> its NNX variable, for the type and metadata; the value is not used.
    random: names of the random-number states, which are made anew from a key at each call.
  """

  graphdef: Any
  variables: dict[str, Any]
  random: tuple[str, ...]

  def is_param(self, name: str) -> bool:
    """Whether an array can be trained."""
    return issubclass(self.variables[name].type, nnx.Param)

  def bind(self, arrays: Arrays, key: jax.Array | None = None) -> nnx.Module:
    """The module with these arrays in it.

    Args:
      arrays: every variable that is not random-number state, by name.
      key: one typed key for dropout and the like; needed only where the module has such state.

    Raises:
      ValueError: if the module draws random numbers and no key is given.
    """
    flat = []
    for index, (name, variable) in enumerate(self.variables.items()):
      if name in self.random:
        value = self._random_value(name, index, key)
      else:
        value = arrays[name]
      flat.append((_path(name), variable.replace(value)))
    return nnx.merge(self.graphdef, nnx.from_flat_state(flat))

  def _random_value(self, name: str, index: int, key: jax.Array | None) -> jax.Array:
    if self.variables[name].type is nnx.RngCount:
      return jax.numpy.zeros((), jax.numpy.uint32)
    if key is None:
      raise UserError(f"the model draws random numbers at {name!r}, but no key was given.")
    return jax.random.fold_in(key, index)


def split(model: nnx.Module) -> tuple[FunctionalModel, Arrays]:
  """Takes a module apart into its structure and its arrays, by dotted name, sorted."""
  graphdef, state = nnx.split(model)
  flat = sorted((_name(path), variable) for path, variable in nnx.to_flat_state(state))
  variables = dict(flat)
  random = tuple(name for name, variable in flat if issubclass(variable.type, nnx.RngState))
  arrays = {name: variable.get_value() for name, variable in flat if name not in random}
  return FunctionalModel(graphdef, variables, random), arrays


def partition(model: Any, arrays: Arrays, trainable: str) -> tuple[Arrays, Arrays]:
  """Splits arrays into trained and frozen: trained are the parameters whose name matches.

  Args:
    model: the structure; of a module, only its `nnx.Param` variables can be trained.
    arrays: all arrays by name.
    trainable: a regular expression, searched in each dotted name (".*" trains all, "^head" a
      linear probe).

  Returns:
    (trained, frozen); together they are `arrays`.

  Raises:
    ValueError: if the expression is not valid or matches no parameter.
  """
  try:
    pattern = re.compile(trainable)
  except re.error as error:
    raise UserError(
      f"model.trainable={trainable!r} is not a regular expression: {error}."
    ) from error
  names = [name for name in arrays if model.is_param(name)]
  chosen = {name for name in names if pattern.search(name)}
  if not chosen:
    raise UserError(f"model.trainable={trainable!r} matches none of {', '.join(names)}.")
  trained = {name: value for name, value in arrays.items() if name in chosen}
  return trained, {name: value for name, value in arrays.items() if name not in chosen}


def changed_state(model: nnx.Module, arrays: Arrays) -> list[str]:
  """Names of variables of a bound module that no longer hold the arrays it was bound with."""
  flat = ((_name(path), value) for path, value in nnx.to_flat_state(nnx.state(model)))
  return [name for name, value in flat if name in arrays and value.get_value() is not arrays[name]]


def _name(path: tuple[Any, ...]) -> str:
  return ".".join(str(part) for part in path)


def _path(name: str) -> tuple[Any, ...]:
  return tuple(int(part) if part.isdigit() else part for part in name.split("."))
