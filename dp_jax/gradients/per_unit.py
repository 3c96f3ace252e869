"""Whether the gradient of one unit's loss is that unit's alone, under every engine.

The engines take it for granted that units do not see each other. Three things break that, and all
show in the jaxpr of the loss and of its gradient, where custom derivatives have been called:

- a named axis that is bound outside of the loss (an outer vmap, pmap or shard_map): a collective
  over it reads other units. Under shard_map with check_vma=True such a collective is put in by jax
  itself, where a gradient is taken in what is the same on all devices.
- side effects and state: one unit can leave what the next one finds.
- a batching rule that is not the map. vmap is "per unit" only while the rule of every primitive in
  it says the same as a loop; that of custom_vmap, of a callback or of a kernel is what its author
  wrote, and that of the hardware's random generator draws the numbers of a batch from its first
  key.

The first two are refused. The third is served by a loop, which calls no batching rule.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.ref import AbstractRef
from jax.sharding import AxisType

from dp_jax.errors import UserError

PyTree = Any

# Their rules are no map, or not known to be one, though jax exports them with those that are.
_NO_MAPS = frozenset({
  "all_gather", "all_to_all", "approx_top_k", "axis_index", "pmax", "pmin", "ppermute", "psum",
  "ragged_all_to_all", "rng_bit_generator", "rng_uniform",
})  # fmt: skip
_EXPORTED = frozenset(
  p for p in vars(jex_core.primitives).values()
  if isinstance(p, jex_core.Primitive) and p.name not in _NO_MAPS
)  # fmt: skip
# jax's own whose rules are maps, and which it does not export.
_OTHER_MAPS = frozenset({
  "addupdate", "checkpoint", "core_call", "custom_jvp_call_jaxpr", "custom_vjp_call_jaxpr",
  "dce_sink", "debug_callback", "debug_print", "empty", "eval_jaxpr", "freeze", "from_edtype",
  "geqp3", "geqrf", "inspect_sharding", "layout_constraint", "lu_pivots_to_permutation", "mulhi",
  "mutable_array", "new_ref", "optimization_barrier", "ormqr", "philox2x32", "philox4x32", "pjit",
  "platform_index", "pvary", "ragged_dot_general", "random_clone", "random_unwrap", "random_wrap",
  "remat", "remat_opt",
  "reshard", "scatter-sub", "split", "stack", "symmetric_product", "threefry4x32", "tile",
  "to_edtype", "unstack", "xla_metadata_call",
})  # fmt: skip
_REDUCTIONS = ("psum", "pmax", "pmin")
# Calls out of jax: batched as they are told to be.
_CALLBACKS = ("pure_callback", "ffi_call", "buffer_callback")
_SEQUENTIAL = ("sequential", "sequential_unrolled")
# Generators of which a batch of keys gives what each key gives alone; others are not known to.
_GENERATORS = ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
_DRAWS = ("random_bits", "random_split", "random_fold_in", "random_gamma", "random_seed")

# By the names of their classes, which jax does not export. Prints and callbacks for debugging give
# nothing back; references that the loss makes for itself stay within it.
_HARMLESS_EFFECTS = frozenset({
  "DebugEffect", "OrderedDebugEffect", "InternalMutableArrayEffect", "ReadEffect", "WriteEffect",
  "AccumEffect",
})  # fmt: skip
_AXIS_EFFECT = "NamedAxisEffect"
# Parts of the names of what jax itself puts in where values differ between devices.
_INSERTED = ("vary", "invariant", "reduced")
_STATEFUL = ("rng_uniform", "infeed", "outfeed")


def check_loss(loss_fn: Callable[..., Any], params: PyTree, unit: PyTree, key: Any) -> str | None:
  """Refuses a loss through which units could see each other; nothing is computed.

  Args:
    loss_fn: (params, unit, key) -> scalar.
    params: the parameters, arrays or shapes.
    unit: one unit.
    key: one key, or None.

  Returns:
    None if vmap over units is their map; else which operation makes that uncertain.

  Raises:
    ValueError: if the loss is not one real scalar, uses an axis of an outer transformation, has
      side effects or state, or lies in a shard_map that checks varying axes; the operation is
      named.
  """
  try:
    closed, out = jax.make_jaxpr(loss_fn, return_shape=True)(params, unit, key)
  except NameError as error:  # jax's error for a collective over an axis that is not bound
    raise UserError(unbound_axis(error)) from error
  _check_scalar(out)
  _check_no_references(closed.jaxpr)
  _check_alone(closed.jaxpr)

  def scaled(params: PyTree, scale: Any) -> Any:
    # The scale is the same on all devices: should the loss differ between them, whatever it closes
    # over, jax adds up the gradients in it, and that shows.
    return loss_fn(params, unit, key) * jax.lax.convert_element_type(scale, out.dtype)

  try:
    gradient = jax.make_jaxpr(jax.grad(scaled, argnums=(0, 1)))(params, np.float32(1))
  except NameError as error:
    raise UserError(unbound_axis(error)) from error
  _check_alone(gradient.jaxpr)
  return _no_map(closed.jaxpr) or _no_map(gradient.jaxpr)


def check_in_one_piece(trees: dict[str, PyTree]) -> None:
  """Refuses arrays that differ between the devices of a shard_map that checks it.

  Raises:
    ValueError: naming the first of them, and the way that works.
  """
  for name, tree in trees.items():
    for leaf in jax.tree.leaves(tree):
      axes = _manual_axes(jax.typeof(leaf))
      if axes:
        raise UserError(_varying(f"{name} in this shard_map: values differ", axes))


def _manual_axes(aval: Any) -> frozenset[Any]:
  """Axes along which the type of an array says that devices hold different values, or parts."""
  found = frozenset(getattr(aval, "vma", ()))  # what this is called depends on the version of jax
  kind = getattr(aval, "mat", None)
  for name in ("varying", "unreduced", "reduced"):
    found |= frozenset(getattr(kind, name, ()))
  return found


def one_at_a_time(function: Callable[..., Any], *like: Any) -> Callable[..., Any]:
  """The same function of arrays, which an outer vmap calls in turn: no batching rule is used.

  Args:
    function: of trees of arrays.
    *like: arguments of the shapes that it will be called with.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
  structure = jax.tree.structure(shapes)

  @jax.custom_batching.sequential_vmap
  def run(consts: Any, leaves: Any) -> Any:
    return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

  return lambda *args: jax.tree.unflatten(structure, run(closed.consts, jax.tree.leaves(args)))


