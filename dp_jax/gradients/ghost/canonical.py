"""Brings uses of a parameter into the form that the rules take.

Each function works on a whole batch of units: operands and cotangents have a first axis B.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.ghost.interpreter import Use
from dp_jax.gradients.ghost.rules import Contraction, Lookup


def is_dot(use: Use) -> bool:
  """Whether the rule for matrix products applies: one parameter operand and one of data."""
  return use.name == "dot_general" and len(use.weights) == 1 and len(use.data) == 1


def dot_roles(use: Use) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
  """Axes of the parameter operand of a dot_general: (batch, contracted, free)."""
  side = use.weights[0][0]
  contracting, batch = use.eqn.params["dimension_numbers"]
  ndim = len(use.eqn.invars[side].aval.shape)
  used = {*contracting[side], *batch[side]}
  free = tuple(i for i in range(ndim) if i not in used)
  return tuple(batch[side]), tuple(contracting[side]), free


def dot_contraction(use: Use, data: jax.Array, cotangent: jax.Array) -> Contraction:
  """A dot_general as a contraction: blocks are its batch axes, tokens the data's free axes."""
  side = use.weights[0][0]
  other = 1 - side
  contracting, batch = use.eqn.params["dimension_numbers"]
  shape = use.eqn.invars[other].aval.shape
  used = {*contracting[other], *batch[other]}
  free = [i for i in range(len(shape)) if i not in used]
  order = [0, *(1 + i for i in (*batch[other], *free, *contracting[other]))]
  blocks = math.prod(shape[i] for i in batch[other])
  tokens = math.prod(shape[i] for i in free)
  operand = data.transpose(order).reshape(data.shape[0], blocks, tokens, -1)
  weight_free = len(dot_roles(use)[2])
  if side == 0:  # the output has the parameter's free axes first
    first = 1 + len(batch[0])
    rest = list(range(first + weight_free, cotangent.ndim))
    axes = [*range(first), *rest, *range(first, first + weight_free)]
    cotangent = cotangent.transpose(axes)
  return Contraction(operand, cotangent.reshape(data.shape[0], blocks, tokens, -1))


def dot_gradient(use: Use, total: jax.Array) -> jax.Array:
  """float32[N, K, O] of a dot_general -> the layout of its parameter operand."""
  side = use.weights[0][0]
  shape = use.eqn.invars[side].aval.shape
  batch, contracted, free = dot_roles(use)
  # The operand was flattened in the data's order of contracted axes, which is that of the
  # dimension numbers on both sides.
  order = (*batch, *contracted, *free)
  arranged = total.reshape([shape[i] for i in order])
  return arranged.transpose([order.index(i) for i in range(len(shape))])


def is_convolution(use: Use) -> bool:
  """Whether the rule for convolutions applies: the kernel is the parameter."""
  return (
    use.name == "conv_general_dilated"
    and [position for position, _ in use.weights] == [1]
    and len(use.data) == 1
    and use.eqn.params["batch_group_count"] == 1
  )


def conv_sizes(use: Use) -> tuple[int, int, int, int]:
  """(groups, positions, kernel entries of one group, outputs of one group)."""
  params = use.eqn.params
  numbers, groups = params["dimension_numbers"], params["feature_group_count"]
  kernel, out = use.eqn.invars[1].aval.shape, use.eqn.outvars[0].aval.shape
  spatial = [kernel[i] for i in numbers.rhs_spec[2:]]
  positions = out[numbers.out_spec[0]] * math.prod(out[i] for i in numbers.out_spec[2:])
  inputs = kernel[numbers.rhs_spec[1]] * math.prod(spatial)
  return groups, positions, inputs, kernel[numbers.rhs_spec[0]] // groups


