"""Evaluates a jaxpr and follows which values derive from parameters alone.

Every value is one of three kinds: constant, derived from parameters, or dependent on the unit
(data). An equation that has both a parameter and a data operand is a *use* of the parameters:
its outputs get a tap, and count as data from there on. Nothing else combines the two, so no use
can be missed; a primitive that is not known is a use like any other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.ref import AbstractRef

from dp_jax.gradients.ghost.uses import Origin, UnsupportedError, Use, Value, Visitor, bind, is_real

# Calls that are looked into. Their bodies are what they compute; a custom derivative is not.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr",
            "checkpoint": "jaxpr", "core_call": "call_jaxpr"}  # fmt: skip
# Of one operand, and equal to it but for rounding or placement.
_IDENTITIES = ("convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "reshard",
               "sharding_constraint")  # fmt: skip
# Rearrangements, where they keep the number of entries.
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
# A longer scan that mixes parameters and data stays one equation.
MAX_UNROLL = 128


def evaluate(
  jaxpr: Any, consts: Sequence[Value], args: Sequence[Value], visitor: Visitor
) -> list[Value]:
  """Evaluates a jaxpr.

  Args:
    jaxpr: what to evaluate.
    consts: values of its constants.
    args: values of its inputs.
    visitor: told of each use.

  Returns:
    The outputs. Without data their arrays are None.
  """
  env: dict[Any, Value] = {}

  def read(atom: Any) -> Value:
    return Value(atom.val) if isinstance(atom, jex_core.Literal) else env[atom]

  env.update(zip(jaxpr.constvars, consts, strict=True))
  env.update(zip(jaxpr.invars, args, strict=True))
  for eqn in jaxpr.eqns:
    inputs = [read(atom) for atom in eqn.invars]
    outputs = _equation(eqn, inputs, visitor)
    env.update(zip(eqn.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Value], visitor: Visitor) -> list[Value]:
  from_params = [v for v in inputs if v.origin is not None]
  any_data = any(v.is_data for v in inputs)
  name = eqn.primitive.name
  if any(isinstance(var.aval, AbstractRef) for var in (*eqn.invars, *eqn.outvars)):
    # What is read from it later may have been written under another name: no use would be seen.
    raise UnsupportedError(f"the loss uses a mutable reference ({name!r})")
  if from_params and name in _INLINED:
    inner = eqn.params[_INLINED[name]]
    closed = hasattr(inner, "consts")
    consts = [Value(c) for c in inner.consts] if closed else []
    return evaluate(inner.jaxpr if closed else inner, consts, inputs, visitor)
  if from_params and any_data and name == "scan" and 0 < eqn.params["length"] <= MAX_UNROLL:
    return _scan(eqn, inputs, visitor)
  if from_params and any_data:
    _check_supported(eqn)
  if not from_params:
    if any_data and not visitor.with_data:
      return [Value(None, is_data=True) for _ in eqn.outvars]
    return [Value(x, is_data=any_data) for x in bind(eqn, [v.array for v in inputs])]
  if not any_data:
    arrays = bind(eqn, [v.array for v in inputs])
    return [
      _derive(eqn, inputs, array, var.aval) for array, var in zip(arrays, eqn.outvars, strict=True)
    ]
  return _use(eqn, inputs, visitor)


def _check_supported(eqn: Any) -> None:
  """Refuses uses that cannot be differentiated in the way that the engine does."""
  name = eqn.primitive.name
  if name == "while":
    raise UnsupportedError("a parameter meets data in a 'while' loop, which has no transpose")
  if any(_is_complex(var.aval) for var in (*eqn.invars, *eqn.outvars)):
    raise UnsupportedError(f"a parameter meets data in {name!r}, with complex numbers")


def _use(eqn: Any, inputs: list[Value], visitor: Visitor) -> list[Value]:
  weights = [(i, v) for i, v in enumerate(inputs) if v.origin is not None]
  data = [(i, v) for i, v in enumerate(inputs) if v.is_data]
  use = Use(
    eqn,
    tuple((i, v.origin) for i, v in weights if v.origin is not None),
    tuple(i for i, _ in data),
    {i: v.array for i, v in enumerate(inputs) if v.origin is None and not v.is_data},
    tuple(i for i, var in enumerate(eqn.outvars) if _is_inexact(var.aval)),
  )
  if not use.outputs:  # a comparison, say: no gradient passes
    if not visitor.with_data:
      return [Value(None, is_data=True) for _ in eqn.outvars]
    return [Value(x, is_data=True) for x in bind(eqn, [v.array for v in inputs])]
  outputs = visitor.use(use, [v for _, v in weights], [v.array for _, v in data])
  outputs = [None] * len(eqn.outvars) if outputs is None else outputs
  return [Value(x, is_data=True) for x in outputs]


def _derive(eqn: Any, inputs: list[Value], array: Any, out: Any) -> Value:
  """An output that depends on parameters and constants alone."""
  name = eqn.primitive.name
  if not _is_inexact(out) or name == "stop_gradient":
    return Value(array)  # integers and booleans carry no gradient either: a constant
  origins = [v.origin for v in inputs if v.origin is not None]
  first, exact = origins[0], inputs[0].exact
  if len(inputs) == 1 and first.structural and is_real(out):
    shape, axes = eqn.invars[0].aval.shape, first.axes
    if name in _IDENTITIES:
      return Value(array, origin=first, exact=exact)
    if name == "transpose":
      permuted = None if axes is None else tuple(axes[i] for i in eqn.params["permutation"])
      exact = exact.transpose(eqn.params["permutation"])
      return Value(array, origin=dataclasses.replace(first, axes=permuted), exact=exact)
    if name in _RESHAPES and _size(out) == _size(eqn.invars[0].aval):
      found = dataclasses.replace(first, axes=_reshaped(shape, axes, out.shape))
      return Value(array, origin=found, exact=exact.reshape(out.shape))
  return Value(array, origin=Origin(frozenset().union(*(o.roots for o in origins))))


def _reshaped(
  shape: tuple[int, ...], axes: tuple[int | None, ...] | None, new_shape: tuple[int, ...]
) -> tuple[int | None, ...] | None:
  """Axes after a reshape that only adds or drops axes of size 1; None after any other."""
  if axes is None or [d for d in shape if d != 1] != [d for d in new_shape if d != 1]:
    return None
  left = [axis for axis, d in zip(axes, shape, strict=True) if d != 1]
  return tuple(None if d == 1 else left.pop(0) for d in new_shape)


def _scan(eqn: Any, inputs: list[Value], visitor: Visitor) -> list[Value]:
  """Unrolls a scan, so that each iteration's slice of a stacked parameter is a use of its own."""
  params = eqn.params
  num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
  body = params["jaxpr"]
  consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
  xs = inputs[num_consts + num_carry :]
  stacked: list[list[Value]] = [[] for _ in eqn.outvars[num_carry:]]
  order = range(length - 1, -1, -1) if params["reverse"] else range(length)
  for i in order:
    args = [*consts, *carry, *(_slice(x, i) for x in xs)]
    outputs = evaluate(body.jaxpr, [Value(c) for c in body.consts], args, visitor)
    carry = outputs[:num_carry]
    for column, value in zip(stacked, outputs[num_carry:], strict=True):
      column.append(value)
  if params["reverse"]:
    stacked = [column[::-1] for column in stacked]
  return [*carry, *(_stack(column) for column in stacked)]


def _slice(value: Value, i: int) -> Value:
  array = None if value.array is None else value.array[i]
  origin = value.origin
  if origin is None:
    return Value(array, value.is_data)
  if origin.structural and origin.index is None and origin.axes and origin.axes[0] == 0:
    origin = dataclasses.replace(origin, axes=origin.axes[1:], index=i)
    return Value(array, origin=origin, exact=value.exact[i])
  return Value(array, origin=Origin(origin.roots))


def _stack(column: list[Value]) -> Value:
  is_data = any(v.is_data for v in column)
  roots = frozenset().union(*(v.origin.roots for v in column if v.origin is not None))
  if is_data and roots:
    # Stacking them would combine parameters and data without a use.
    raise UnsupportedError(
      "a scan collects an output that depends on the unit in some iterations and on parameters"
      " alone in others"
    )
  if any(v.array is None for v in column):
    return Value(None, is_data=True)
  array = jnp.stack([v.array for v in column])
  return Value(array, is_data, Origin(roots) if roots and not is_data else None)


def _is_inexact(aval: Any) -> bool:
  return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_complex(aval: Any) -> bool:
  return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _size(aval: Any) -> int:
  size = 1
  for dimension in aval.shape:
    size *= dimension
  return size