def unbound_axis(error: NameError) -> str:
  """What to say where a collective names an axis that nothing binds."""
  return _collective(str(error))


def _collective(what: str) -> str:
  return (
    f"the loss of one unit uses a collective across units ({what}); a per-unit gradient does not"
    " exist for it. Remove the cross-example operation (for example BatchNorm's axis_name)."
  )


def _varying(what: str, axes: Any) -> str:
  return (
    f"{what} between devices along {_names(axes)}, and with check_vma=True jax adds gradients up"
    " over devices before they can be clipped: pass check_vma=False to jax.shard_map."
  )


def _check_scalar(out: PyTree) -> None:
  leaves = jax.tree.leaves(out)
  if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
    raise UserError(
      "loss_fn must return the loss of one unit, a real scalar; it returned"
      f" {[f'{x.dtype}{list(x.shape)}' for x in leaves]}. Per-unit losses of a batch are its vmap."
    )


def _check_no_references(jaxpr: Any) -> None:
  if any(isinstance(var.aval, AbstractRef) for var in (*jaxpr.constvars, *jaxpr.invars)):
    raise UserError(
      "the loss of one unit uses a mutable reference from outside, through which units would see"
      " each other: return what it holds from the loss, or leave it out."
    )


def _check_alone(jaxpr: Any) -> None:
  """Refuses outer axes, side effects and state."""
  for eqn, bound in _equations(jaxpr):
    inner = any(True for _ in inner_jaxprs(eqn.params))  # whose equations follow
    axes = set() if inner else _outer_axes(eqn, bound)
    if axes and any(part in eqn.primitive.name for part in _INSERTED):
      raise UserError(_varying("the loss of one unit, or what it closes over, differs", axes))
    if axes:
      raise UserError(_collective(f"{_said(eqn)} over {_names(axes)}"))
    if eqn.primitive.name in _STATEFUL or (not inner and _has_side_effect(eqn)):
      raise UserError(
        f"the loss of one unit has side effects or state ({_said(eqn)}), through which units could"
        " see each other: use jax.pure_callback with vmap_method='sequential' for a function of one"
        " unit, jax.debug.callback for what is only looked at, and jax.random for random numbers."
      )
  left = {e.name for e in jaxpr.effects if type(e).__name__ == _AXIS_EFFECT}
  if left:  # of a call whose inner equations are hidden
    raise UserError(_collective(_names(left)))