def conv_contraction(use: Use, data: jax.Array, cotangent: jax.Array) -> Contraction:
  """A convolution as a contraction over its patches, cut out by slices.

  Slices and one batched product are several times faster on CPUs than
  `conv_general_dilated_patches`.
  """
  params = use.eqn.params
  numbers, groups = params["dimension_numbers"], params["feature_group_count"]
  units, (_, positions, _, _) = data.shape[0], conv_sizes(use)
  # [B, n, spatial..., channels] of data and cotangent.
  x = data.transpose([0, 1 + numbers.lhs_spec[0], *(1 + i for i in numbers.lhs_spec[2:]),
                      1 + numbers.lhs_spec[1]])  # fmt: skip
  cot = cotangent.transpose([0, 1 + numbers.out_spec[0], *(1 + i for i in numbers.out_spec[2:]),
                             1 + numbers.out_spec[1]])  # fmt: skip
  no_pad = [(0, 0, 0)]
  spatial = zip(params["padding"], params["lhs_dilation"], strict=True)
  config = [*no_pad * 2, *((low, high, d - 1) for (low, high), d in spatial), *no_pad]
  x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
  kernel = [use.eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec[2:]]
  patches = [
    _window(x, offset, cot.shape[2:-1], params["window_strides"], params["rhs_dilation"])
    for offset in _offsets(kernel)
  ]
  stacked = jnp.stack(patches, axis=-1)  # [B, n, positions..., channels, kernel]
  channels = x.shape[-1] // groups
  stacked = stacked.reshape(units, positions, groups, channels * len(patches))
  cot = cot.reshape(units, positions, groups, -1)
  return Contraction(stacked.transpose(0, 2, 1, 3), cot.transpose(0, 2, 1, 3))


def _offsets(kernel: list[int]) -> list[tuple[int, ...]]:
  offsets: list[tuple[int, ...]] = [()]
  for size in kernel:
    offsets = [(*offset, i) for offset in offsets for i in range(size)]
  return offsets


def _window(
  x: jax.Array, offset: tuple[int, ...], out: tuple[int, ...], strides: Any, dilation: Any
) -> jax.Array:
  """What one entry of the kernel sees: a strided slice of the spatial axes."""
  starts = [i * d for i, d in zip(offset, dilation, strict=True)]
  limits = [s + (n - 1) * step + 1 for s, n, step in zip(starts, out, strides, strict=True)]
  full = [0, 0], list(x.shape[:2])
  return jax.lax.slice(
    x, [*full[0], *starts, 0], [*full[1], *limits, x.shape[-1]], [1, 1, *strides, 1]
  )


def conv_gradient(use: Use, total: jax.Array) -> jax.Array:
  """float32[groups, channels * kernel, outputs] -> the layout of the kernel."""
  numbers = use.eqn.params["dimension_numbers"]
  shape = use.eqn.invars[1].aval.shape
  spatial = [shape[i] for i in numbers.rhs_spec[2:]]
  groups, _, outputs = total.shape
  arranged = total.reshape(groups, shape[numbers.rhs_spec[1]], *spatial, outputs)
  arranged = jnp.moveaxis(arranged, 0, -2)  # [channels, spatial..., groups, outputs]
  arranged = arranged.reshape(*arranged.shape[:-2], groups * outputs)
  order = (numbers.rhs_spec[1], *numbers.rhs_spec[2:], numbers.rhs_spec[0])
  return arranged.transpose([order.index(i) for i in range(len(shape))])


def is_lookup(use: Use) -> bool:
  """Whether it is a lookup of whole rows of a table, as embeddings are."""
  if use.name != "gather" or [position for position, _ in use.weights] != [0]:
    return False
  if len(use.data) != 1 or len(use.eqn.invars[0].aval.shape) != 2:
    return False
  numbers, indices = use.eqn.params["dimension_numbers"], use.eqn.invars[1].aval.shape
  return (
    tuple(numbers.collapsed_slice_dims) == (0,)
    and tuple(numbers.start_index_map) == (0,)
    and not numbers.operand_batching_dims
    and tuple(numbers.offset_dims) == (len(indices) - 1,)
    and tuple(use.eqn.params["slice_sizes"]) == (1, use.eqn.invars[0].aval.shape[1])
    and indices[-1] == 1
  )


def lookup_of(use: Use, data: jax.Array, cotangent: jax.Array) -> Lookup:
  """A gather of rows; rows outside the table are clipped or dropped, as its mode says."""
  num_rows, width = use.eqn.invars[0].aval.shape
  rows = data.reshape(data.shape[0], -1).astype(jnp.int32)
  mode = jax.lax.GatherScatterMode.from_any(use.eqn.params["mode"])
  if mode == jax.lax.GatherScatterMode.CLIP:
    rows = jnp.clip(rows, 0, num_rows - 1)
  else:
    rows = jnp.where((rows >= 0) & (rows < num_rows), rows, -1)
  return Lookup(rows, cotangent.reshape(data.shape[0], -1, width), num_rows)
