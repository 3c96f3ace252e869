"""One step of training: `accumulate` for each microbatch, then `finish`, also on an empty batch.

Where one microbatch holds the whole batch, `whole` does both in one call. Units are spread over the
devices of a mesh; what these say to each other is in `collectives.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import MEMORY_BUDGET, clipped_grad
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.dispatch import ClipAux, LossFn
from dp_jax.gradients.engines.styles import StyleName
from dp_jax.gradients.noise.transform import NO_NOISE, MakeNoise, Noise, independent
from dp_jax.gradients.optimizers import update_average
from dp_jax.gradients.per_unit import check_loss
from dp_jax.parallel import collectives
from dp_jax.parallel.mesh import AXES, FSDP, one_device, place, shardings_of, specs_of

PyTree = Any


class TrainState(NamedTuple):
  """What a step changes.

  Attributes:
    step: int32[], steps done.
    params: the trained parameters.
    opt_state: of the optimizer.
    average: the moving average of params, which is what a run releases.
    noise: what the noise keeps for later steps, as secret as the key; () if it keeps nothing.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  average: PyTree
  noise: PyTree = ()


class StepFunctions(NamedTuple):
  """The two compiled halves of a step, and both in one.

  Attributes:
    zeros: (params) -> total, the sum of no units; each device has one of its own.
    accumulate: (params, frozen, total, units, mask, unit_ids, key) -> (total, ClipAux). `total`
      is donated. The key is that of the step; each unit's own is folded in from its index, so
      that it does not depend on the microbatch that the unit lands in.
    finish: (state, total, key) -> state; `state` is donated.
    whole: (state, frozen, units, mask, unit_ids, unit_key, noise_key) -> (state, ClipAux), the
      same for a batch of one microbatch; `state` is donated.
  """

  zeros: Callable[[PyTree], Compensated]
  accumulate: Callable[..., tuple[Compensated, ClipAux]]
  finish: Callable[..., TrainState]
  whole: Callable[..., tuple[TrainState, ClipAux]]


def init_state(
  params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh | None = None,
  noise: Noise = NO_NOISE,
) -> TrainState:  # fmt: skip
  """The state before step 0, on a mesh. The arrays are copied: a step donates them."""
  params = jax.tree.map(jnp.array, params)
  average = jax.tree.map(jnp.array, params)
  kept = jax.tree.map(jnp.array, noise.init(params))
  state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average, kept)
  return state if mesh is None else place(state, mesh)


def build_step(
  loss: Callable[..., jax.Array],
  optimizer: optax.GradientTransformation,
  *,
  clip_norm: float | None,
  stddev: float,
  expected_batch_size: float,
  ema: float,
  engine: Any = "auto",
  clipping: StyleName = "flat",
  memory_budget: int = MEMORY_BUDGET,
  exact: bool = False,
  mesh: Mesh | None = None,
  noise: MakeNoise = independent,
) -> StepFunctions:
  """Compiles the two halves of a step, and both in one.

  Args:
    loss: (frozen, params, unit, key) -> float32[], the loss of one unit.
    optimizer: of the noised mean gradient.
    clip_norm: the bound C; None, with stddev 0, trains without privacy.
    stddev: of the noise, on the sum.
    expected_batch_size: the public divisor, fixed before step 0. Never the realised batch, whose
      size is not public.
    ema: decay of the moving average.
    engine: passed to `clipped_grad`.
    clipping: passed to `clipped_grad`.
    memory_budget: passed to `clipped_grad`.
    exact: passed to `clipped_grad`, for where neighbours may lack a unit.
    mesh: the devices; None takes one. The number of units of a call must divide by its size.
    noise: from stddev; not called without privacy.

  Raises:
    ValueError: if only one of clipping and noise is left out.
  """
  if (clip_norm is None) != (stddev == 0):
    raise UserError(f"clip_norm={clip_norm!r} and stddev={stddev!r}: set both, or neither.")
  step = _Step(
    loss, optimizer, clip_norm, NO_NOISE if clip_norm is None else noise(stddev),
    expected_batch_size, ema, engine, clipping, memory_budget, exact,
    one_device() if mesh is None else mesh,
  )  # fmt: skip
  return StepFunctions(
    jax.jit(step.zeros),
    jax.jit(step.accumulate, donate_argnums=2),
    jax.jit(step.finish, donate_argnums=0),
    jax.jit(step.whole, donate_argnums=0),
  )


