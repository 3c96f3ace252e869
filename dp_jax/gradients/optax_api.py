"""For users of optax with their own training loop: private optimizers, and a safe aggregate.

The optimizers take the sum that `clipped_grad` returns:

  grad_fn = dp_jax.clipped_grad(loss_fn, clip_norm)
  optimizer = dp_jax.dp_adam(1e-3, mechanism.stddev, key, expected_batch_size)
  state = optimizer.init(params)  # not under jit: the state holds the secret key
  total, _ = grad_fn(params, units, mask)
  updates, state = optimizer.update(total, state, params)

What they do after the noise is post-processing. The state is secret: whoever has its key can take
the noise away again. It is float32, as the noised gradient, whatever the parameters are; so are the
updates, which `optax.apply_updates` adds to parameters of any precision. For an optimizer of your
own: optax.chain(gaussian_noise(stddev, key), optax.scale(1 / expected_batch_size), optimizer).
Optimizers of optax take the precision of the parameters for their state: give those float32.

What sees the updates before the noise can let them out. So the noise comes first, and wrappers of
optax go around what follows it. Around the whole chain:

  chain, named_chain          first in it; anything before the noise is refused
  flatten                     works on sums
  lookahead                   works, unless reset_state=True: the noise would be repeated
  contrib.schedule_free       works
  inject_hyperparams          with static_args=("stddev", "key", "expected_batch_size"); rates,
                              momentum and weight_decay may change. With parameters of half
                              precision also hyperparam_dtype=jnp.float32
  MultiSteps                  on sums, with use_grad_mean=False, and counting every microbatch in
                              expected_batch_size; the mean, its default, is refused (1/k of the
                              signal under the full noise), and so is should_skip_update_fn
  masked, partition,          refused: other leaves would pass without noise, and per-example
  multi_transform,            gradients would be clipped group by group. Put them after the noise;
  selective_transform         `optax.freeze` too
  apply_if_finite,            refused: they decide by what has no noise, or let it through. Put them
  conditionally_transform,    after the noise
  conditionally_mask
  contrib: sam, mechanize,    refused: they use the gradient before the noise
  galore, all others
  jax.vmap                    of `update`, for states that were made outside of vmap, each with a
                              key of its own; refused where they would share one
  jax.eval_shape              of `init` and `update`, for instance for what a checkpoint restores
  jax.jit                     of `update`; compiling `init` is refused, its key would be compiled in

What follows the noise may be anything that sees the noised gradient alone; a loss on private data
(`value=` of reduce_on_plateau, momo or a line search) has no noise. A wrapper that is not of optax
is not seen here: it must not read, keep or pass on what comes in.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dp_jax.errors import UserError
from dp_jax.gradients.clipping import check_clip_norm
from dp_jax.gradients.engines.dispatch import clip_and_sum
from dp_jax.gradients.engines.styles import make_rule
from dp_jax.gradients.noise.optax_noise import NoiseState, gaussian_noise
from dp_jax.gradients.optax_guards import (
  Shapes,
  ShapesSeen,
  check_injected,
  check_whole,
  check_wrappers,
  shapes_of,
)
from dp_jax.gradients.optimizers import make_optimizer
from dp_jax.gradients.options import is_number

PyTree = Any


def dp_sgd(
  learning_rate: optax.ScalarOrSchedule,
  stddev: float,
  key: jax.Array,
  expected_batch_size: float,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """SGD with Nesterov momentum on sums of clipped gradients.

  Args:
    learning_rate: a number, or a schedule by step.
    stddev: of the noise on the sum: noise_multiplier * clip_norm, as `Mechanism.stddev`.
    key: one typed key, never used elsewhere.
    expected_batch_size: the public divisor, fixed before the first step; never the size of the
      batch that was drawn.
    momentum: 0 is plain SGD.
    weight_decay: decoupled, per unit of learning rate.

  Raises:
    ValueError: if stddev, key or divisor cannot serve; else as of `dp_jax.gaussian_noise`.

  Abadi et al. 2016, arXiv:1607.00133, Algorithm 1.
  """
  optimizer = make_optimizer("sgd", learning_rate, momentum=momentum, weight_decay=weight_decay)
  return _on_noised_mean(stddev, key, expected_batch_size, optimizer)


def dp_adam(
  learning_rate: optax.ScalarOrSchedule,
  stddev: float,
  key: jax.Array,
  expected_batch_size: float,
  *,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Adam on sums of clipped gradients; arguments and errors as of `dp_sgd`.

  Args:
    learning_rate: a number, or a schedule by step.
    stddev: of the noise on the sum.
    key: one typed key.
    expected_batch_size: the public divisor.
    weight_decay: decoupled (Loshchilov and Hutter 2017, arXiv:1711.05101).
  """
  optimizer = make_optimizer("adam", learning_rate, weight_decay=weight_decay)
  return _on_noised_mean(stddev, key, expected_batch_size, optimizer)


