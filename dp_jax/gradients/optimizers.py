"""Optimizers on the noised gradient, by name, and the moving average of parameters.

Everything here sees the gradient after the noise, so it is post-processing. Weight decay is
decoupled: inside the clipped loss it would take part of every unit's budget.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from dp_jax.errors import UserError

PyTree = Any


def make_schedule(
  name: Literal["constant", "cosine"], learning_rate: float, warmup_steps: int, steps: int
) -> optax.Schedule:
  """A learning rate by step: linear warm-up from zero, then constant or cosine to zero.

  Raises:
    ValueError: if the warm-up is longer than the run or the name is unknown.
  """
  if warmup_steps > steps:
    raise UserError(f"warmup_steps={warmup_steps} is more than the {steps} steps of the run.")
  rest = max(steps - warmup_steps, 1)
  if name == "constant":
    after = optax.constant_schedule(learning_rate)
  elif name == "cosine":
    after = optax.cosine_decay_schedule(learning_rate, rest)
  else:
    raise UserError(f"schedule {name!r} is not one of constant, cosine.")
  if warmup_steps == 0:
    return after
  # The first step already moves: at rate 1 / warmup_steps, not 0.
  rising = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, warmup_steps - 1)
  return optax.join_schedules([rising, after], [warmup_steps])


def make_optimizer(
  name: Literal["sgd", "adam", "lamb"],
  schedule: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """An optimizer of the noised mean gradient, with decoupled weight decay.

  State, norms and updates are float32, as that gradient is: in the precision of float16 parameters
  the second moments of most gradients are zero.

  Args:
    name: sgd (Nesterov momentum; momentum 0 is plain), adam, or lamb (You et al. 2019,
      arXiv:1904.00962).
    schedule: the learning rate, by step or one number.
    momentum: of sgd, a number or an array.
    weight_decay: the decay per unit of learning rate (Loshchilov and Hutter 2017,
      arXiv:1711.05101), a number or an array.

  Raises:
    ValueError: if the name is unknown.
  """
  decay = optax.identity() if _is_zero(weight_decay) else optax.add_decayed_weights(weight_decay)
  rate = optax.scale_by_learning_rate(schedule)
  if name == "sgd":
    direction = optax.identity() if _is_zero(momentum) else optax.trace(momentum, nesterov=True)
    return _in_float32(optax.chain(direction, decay, rate))
  if name == "adam":
    return _in_float32(optax.chain(optax.scale_by_adam(), decay, rate))
  if name == "lamb":
    return _in_float32(optax.lamb(schedule, weight_decay=weight_decay))
  raise UserError(f"optimizer {name!r} is not one of sgd, adam, lamb.")


def _is_zero(value: Any) -> bool:
  """Of a number; an array may change from step to step."""
  return isinstance(value, int | float) and value == 0


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """The transform, for which parameters are float32; so is the state that it makes like them."""

  def cast(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)

  def init(params: PyTree) -> Any:
    # Of arrays, or of what has their shape and dtype alone.
    return inner.init(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

  def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
    return inner.update(updates, state, None if params is None else cast(params))

  return optax.GradientTransformation(init, update)


def update_average(average: PyTree, params: PyTree, decay: float, step: jax.Array) -> PyTree:
  """The exponential moving average after one more step; decay 0 gives the parameters.

  The decay starts lower, min(decay, (1 + step) / (10 + step)), so that the initial values are
  forgotten in short runs too.

  Args:
    average: leaves float32[...], the average so far; what it returns is float32 too.
    params: the parameters after this step.
    decay: in [0, 1).
    step: int32[], the number of steps before this one.
  """
  count = step.astype(jnp.float32)
  decay_now = jnp.minimum(decay, (1 + count) / (10 + count))
  return jax.tree.map(lambda a, p: decay_now * a + (1 - decay_now) * p, average, params)