@dataclasses.dataclass(frozen=True)
class _Step:
  """What `build_step` compiles; the arguments are its own."""

  loss: Callable[..., jax.Array]
  optimizer: optax.GradientTransformation
  clip_norm: float | None
  noise: Noise
  expected_batch_size: float
  ema: float
  engine: Any
  clipping: StyleName
  memory_budget: int
  exact: bool
  mesh: Mesh

  def zeros(self, params: PyTree) -> Compensated:
    return collectives.spread_zeros(params, self.mesh)

  def accumulate(
    self, params: PyTree, frozen: PyTree, total: Compensated, units: PyTree, mask: jax.Array,
    unit_ids: jax.Array, key: jax.Array,
  ) -> tuple[Compensated, ClipAux]:  # fmt: skip
    fsdp = self.mesh.shape[FSDP]

    def on_each_device(pieces: Any, total: Compensated, some: Any, key: jax.Array) -> Any:
      mine, others = collectives.whole(pieces, (params, frozen), fsdp)
      units, mask, unit_ids = some
      part, aux = self._sum(mine, others, units, mask, unit_ids, key)
      part = collectives.scattered(part, fsdp)
      added = pairs.add(jax.tree.map(lambda x: x[0], total), part)
      return jax.tree.map(lambda x: x[None], added), aux

    spread = collectives.spread_specs(params, self.mesh)
    sums = Compensated(spread, spread)
    arrays = specs_of((params, frozen), self.mesh)
    return jax.shard_map(
      on_each_device, mesh=self.mesh, in_specs=(arrays, sums, P(AXES), P()),
      out_specs=(sums, P(AXES)), check_vma=False,
    )((params, frozen), total, (units, mask, unit_ids), key)  # fmt: skip

  def _sum(
    self, params: PyTree, frozen: PyTree, units: PyTree, mask: jax.Array, unit_ids: jax.Array,
    key: jax.Array,
  ) -> tuple[Compensated, ClipAux]:  # fmt: skip
    """Of the units of one device."""
    loss_fn = functools.partial(self.loss, frozen)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, unit_ids)
    if self.clip_norm is None:
      return _plain_sum(loss_fn, params, units, mask, keys)
    grad_fn = clipped_grad(
      loss_fn, self.clip_norm, engine=self.engine, clipping=self.clipping,
      compensated=True, memory_budget=self.memory_budget, exact=self.exact,
    )  # fmt: skip
    return grad_fn(params, units, mask, keys)

  def finish(self, state: TrainState, total: Compensated, key: jax.Array) -> TrainState:
    pair = collectives.combined(total, state.params, self.mesh, self.clip_norm)
    noised, kept = self.noise.update(pair, state.noise, key)
    mean = jax.tree.map(lambda x: x / self.expected_batch_size, noised)
    updates, opt_state = self.optimizer.update(mean, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = update_average(state.average, params, self.ema, state.step)
    after = TrainState(state.step + 1, params, opt_state, average, kept)
    return jax.lax.with_sharding_constraint(after, shardings_of(after, self.mesh))

  def whole(
    self, state: TrainState, frozen: PyTree, units: PyTree, mask: jax.Array, unit_ids: jax.Array,
    unit_key: jax.Array, noise_key: jax.Array,
  ) -> tuple[TrainState, ClipAux]:  # fmt: skip
    zero = self.zeros(state.params)
    total, aux = self.accumulate(state.params, frozen, zero, units, mask, unit_ids, unit_key)
    # Nothing is fused across, so that the halves round as they do in two calls.
    return self.finish(state, jax.lax.optimization_barrier(total), noise_key), aux


def _plain_sum(
  loss_fn: LossFn, params: PyTree, units: PyTree, mask: jax.Array, keys: jax.Array
) -> tuple[Compensated, ClipAux]:
  """The gradient of the summed losses, without clipping: for runs without privacy."""
  no_map = check_loss(loss_fn, params, *jax.tree.map(lambda x: x[0], (units, keys)))

  def total_loss(params: PyTree) -> tuple[jax.Array, jax.Array]:
    if no_map is None:
      losses = jax.vmap(loss_fn, (None, 0, 0))(params, units, keys)
    else:
      losses = jax.lax.map(lambda unit: loss_fn(params, *unit), (units, keys))
    losses = jnp.where(mask, losses, 0.0)
    return losses.sum(), losses

  grads, losses = jax.grad(total_loss, has_aux=True)(params)
  return Compensated(grads, pairs.zeros_like(params).error), ClipAux(jnp.zeros_like(losses), losses)