def dp_lamb(
  learning_rate: optax.ScalarOrSchedule,
  stddev: float,
  key: jax.Array,
  expected_batch_size: float,
  *,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """LAMB on sums of clipped gradients; arguments and errors as of `dp_sgd`.

  Args:
    learning_rate: a number, or a schedule by step.
    stddev: of the noise on the sum.
    key: one typed key.
    expected_batch_size: the public divisor.
    weight_decay: decoupled.

  You et al. 2019, arXiv:1904.00962; with privacy, Mehta et al. 2022, arXiv:2205.02973.
  """
  optimizer = make_optimizer("lamb", learning_rate, weight_decay=weight_decay)
  return _on_noised_mean(stddev, key, expected_batch_size, optimizer)


def differentially_private_aggregate(
  l2_norm_clip: float, noise_multiplier: float, key: jax.Array, expected_batch_size: float
) -> optax.GradientTransformationExtraArgs:
  """Takes the place of `optax.contrib.differentially_private_aggregate`.

  Like that, it takes per-example gradients and gives the noised mean of the clipped ones. Unlike
  that: the key has no default and cannot be a small integer; the divisor is public, so that the
  size of the batch does not show; `update` takes a mask, and padding adds exactly zero; an example
  whose gradient is not finite counts as zero, instead of spreading; norms and sums are float32
  whatever the gradients are; and the noise is that of `add_noise`, with its tails and its grid.

  Args:
    l2_norm_clip: the clip norm C, from 1e-12 to 1e12.
    noise_multiplier: stddev / C.
    key: one typed key, never used elsewhere.
    expected_batch_size: the public divisor, fixed before the first step.

  Returns:
    A transform to put first in a chain: `update(updates, state, params, mask=None)`, where the
    leaves of updates are float[B, ...] and mask is bool[B], False for padding. Its state, a
    `NoiseState`, is secret. `init` must not be compiled.

  Raises:
    ValueError: if an argument cannot serve; from `init`, if it is compiled; from `update`, if the
      shapes do not fit; from both, if a wrapper stands around it that the table above does not
      list as working (`MultiSteps` and `flatten` work on sums alone).

  Abadi et al. 2016, arXiv:1607.00133, Algorithm 1.
  """
  check_injected()
  check_clip_norm(l2_norm_clip)
  noise = _noised_mean(noise_multiplier * l2_norm_clip, key, expected_batch_size)
  seen = ShapesSeen()

  def init(params: PyTree) -> Any:
    check_whole(params)
    check_wrappers(_AGGREGATE, sums=False)
    seen.remember(params)
    return noise.init(params)

  def update(
    updates: PyTree, state: Any, params: PyTree = None, *, mask: Any = None, **extra: Any
  ) -> tuple[PyTree, Any]:
    del extra
    check_whole(updates)
    check_wrappers(_AGGREGATE, sums=False)
    size = _check_rows(updates, seen.expected(params))
    mask = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != (size,) or mask.dtype != jnp.bool_:
      raise UserError(f"mask must be bool[{size}], got {mask.dtype}{list(mask.shape)}.")
    total, _ = clip_and_sum(updates, mask, make_rule("flat", float(l2_norm_clip), updates))
    return noise.update(total, state, total.sum)

  return optax.GradientTransformationExtraArgs(init, update)


_AGGREGATE = "dp_jax.differentially_private_aggregate(...)"


def _check_rows(updates: PyTree, expected: set[Shapes] | None) -> int:
  """The number of rows of per-example gradients; refuses a sum, whose rows would pass for units."""
  shapes = shapes_of(updates)
  sizes = {shape[:1] for shape in shapes}
  if len(sizes) != 1 or () in sizes:
    raise UserError(f"updates must be per-example gradients, leaves [B, ...]; first axes {sizes}.")
  rows = tuple(shape[1:] for shape in shapes)
  if expected and rows not in expected:
    raise UserError(
      "updates must be per-example gradients, leaves [B, ...] with the shapes of the parameters"
      f" after the first axis; got {shapes}, the parameters have {' or '.join(map(str, expected))}."
    )
  ((size,),) = sizes
  return size


def _on_noised_mean(
  stddev: float, key: jax.Array, expected_batch_size: float, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
  return optax.chain(_noised_mean(stddev, key, expected_batch_size), optimizer)


def _noised_mean(
  stddev: float, key: jax.Array, expected_batch_size: float
) -> optax.GradientTransformation:
  """Noise on the sum, then the public divisor."""
  noise = gaussian_noise(stddev, key)
  if not is_number(expected_batch_size) or not 0 < expected_batch_size < math.inf:
    raise UserError(
      "expected_batch_size is the public divisor, a positive number that does not depend on the"
      f" batch; got {expected_batch_size!r}."
    )
  divisor = float(expected_batch_size)

  def update(
    updates: PyTree, state: NoiseState, params: PyTree = None
  ) -> tuple[PyTree, NoiseState]:
    noised, state = noise.update(updates, state, params)
    return jax.tree.map(lambda x: x / divisor, noised), state

  return optax.GradientTransformation(noise.init, update)
