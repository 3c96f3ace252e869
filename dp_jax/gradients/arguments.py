"""The arguments of a call of `ClippedGrad`: meshes, numbers of units, keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from dp_jax.errors import UserError

PyTree = Any


def check_mesh(params: PyTree, units: PyTree) -> None:
  """Refuses axes under which jax wants the sharding of every operation said in the program."""
  for name, tree in (("params", params), ("units", units)):
    for leaf in jax.tree.leaves(tree):
      mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
      if mesh is not None and AxisType.Explicit in mesh.axis_types:
        raise UserError(
          f"{name} lie on a mesh with Explicit axes {mesh.axis_names}, which vmap over units and"
          " slices of one unit cannot follow: make the mesh with jax.make_mesh(shape, names,"
          " axis_types=(AxisType.Auto,) * len(names)); with_sharding_constraint in the loss then"
          " works."
        )


def num_units(units: PyTree) -> int:
  """How many units there are: the first axis of every leaf.

  Raises:
    ValueError: if they differ.
  """
  sizes = {jnp.shape(x)[0] if jnp.ndim(x) else -1 for x in jax.tree.leaves(units)}
  if len(sizes) != 1 or -1 in sizes:
    raise UserError(f"every leaf of units needs the same first axis, got sizes {sizes}.")
  return sizes.pop()


def keys_per_unit(key: Any, size: int, exact: bool) -> Any:
  """A key a unit, or None.

  Args:
    key: None, one typed key, or a key array [size].
    size: the number of units.
    exact: whether a unit may be taken out, which must not move the others to other keys.

  Raises:
    ValueError: if the key is neither, or belongs to a place and not to a unit.
  """
  if key is None:
    return None
  if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
    raise UserError("key must be a typed key (jax.random.key or wrap_key_data) or None.")
  if key.ndim == 0:
    if exact:
      raise UserError(
        "one key for all units is split by position, and with exact=True a unit may be taken out,"
        " which moves later ones to other keys: pass a key array, one key a unit, made from the"
        " step's key and the unit's own index, as by jax.vmap(jax.random.fold_in, (None, 0))."
      )
    return jax.random.split(key, size)
  if key.shape != (size,):
    raise UserError(f"key must be one key or {size} keys, one a unit; got shape {key.shape}.")
  if exact and jax.random.key_impl(key) == "unsafe_rbg":
    raise UserError(
      "keys of the generator 'unsafe_rbg' that are made for a batch depend on the position in it,"
      " and with exact=True a unit may be taken out: use jax.random.key(seed, impl='threefry2x32')."
    )
  return key
