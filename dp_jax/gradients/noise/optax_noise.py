"""A `Noise` as the first transform of an optax chain: its state then holds the key too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dp_jax.errors import UserError
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import check_key, float32_pair, is_tracing
from dp_jax.gradients.noise.key_state import own_copy, same_for_one_sum, stand_in
from dp_jax.gradients.noise.transform import Noise, independent
from dp_jax.gradients.optax_guards import (
  Shapes,
  ShapesSeen,
  check_injected,
  check_whole,
  check_wrappers,
  shapes_of,
)

PyTree = Any

# What a chain should start with, for messages.
_START = "dp_jax.gaussian_noise(stddev, key), optax.scale(1 / expected_batch_size)"


class NoiseState(NamedTuple):
  """State of `gaussian_noise`; secret.

  Attributes:
    key: the typed key of the run; step t draws from fold_in(key, t).
    count: int32[], the number of releases so far.
  """

  key: jax.Array
  count: jax.Array  # type: ignore[assignment]  # the name optax uses


class KeepingNoiseState(NamedTuple):
  """State of noise that keeps something; secret. A class of its own, so that checkpoints of
  `NoiseState` stay what they are.

  Attributes:
    key, count: as in `NoiseState`.
    noise: what the noise keeps from one release to the next.
  """

  key: jax.Array
  count: jax.Array  # type: ignore[assignment]
  noise: PyTree


def gaussian_noise(stddev: float, key: jax.Array) -> optax.GradientTransformation:
  """An optax transform that adds noise to the sum of clipped gradients; put it first in a chain.

  The updates that it takes are the sum over the units of one logical batch, as `clipped_grad`
  returns it (plain or a `Compensated` pair). Divide by the public expected batch size after it.

  Args:
    stddev: noise_multiplier * clip_norm, a Python number.
    key: one typed key, never used elsewhere.

  Returns:
    A GradientTransformation with a `NoiseState`. The key enters the state in `init`, as a copy, so
    that the state may be donated. `init` must not be compiled: a key that is closed over by a
    jitted function ends up in its executable, and so in the compilation cache on disk. Its shapes
    may be asked for (`jax.eval_shape`). Every state that it gives has the same key: for another
    model, or another run, make another transform. Nobody but you may see the state.

  Raises:
    ValueError: if stddev or key cannot serve; from `init`, if it is compiled (jit, scan) or under
      vmap; from `update`, if the shapes are not those of the parameters; from both, if a wrapper of
      optax stands around it that `dp_jax.gradients.optax_api` does not list.
  """
  check_injected()
  return as_optax(independent(stddev), key)


def as_optax(noise: Noise, key: jax.Array) -> optax.GradientTransformation:
  """An optax transform that adds this noise; all else as of `gaussian_noise`.

  Its state is a `KeepingNoiseState` if the noise keeps anything.
  """
  check_injected()
  check_key(key)
  seen = ShapesSeen()

  def init(params: PyTree) -> NoiseState | KeepingNoiseState:
    check_whole(params)
    check_wrappers(_START)
    seen.remember(params)
    state_key = stand_in(key) if is_tracing() else own_copy(key, params)
    state, kept = NoiseState(state_key, jnp.zeros((), jnp.int32)), noise.init(params)
    return KeepingNoiseState(*state, kept) if jax.tree.leaves(kept) else state

  def update(updates: PyTree, state: Any, params: PyTree = None) -> Any:
    check_whole(updates)
    check_wrappers(_START)
    _check_sum(updates, seen.expected(params))
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(updates)]
    step_key = jax.random.fold_in(same_for_one_sum(state.key, leaves), state.count)
    keeps = isinstance(state, KeepingNoiseState)
    kept = state.noise if keeps else ()
    noised, kept = noise.update(float32_pair(updates), kept, step_key)
    after = state._replace(count=state.count + 1)
    return noised, after._replace(noise=kept) if keeps else after

  return optax.GradientTransformation(init, update)


def _check_sum(updates: PyTree, expected: set[Shapes] | None) -> None:
  """Refuses per-example gradients, whose noised rows would each be released."""
  got = shapes_of(updates.sum if isinstance(updates, Compensated) else updates)
  if expected is None or got in expected:
    return
  if not expected:
    raise UserError(
      "update needs the parameters, to see that the updates are a sum over units and not"
      " per-example gradients: call update(total, state, params)."
    )
  raise UserError(
    "a transform that adds noise takes the sum over units that clipped_grad returns, with the"
    f" shapes of the parameters; got {got}, the parameters have {' or '.join(map(str, expected))}."
    " For per-example gradients use differentially_private_aggregate."
  )
