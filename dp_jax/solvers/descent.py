"""Full-batch gradient descent on a linear head, with a preconditioner for the noised gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.optimizers import make_optimizer, make_schedule
from dp_jax.solvers.feature_units import Rows, Units
from dp_jax.solvers.noised import Releases

Params = dict[str, jax.Array]

GRADIENT = "clipped gradients of the head"


@dataclasses.dataclass(frozen=True)
class Descent:
  """How to descend.

  Attributes:
    steps: noised gradients.
    clip_norm: the bound on a unit's gradient; that of a record of norm 1 is at most sqrt(2).
    learning_rate: the peak rate, relative to the inverse of the largest eigenvalue of the
      preconditioned second moment where that is known.
    optimizer, momentum, schedule, weight_decay: as for any training. The cosine schedule ends at
      zero, which averages the noise of the last steps out.
    bias: whether the head has one; its input is 1 for every record.
    average: the share of the steps, the last ones, whose heads are averaged; 0 takes the last head.
      All of them are functions of the noised gradients, so it is post-processing.

  Raises:
    ValueError: if average is not from 0 to 1.
  """

  steps: int = 60
  clip_norm: float = 0.2
  learning_rate: float = 80.0
  optimizer: Literal["sgd", "adam", "lamb"] = "sgd"
  momentum: float = 0.0
  schedule: Literal["constant", "cosine"] = "cosine"
  weight_decay: float = 0.0
  bias: bool = False
  average: float = 0.0

  def __post_init__(self) -> None:
    if not 0 <= self.average <= 1:
      raise UserError(f"average={self.average} must be from 0 to 1: it is a share of the steps.")

  def transform(self) -> optax.GradientTransformation:
    """The optimizer of the noised, preconditioned mean gradient."""
    schedule = make_schedule(self.schedule, self.learning_rate, 0, self.steps)
    return make_optimizer(
      self.optimizer, schedule, momentum=self.momentum, weight_decay=self.weight_decay
    )


def descend(
  rows: Rows, releases: Releases, settings: Descent, preconditioner: np.ndarray | None
) -> Params:
  """Descends from zero: {"kernel": float32[d, C], "bias": float32[C]}.

  Args:
    rows: the data.
    releases: of which `GRADIENT` is used, once a step.
    settings: of the descent.
    preconditioner: float[d, d], multiplied with the noised gradient; None for none.
  """
  data = rows.data
  params = {"kernel": jnp.zeros((data.num_features, data.num_classes))}
  if settings.bias:
    params["bias"] = jnp.zeros(data.num_classes)
  opt_state = settings.transform().init(params)
  accumulate = gradient_sum(releases.mechanisms[GRADIENT].clip_norm)
  matrix = None if preconditioner is None else jnp.asarray(preconditioner, jnp.float32)
  averaged = max(1, round(settings.average * settings.steps))
  mean = jax.tree.map(jnp.zeros_like, params)
  for step in range(settings.steps):
    total = pairs.zeros_like(params)
    for units, mask in rows:
      total = accumulate(params, total, units, mask)
    noised = releases.vector(GRADIENT, total, step)
    params, opt_state = _update(params, opt_state, noised, matrix, settings, data.num_units)
    if step >= settings.steps - averaged:
      mean = jax.tree.map(lambda x, y: x + y / averaged, mean, params)
  return {"bias": jnp.zeros(data.num_classes), **mean}


def head_loss(params: Params, unit: Units, key: Any = None) -> jax.Array:
  """Softmax cross-entropy of one unit: the mean over its real records."""
  logits = jnp.matmul(unit["inputs"], params["kernel"])
  if "bias" in params:
    logits = logits + params["bias"]
  losses = -jnp.take_along_axis(
    jax.nn.log_softmax(logits), unit["label"][:, None].astype(jnp.int32), axis=1
  )[:, 0]
  count = jnp.maximum(jnp.sum(unit["record_mask"]), 1)
  return jnp.sum(jnp.where(unit["record_mask"], losses, 0.0)) / count


@functools.cache
def gradient_sum(clip_norm: float) -> Callable[..., Compensated]:
  """(params, total, units, mask) -> total with the clipped gradients of a shard added.

  Sums are exact under every adjacency: a head's gradient is so small that it costs little.
  """
  grad_fn = clipped_grad(head_loss, clip_norm, compensated=True, exact=True)

  def accumulate(params: Params, total: Compensated, units: Units, mask: jax.Array) -> Compensated:
    part, _ = grad_fn(params, units, mask)
    return pairs.add(total, part)

  return jax.jit(accumulate, donate_argnums=1)


@functools.partial(jax.jit, static_argnames=("settings", "num_units"), donate_argnums=(0, 1))
def _update(
  params: Params, opt_state: Any, noised: Params, matrix: Any, settings: Descent, num_units: float
) -> tuple[Params, Any]:
  """One step of the optimizer on the noised sum of gradients."""
  mean = jax.tree.map(lambda x: x / num_units, noised)
  if matrix is not None:
    mean = {**mean, "kernel": jnp.matmul(matrix, mean["kernel"], precision="highest")}
  updates, opt_state = settings.transform().update(mean, opt_state, params)
  return optax.apply_updates(params, updates), opt_state
