"""`check_per_unit`: what the trainer checks of a loss before step 0, for loops written by hand."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.errors import UserError
from dp_jax.gradients.per_unit import check_loss
from dp_jax.models.inspect import check_modules, refused_batch_norm

PyTree = Any

_UNITS = 3
# At initial values a gradient may vanish for no reason that stays: a head of zeros, LoRA's B.
_PERTURBATION = 0.05


def check_per_unit(
  loss_fn: Callable[[PyTree, PyTree, Any], Any],
  params: PyTree,
  unit: PyTree,
  key: Any = None,
  *,
  module: nnx.Module | None = None,
  units: PyTree = None,
) -> tuple[str, ...]:
  """Checks that a loss has a gradient for each unit, before anything is trained.

  For loops that are written by hand; call it once, before the first step. It refuses what
  `clipped_grad` refuses (collectives over units, side effects, references from outside), and
  further every BatchNorm in training mode that the loss calls, Linen or NNX, which `clipped_grad`
  cannot see: of one example, its output does not depend on its input, and nothing below it learns.
  Then it looks for parameters whose gradient is exactly zero on every made-up unit: they are
  warned of, since batch statistics that are written by hand look so too.

  ```
  dp_jax.check_per_unit(loss_fn, params, {"image": images[0], "label": labels[0]})
  ```

  No value of `unit` is used, so that what it says tells nothing of the data: only shapes and dtypes
  are. Made-up units hold normal numbers, zeros or ones for integers (so that they are tokens and
  labels of any table), and True. Parameters are taken with a little noise.

  Args:
    loss_fn: `(params, unit, key) -> scalar`, the loss of one unit, as `clipped_grad` takes it.
    params: the parameters.
    unit: one unit, arrays or `jax.ShapeDtypeStruct`, without an axis of units.
    key: one typed key, or None if the loss needs none.
    module: an NNX module that the loss uses, to be searched for a BatchNorm in training mode, and
      to name it by its path.
    units: public made-up units to use instead, leaves [n, ...], where the loss needs others. They
      must not be of the data: what is warned of tells of them.

  Returns:
    The paths of parameters without any gradient, also given in a warning.

  Raises:
    ValueError: naming the module or operation by which units could see each other, or if the loss
      is not one real scalar.
  """
  if module is not None:
    check_modules(module)
  with refused_batch_norm():
    check_loss(loss_fn, params, jax.tree.map(_one_made_up, _shapes(unit)), key)
  if units is None:
    units = _made_up(_shapes(unit))
  idle = _without_gradient(loss_fn, params, units, key)
  if idle:
    warnings.warn(
      f"the gradient of {', '.join(idle)} is zero on every made-up unit: usual causes are"
      " statistics over a batch of one example, stop_gradient, or a parameter that is not used.",
      stacklevel=2,
    )
  return idle


def _shapes(unit: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), unit)


def _one_made_up(like: jax.ShapeDtypeStruct) -> jax.Array:
  return _leaf(like, np.random.default_rng(0))


def _made_up(unit: PyTree) -> PyTree:
  """Units [3, ...] of the shapes of one."""
  rng = np.random.default_rng(0)
  some = [jax.tree.map(lambda x: _leaf(x, rng), unit) for _ in range(_UNITS)]
  return jax.tree.map(lambda *xs: jnp.stack(xs), *some)


def _leaf(like: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    raise UserError("a unit may not hold keys: pass its key as the third argument of the loss.")
  if like.dtype == jnp.bool_:
    return jnp.ones(like.shape, bool)
  if jnp.issubdtype(like.dtype, jnp.integer):
    return jnp.asarray(rng.integers(0, 2, like.shape), like.dtype)
  return jnp.asarray(rng.standard_normal(like.shape), like.dtype)


def _without_gradient(
  loss_fn: Callable[..., Any], params: PyTree, units: PyTree, key: Any
) -> tuple[str, ...]:
  """Paths of parameters whose gradient is exactly zero for each of the units."""
  gradient = jax.jit(jax.grad(loss_fn))
  flat, structure = jax.tree_util.tree_flatten_with_path(params)
  rng = np.random.default_rng(1)
  noised = [
    x + jnp.asarray(_PERTURBATION * rng.standard_normal(jnp.shape(x)), jnp.result_type(x))
    for _, x in flat
  ]
  moved = [False] * len(flat)
  leaves, of_units = jax.tree.flatten(units)
  for unit in zip(*leaves, strict=True):
    some = jax.tree.unflatten(of_units, unit)
    found = jax.tree.leaves(gradient(jax.tree.unflatten(structure, noised), some, key))
    moved = [was or bool(jnp.any(g != 0)) for was, g in zip(moved, found, strict=True)]
  paths = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat)
  return tuple(path for path, has in zip(paths, moved, strict=True) if not has)
