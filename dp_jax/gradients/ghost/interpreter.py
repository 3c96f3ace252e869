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

from dp_jax.gradients.ghost.structure import CALLS, is_known, rearranged, row_of
from dp_jax.gradients.ghost.uses import Origin, UnsupportedError, Use, Value, Visitor, bind

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
  if from_params and name in CALLS and is_known(eqn):
    inner = eqn.params[CALLS[name]]
    closed = hasattr(inner, "consts")
    consts = [Value(c) for c in inner.consts] if closed else []
    return evaluate(inner.jaxpr if closed else inner, consts, inputs, visitor)
  if name == "optimization_barrier" and is_known(eqn):
    return _each(eqn, inputs)
  short = name == "scan" and is_known(eqn) and 0 < eqn.params["length"] <= MAX_UNROLL
  if from_params and any_data and short:
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


def _each(eqn: Any, inputs: list[Value]) -> list[Value]:
  """A barrier: every output is one operand, whatever the others are."""
  arrays = [v.array for v in inputs]
  if all(array is not None for array in arrays):
    arrays = bind(eqn, arrays)
  return [dataclasses.replace(v, array=x) for v, x in zip(inputs, arrays, strict=True)]


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
  found = rearranged(eqn, inputs[0], array)
  roots = (v.origin.roots for v in inputs if v.origin is not None)
  return Value(array, origin=Origin(frozenset().union(*roots))) if found is None else found


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
    args = [*consts, *carry, *(row_of(x, i) for x in xs)]
    outputs = evaluate(body.jaxpr, [Value(c) for c in body.consts], args, visitor)
    carry = outputs[:num_carry]
    for column, value in zip(stacked, outputs[num_carry:], strict=True):
      column.append(value)
  if params["reverse"]:
    stacked = [column[::-1] for column in stacked]
  return [*carry, *(_stack(column) for column in stacked)]


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
