"""How the secret key of the noise gets into an optimizer's state, and what must not share it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from dp_jax.errors import UserError

PyTree = Any

# Stands for the key while `init` is traced. It holds nothing: shapes can be asked for, by
# `jax.eval_shape` for instance, but nothing that contains it can be compiled or run.
_secret_key_p = Primitive("secret_key_of_the_noise")


def _refuse(*args: Any, **params: Any) -> Any:
  raise UserError(
    "init of a transform that adds noise was called inside a traced function (jit, scan): the"
    " secret key would be compiled into it. Call init outside and pass the state as an argument."
    " For shapes alone use jax.eval_shape(init, params)."
  )


_secret_key_p.def_abstract_eval(lambda *, aval: aval)
_secret_key_p.def_impl(_refuse)
mlir.register_lowering(_secret_key_p, _refuse)


def stand_in(key: jax.Array) -> jax.Array:
  """What has the type of the key and cannot be compiled, for `init` while it is traced."""
  return _secret_key_p.bind(aval=jax.core.ShapedArray(key.shape, key.dtype))


def own_copy(key: jax.Array, params: PyTree) -> jax.Array:
  """A copy of the key for a state, which may be donated without taking the caller's key with it.

  Args:
    key: one typed key, a concrete array.
    params: what `init` was called with.

  Raises:
    ValueError: if `init` runs under vmap.
  """
  data = jnp.array(jax.random.key_data(key), copy=True)
  copied = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
  tracers: list[Any] = [x for x in jax.tree.leaves(params) if isinstance(x, jax.core.Tracer)]
  return same_for_one_sum(copied, tracers) if tracers else copied


def same_for_one_sum(key: jax.Array, arrays: list[jax.Array]) -> jax.Array:
  """The key itself; refuses where vmap would give several sums the noise of one key.

  Raises:
    ValueError: if the arrays have an axis of vmap that the key does not have.
  """
  return _same(key, [jax.lax.stop_gradient(x) for x in arrays])


@jax.custom_batching.custom_vmap
def _same(key: jax.Array, arrays: list[jax.Array]) -> jax.Array:
  del arrays
  return key


@_same.def_vmap
def _batched(
  axis_size: int, in_batched: tuple[bool, list[bool]], key: jax.Array, arrays: list[jax.Array]
) -> tuple[jax.Array, bool]:
  del axis_size
  key_batched, arrays_batched = in_batched
  if any(arrays_batched) and not key_batched:
    raise UserError(
      "vmap over a transform that adds noise would add the same noise to every sum, and their"
      " difference would be released without any. Make one state for each, by init outside of"
      " vmap with a key of its own, and stack the states."
    )
  return _same(key, arrays), key_batched
