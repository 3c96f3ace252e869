"""Values of an evaluation, the uses of parameters that it meets, and who is told of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.errors import UserError


class UnsupportedError(UserError):
  """The ghost engine has no sound way to clip this loss; the vmap engine has."""


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a value that derives from parameters comes from.

  Attributes:
    roots: indices of the parameters that it depends on.
    structural: whether it is one parameter, rearranged or converted: then norms are the same.
    axes: for each axis of the value, the axis of the parameter, or None for one of size 1 that was
      added; None altogether where axes were merged or split.
    index: which slice of the parameter's first axis it is, inside an unrolled scan.
  """

  roots: frozenset[int]
  structural: bool = False
  axes: tuple[int | None, ...] | None = None
  index: int | None = None


@dataclasses.dataclass(frozen=True)
class Value:
  """A value of the evaluation.

  Attributes:
    array: its value; None where data is not followed.
    is_data: whether it depends on the unit.
    origin: set if it derives from parameters.
    exact: of a structural origin, the same rearrangement of the parameter in float32, without the
      conversions (or the like of what was given for it): sums over units pass back unrounded.
  """

  array: Any
  is_data: bool = False
  origin: Origin | None = None
  exact: Any = None

  @classmethod
  def parameter(cls, array: Any, index: int, exact: Any) -> "Value":
    """The parameter of this index, and its copy for `exact`."""
    if not is_real(array):
      raise UserError(
        f"params must be real floating-point arrays; leaf {index} is {array.dtype}. Keep other"
        " leaves outside of the parameters."
      )
    origin = Origin(frozenset({index}), True, tuple(range(jnp.ndim(array))))
    return cls(array, origin=origin, exact=exact)


@dataclasses.dataclass(frozen=True)
class Use:
  """One equation in which parameters meet data.

  Attributes:
    eqn: the equation.
    weights: (position among the operands, origin) of each parameter operand.
    data: positions of the data operands.
    constants: position -> value of the other operands.
    outputs: positions of the outputs that carry a gradient, and so a tap.
  """

  eqn: Any
  weights: tuple[tuple[int, Origin], ...]
  data: tuple[int, ...]
  constants: dict[int, Any]
  outputs: tuple[int, ...]

  @property
  def name(self) -> str:
    return self.eqn.primitive.name

  def operands(self, weights: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    """All operands of the equation, in order."""
    operands: list[Any] = [None] * len(self.eqn.invars)
    for (position, _), value in zip(self.weights, weights, strict=True):
      operands[position] = value
    for position, value in zip(self.data, data, strict=True):
      operands[position] = value
    for position, value in self.constants.items():
      operands[position] = value
    return operands

  def apply(self, weights: Sequence[Any], data: Sequence[Any]) -> list[jax.Array]:
    """The outputs that carry a gradient, as a function of the operands."""
    outputs = bind(self.eqn, self.operands(weights, data))
    return [outputs[position] for position in self.outputs]


class Visitor:
  """What happens at each use. The base class is blind to data: it follows parameters alone."""

  with_data = False

  def use(self, use: Use, weights: list[Value], data: list[Any]) -> list[Any] | None:
    """Called in order; returns the outputs, or None where data is not followed."""
    raise NotImplementedError


class Recorder(Visitor):
  """Collects the uses and their parameter operands, without any data."""

  def __init__(self) -> None:
    self.uses: list[Use] = []
    self.weights: list[list[Any]] = []
    self.exact: list[list[Any]] = []

  def use(self, use: Use, weights: list[Value], data: list[Any]) -> None:
    self.uses.append(use)
    self.weights.append([w.array for w in weights])
    self.exact.append([w.exact for w in weights])


class Tapper(Visitor):
  """Evaluates with data; adds taps to the outputs of uses and saves their data operands."""

  with_data = True

  def __init__(self, taps: Sequence[Sequence[Any]]):
    self._taps = iter(taps)
    self.saved: list[list[Any]] = []

  def use(self, use: Use, weights: list[Value], data: list[Any]) -> list[Any]:
    outputs = bind(use.eqn, use.operands([w.array for w in weights], data))
    for position, tap in zip(use.outputs, next(self._taps), strict=True):
      outputs[position] = outputs[position] + tap
    self.saved.append(data)
    return outputs


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
  """Evaluates one equation."""
  found = eqn.primitive.get_bind_params(eqn.params)
  # Older versions of jax return the functions of a call beside its parameters.
  functions, params = found if isinstance(found, tuple) else ((), found)
  outputs = eqn.primitive.bind(*functions, *operands, **params)
  return list(outputs) if eqn.primitive.multiple_results else [outputs]


def is_real(aval: Any) -> bool:
  return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
