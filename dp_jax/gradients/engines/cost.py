"""When a loop over units is faster than ghost clipping: a model of costs on a CPU."""

import math
from typing import Any

import jax

from dp_jax.gradients.engines.looped import UNITS_A_TURN
from dp_jax.gradients.ghost.traced import Traced
from dp_jax.gradients.per_unit import inner_jaxprs

# The norms of the ghost engine have to cost more than what a loop adds: more operations a parameter
# than one pass over the parameters takes the time of, and this share of the gradient's own
# operations, since products over a batch are faster than those of its units. Between the models of
# experiments/benchmarks/clipping.py that gain and those that lose.
_OPERATIONS_A_PARAMETER = 90
_SHARE_OF_GRADIENT = 0.1


def loop_is_cheaper(traced: Traced, params: Any, memory_budget: int) -> bool:
  """Whether a loop over units takes less time than ghost clipping.

  The answer depends on shapes and on the kind of device alone. Never on accelerators, which one
  unit does not keep busy, nor where units may lie on several devices, which would then idle; nor
  with convolutions, whose gradient XLA's CPU backend computes up to 14 times slower for one image.

  Args:
    traced: of the loss of one unit.
    params: the parameters.
    memory_budget: bytes that the gradients of one turn may take.
  """
  if jax.default_backend() != "cpu" or jax.device_count() > 1:
    return False
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  norms = sum(group.flops for group in traced.groups)
  # Forward, and as much again for each operand.
  gradient = 3 * product_flops(traced.jaxpr.jaxpr)
  fits = UNITS_A_TURN * 4 * size <= memory_budget
  return fits and norms >= max(_OPERATIONS_A_PARAMETER * size, _SHARE_OF_GRADIENT * gradient)


def product_flops(jaxpr: Any) -> float:
  """Floating-point operations of the products; infinite if there is a convolution.

  One whose windows do not overlap, as an image is cut into patches, is a matrix product. Of the
  branches of a `cond` the dearest counts, and a `while` as one turn.
  """
  total = 0.0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == "conv_general_dilated":
      total += _patch_flops(eqn)
    if name == "dot_general":
      total += _product_flops(eqn, eqn.params["dimension_numbers"])
    if name == "ragged_dot_general":
      numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
      total += _product_flops(eqn, numbers)
    inner = [product_flops(j) for j in inner_jaxprs(eqn.params)]
    if name == "cond":
      total += max(inner, default=0.0)
    else:
      total += sum(inner) * (eqn.params["length"] if name == "scan" else 1)
  return total


def _product_flops(eqn: Any, dimension_numbers: Any) -> float:
  (contracted, _), _ = dimension_numbers
  return 2.0 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


def _patch_flops(eqn: Any) -> float:
  """Of a convolution whose windows are side by side; infinite for any other."""
  kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
  ones = (*eqn.params["lhs_dilation"], *eqn.params["rhs_dilation"])
  apart = tuple(kernel[i] for i in spec[2:]) == tuple(eqn.params["window_strides"])
  grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
  if not apart or grouped or any(d != 1 for d in ones):
    return math.inf
  return 2 * _size(eqn.outvars[0]) * math.prod(kernel) / max(1, kernel[spec[0]])


def _size(var: Any) -> int:
  return math.prod(getattr(var.aval, "shape", ()))