def _has_side_effect(eqn: Any) -> bool:
  effects = {type(effect).__name__ for effect in eqn.effects}
  return bool(effects - _HARMLESS_EFFECTS - {_AXIS_EFFECT} or eqn.params.get("has_side_effect"))


def _no_map(jaxpr: Any) -> str | None:
  """Which operation may do something else to a batch than to each of its units."""
  for eqn, _ in _equations(jaxpr):
    name = eqn.primitive.name
    if name in _CALLBACKS:
      method = eqn.params.get("vmap_method")
      if method not in _SEQUENTIAL:
        return f"{_said(eqn)} has vmap_method={method!r}, which is not 'sequential'"
    elif name in _DRAWS:
      dtypes = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
      keys = [d for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key)]
      if any(d not in _mapped_generators() for d in keys):
        return f"{_said(eqn)} uses the generator {keys[0]}, which gives a batch of keys other bits"
    elif any(type(effect).__name__ == "OrderedDebugEffect" for effect in eqn.effects):
      return f"{_said(eqn)} is ordered"
    elif name in _REDUCTIONS and not _named(eqn.params.get("axes", ())):
      continue  # over positions of one array: an axis that the loss itself bound by vmap
    elif eqn.primitive not in _EXPORTED and name not in _OTHER_MAPS:
      return f"{_said(eqn)} may have a batching rule of its own"
  return None


@functools.cache
def _mapped_generators() -> tuple[Any, ...]:
  """The dtypes of keys of generators whose vmap is the map."""
  found = []
  for name in _GENERATORS:
    try:
      found.append(jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype)
    except ValueError:  # which this version of jax does not have
      continue
  return tuple(found)


def _equations(jaxpr: Any, bound: frozenset[Any] = frozenset()) -> Iterator[tuple[Any, Any]]:
  """Every equation, inner ones too, with the axes that are bound around it within the jaxpr."""
  for eqn in jaxpr.eqns:
    yield eqn, bound
    within = bound | (_newly_bound(eqn) if eqn.primitive.name == "shard_map" else frozenset())
    for inner in inner_jaxprs(eqn.params):
      yield from _equations(inner, within)


def _newly_bound(eqn: Any) -> frozenset[Any]:
  """Axes that a shard_map binds; those of an outer one are in its mesh too, and not its own."""
  params, outer = eqn.params, set()
  axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
  mesh = params.get("mesh")
  kinds = zip(getattr(mesh, "axis_names", ()), getattr(mesh, "axis_types", ()), strict=True)
  for name, kind in kinds:
    if kind == AxisType.Manual:
      outer.add(name)
  return frozenset(axes) - outer


def inner_jaxprs(value: Any) -> Iterator[Any]:
  """The jaxprs in the parameters of an equation, or in one of them, which may be nested."""
  if isinstance(value, jex_core.ClosedJaxpr):
    yield value.jaxpr
  elif isinstance(value, jex_core.Jaxpr):
    yield value
  elif isinstance(value, tuple | list):
    for each in value:
      yield from inner_jaxprs(each)
  elif isinstance(value, dict):
    yield from inner_jaxprs(tuple(value.values()))


def _outer_axes(eqn: Any, bound: frozenset[Any]) -> set[Any]:
  """Axes of outer transformations that an equation itself uses."""
  axes = {e.name for e in eqn.effects if type(e).__name__ == _AXIS_EFFECT}
  for key in ("axes", "axis_name"):  # not every collective says so in its effects
    axes |= _named(eqn.params.get(key))
  return axes - bound


def _named(axes: Any) -> set[Any]:
  """Those of some axes that are names, and not positions."""
  some = axes if isinstance(axes, tuple | list | set | frozenset) else (axes,)
  return {x for x in some if x is not None and not isinstance(x, int | np.integer)}


def _said(eqn: Any) -> str:
  """An equation for people: its primitive, and the scope that it stands in."""
  scope = str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))
  return f"{eqn.primitive.name!r}" + (f" in {scope!r}" if scope else "")


def _names(axes: Any) -> str:
  return ", ".join(sorted(f"the axis {axis!r}" for axis in axes))
