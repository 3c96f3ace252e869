"""Primitives that have a rule of their own, and the parameters of each that the rule knows.

A primitive is its name *and* its parameters: `reshape` with `dimensions` is another rearrangement.
A rule applies only where every parameter that it does not know is None, as those are that a version
of jax adds for what it is not asked for. Anything else is a use like any other, which is
differentiated by jax itself.
"""

from typing import Any

from dp_jax.gradients.ghost.uses import Origin, Value, bind, is_real

Axes = tuple[int | None, ...] | None

# Calls that are looked into: what holds their bodies, which are what they compute. A custom
# derivative is not, and so is none of these.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
         "remat2": "jaxpr", "checkpoint": "jaxpr"}  # fmt: skip
# Of one operand, and equal to it but for rounding or placement.
_IDENTITIES = frozenset({"convert_element_type", "copy", "copy_p", "name", "optimization_barrier",
                         "reshard", "sharding_constraint"})  # fmt: skip
# Rearrangements of one operand, where they keep the number of entries.
_REARRANGEMENTS = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "rev", "squeeze",
                             "transpose"})  # fmt: skip

_JIT = ("jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars",
        "ctx_mesh", "name", "keep_unused", "inline", "compiler_options_kvs")  # fmt: skip
_REMAT = ("jaxpr", "prevent_cse", "differentiated", "policy")

# What each rule reads, or what changes values by rounding and placement alone.
_PARAMETERS: dict[str, tuple[str, ...]] = {
  "broadcast_in_dim": ("shape", "broadcast_dimensions", "sharding"),
  "checkpoint": _REMAT,
  "closed_call": ("call_jaxpr",),
  "conv_general_dilated": (
    "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
    "feature_group_count", "batch_group_count", "precision", "preferred_element_type",
    "out_sharding",
  ),
  "convert_element_type": ("new_dtype", "weak_type", "sharding"),
  "copy": (),
  "copy_p": (),
  "core_call": ("call_jaxpr", "name"),
  "dot_general": ("dimension_numbers", "precision", "preferred_element_type", "out_sharding"),
  "expand_dims": ("dimensions",),
  "gather": (
    "dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "mode",
    "fill_value",
  ),
  "jit": _JIT,
  "name": ("name",),
  "optimization_barrier": (),
  "pjit": _JIT,
  "remat2": _REMAT,
  "reshape": ("new_sizes", "dimensions", "sharding"),
  "reshard": ("dst_sharding", "concrete_mesh"),
  "rev": ("dimensions",),
  "scan": (
    "reverse", "length", "jaxpr", "num_consts", "num_carry", "linear", "unroll",
    "_split_transpose",
  ),
  "sharding_constraint": ("sharding", "layout", "context_mesh", "unconstrained_dims"),
  "squeeze": ("dimensions",),
  "transpose": ("permutation",),
}  # fmt: skip


def is_known(eqn: Any) -> bool:
  """Whether the primitive has a rule, and that knows every parameter that says anything."""
  known = _PARAMETERS.get(eqn.primitive.name)
  return known is not None and all(k in known or v is None for k, v in eqn.params.items())


def rearranged(eqn: Any, value: Value, array: Any) -> Value | None:
  """The output of a primitive that only rearranges or converts one parameter.

  Args:
    eqn: the equation.
    value: its first operand, of a structural origin.
    array: its output.

  Returns:
    The output, with its origin; None if it is no such primitive.
  """
  name, origin = eqn.primitive.name, value.origin
  out = eqn.outvars[0].aval
  if origin is None or not origin.structural or len(eqn.invars) != 1 or not is_known(eqn):
    return None
  if not is_real(out):
    return None
  if name in _IDENTITIES:
    return Value(array, origin=origin, exact=value.exact)
  if name not in _REARRANGEMENTS or out.size != eqn.invars[0].aval.size:
    return None
  axes = _axes(eqn, origin.axes)
  # The equation itself, not what its name suggests, rearranges the copy.
  (exact,) = bind(eqn, [value.exact])
  moved = Origin(origin.roots, True, axes, origin.index)
  return Value(array, origin=moved, exact=exact)


def _axes(eqn: Any, axes: Axes) -> Axes:
  """The axes of a rearranged parameter; None where they are merged, split or turned round."""
  name, params = eqn.primitive.name, eqn.params
  shape, new_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  order = params["permutation"] if name == "transpose" else params.get("dimensions")
  if axes is None or name == "rev":
    return None
  if name == "transpose":
    return tuple(axes[i] for i in order)
  if name == "reshape" and order is not None:  # a transpose before it
    axes, shape = tuple(axes[i] for i in order), tuple(shape[i] for i in order)
  if [d for d in shape if d != 1] != [d for d in new_shape if d != 1]:
    return None
  # Only axes of size 1 are added or dropped.
  left = [axis for axis, d in zip(axes, shape, strict=True) if d != 1]
  return tuple(None if d == 1 else left.pop(0) for d in new_shape)


def row_of(value: Value, i: int) -> Value:
  """Row i of a value that a scan goes through: a slice of a stacked parameter keeps its origin."""
  array = None if value.array is None else value.array[i]
  origin = value.origin
  if origin is None:
    return Value(array, value.is_data)
  if origin.structural and origin.index is None and origin.axes and origin.axes[0] == 0:
    return Value(array, origin=Origin(origin.roots, True, origin.axes[1:], i), exact=value.exact[i])
  return Value(array, origin=Origin(origin.roots))
