"""What may be a trained parameter, alike in every engine."""

from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.errors import UserError

PyTree = Any


def check_params(params: PyTree) -> PyTree:
  """Refuses leaves without a real gradient; numbers and numpy arrays become arrays.

  Args:
    params: a tree of real floating-point arrays, numbers, or `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: naming the leaf: complex numbers (a real loss has two gradients in each), integers,
      booleans, keys; or if there is no leaf at all.
  """
  flat, structure = jax.tree_util.tree_flatten_with_path(params)
  if not flat:
    raise UserError(
      f"params {params!r} has no leaves, so that there is no gradient to clip: give the trained"
      " parameters (a filter that selects them may match nothing)."
    )
  return jax.tree.unflatten(structure, [_checked(path, leaf) for path, leaf in flat])


def _checked(path: Any, leaf: Any) -> Any:
  name = jax.tree_util.keystr(path, simple=True, separator=".")
  if isinstance(leaf, bool | int | float | complex) or not hasattr(leaf, "dtype"):
    try:
      leaf = jnp.asarray(leaf)
    except (TypeError, ValueError):
      raise UserError(
        f"params must be real floating-point arrays; leaf {name!r} is a {type(leaf).__name__}. Keep"
        " other leaves outside of the parameters."
      ) from None
  if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    raise UserError(
      f"params must be real floating-point arrays; leaf {name!r} is {leaf.dtype}. Give its real and"
      " imaginary parts as two leaves, and make the complex number of them in the loss."
    )
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise UserError(
      f"params must be real floating-point arrays; leaf {name!r} is {leaf.dtype}. Keep other leaves"
      " outside of the parameters."
    )
  return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
