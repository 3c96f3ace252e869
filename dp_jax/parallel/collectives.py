"""All that devices say to each other in a step.

Under data parallelism: nothing while microbatches are accumulated, each device keeps a sum of its
own, and one all-reduce a step. Under fsdp, further, for each parameter that is cut: one all-gather
before, and one all-to-all after each microbatch, by which each device gets the parts of its own
piece; in a step, one all-reduce of what is cut and one of what is not.

A sum that is spread over devices has a leading axis in front of each leaf: one entry a device, or
one a row of the mesh where the leaf is cut along fsdp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.fixed_point import MAX_TERMS, from_fixed, to_fixed
from dp_jax.parallel.mesh import AXES, DATA, FSDP, cut_axis, spec_of, specs_of

PyTree = Any


def spread_specs(params: PyTree, mesh: Mesh) -> PyTree:
  """How a spread sum of the shapes of `params` lies on the mesh."""

  def leaf(x: Any) -> P:
    spec = spec_of(x, mesh)
    return P(AXES) if spec == P() else P(DATA, *spec)

  return jax.tree.map(leaf, params)


def spread_zeros(params: PyTree, mesh: Mesh) -> Compensated:
  """A spread sum of nothing; to be traced."""

  def leaf(x: jax.Array, spec: P) -> jax.Array:
    count = mesh.size if spec == P(AXES) else mesh.shape[DATA]
    zeros = jnp.zeros((count, *x.shape), jnp.float32)
    return jax.lax.with_sharding_constraint(zeros, NamedSharding(mesh, spec))

  def tree() -> PyTree:
    return jax.tree.map(leaf, params, spread_specs(params, mesh))

  return Compensated(tree(), tree())


def spread(total: Compensated, mesh: Mesh) -> Compensated:
  """A sum that was made in one place, as that of the first device; the others have nothing."""

  def leaf(x: Any, spec: P) -> jax.Array:
    count = mesh.size if spec == P(AXES) else mesh.shape[DATA]
    first = np.zeros((count, *np.shape(x)), np.float32)
    first[0] = jax.device_get(x)
    return jax.device_put(first, NamedSharding(mesh, spec))

  specs = spread_specs(total.sum, mesh)
  return Compensated(*(jax.tree.map(leaf, tree, specs) for tree in total))


def whole(tree: PyTree, like: PyTree, fsdp: int) -> PyTree:
  """Inside shard_map: the whole arrays of cut ones; `like` has their whole shapes."""

  def leaf(x: jax.Array, shaped: Any) -> jax.Array:
    axis = cut_axis(shaped.shape, fsdp)
    return x if axis is None else jax.lax.all_gather(x, FSDP, axis=axis, tiled=True)

  return jax.tree.map(leaf, tree, like)


def scattered(pair: Compensated, fsdp: int) -> Compensated:
  """Inside shard_map: each device's piece of the sum over fsdp; what is not cut stays as it is.

  Pieces are added as pairs, in the order of the devices: an ordinary reduce-scatter would drop what
  the pairs keep.
  """

  def leaf(total: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    axis = cut_axis(total.shape, fsdp)
    if axis is None:
      return total, error
    pieces = jnp.stack([jnp.stack(jnp.split(x, fsdp, axis)) for x in (total, error)], axis=1)
    pieces = jax.lax.all_to_all(pieces, FSDP, split_axis=0, concat_axis=0)
    return pairs.sum_pairs(pieces[:, 0], pieces[:, 1])

  summed = jax.tree.map(leaf, pair.sum, pair.error)
  outer = jax.tree.structure(pair.sum)
  return Compensated(*jax.tree.transpose(outer, jax.tree.structure((0, 0)), summed))


def combined(
  total: Compensated, params: PyTree, mesh: Mesh, clip_norm: float | None
) -> Compensated:
  """The sum over all devices of a spread sum, as a pair spread like the parameters.

  With clipping it is exact up to the rounding that `fixed_point` bounds; without, a plain sum.

  Raises:
    ValueError: if there are more devices than can be summed.
  """
  if mesh.size > MAX_TERMS:
    raise UserError(f"a mesh may have at most {MAX_TERMS} devices, got {mesh.size}.")
  specs = specs_of(params, mesh)
  leaves = jax.tree.leaves(specs)

  def local(spread: Compensated) -> Compensated:
    pair = jax.tree.map(lambda x: x[0], spread)
    if mesh.size == 1:
      return pair
    if clip_norm is None:
      (plain,) = _reduced(leaves, [pairs.collapse(pair)])
      return Compensated(plain, jax.tree.map(jnp.zeros_like, plain))
    fixed = to_fixed(pair, clip_norm)
    parts = _reduced(leaves, list(fixed))
    return from_fixed(type(fixed)(*parts), clip_norm)

  spread = spread_specs(params, mesh)
  return jax.shard_map(
    local, mesh=mesh, in_specs=(Compensated(spread, spread),),
    out_specs=Compensated(specs, specs), check_vma=False,
  )(total)  # fmt: skip


def _reduced(specs: list[P], trees: list[PyTree]) -> list[PyTree]:
  """Sums trees over the devices that hold parts of each leaf: one call for each kind of leaf."""
  flat = [jax.tree.leaves(tree) for tree in trees]
  summed: list[list[Any]] = [[None] * len(specs) for _ in trees]
  for axes, is_cut in ((AXES, False), ((DATA,), True)):
    chosen = [i for i, spec in enumerate(specs) if (spec != P()) == is_cut]
    if chosen:
      parts = jax.lax.psum([[leaves[i] for i in chosen] for leaves in flat], axes)
      for row, part in zip(summed, parts, strict=True):
        for i, value in zip(chosen, part, strict=True):
          row[i] = value
  return [
    jax.tree.unflatten(jax.tree.structure(tree), row)
    for tree, row in zip(trees, summed, strict=True)
  ]
