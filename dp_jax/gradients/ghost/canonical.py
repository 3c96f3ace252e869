"""Brings uses of a parameter into the form that the rules take.

Each function works on a whole batch of units: operands and cotangents have a first axis B.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.ghost.rules import Contraction, Lookup
from dp_jax.gradients.ghost.structure import is_known
from dp_jax.gradients.ghost.uses import Use

_MODE = jax.lax.GatherScatterMode
# Of a gather: what becomes of rows outside of the table.
_MODES = (_MODE.CLIP, _MODE.FILL_OR_DROP, _MODE.PROMISE_IN_BOUNDS)


def is_dot(use: Use) -> bool:
  """Whether the rule for matrix products applies: one parameter operand and one of data."""
  alone = len(use.weights) == 1 and len(use.data) == 1
  return use.name == "dot_general" and alone and is_known(use.eqn)


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
  inputs = math.prod(shape[i] for i in contracting[other])
  operand = data.transpose(order).reshape(data.shape[0], blocks, tokens, inputs)
  weight_free = len(dot_roles(use)[2])
  outputs = math.prod(use.eqn.invars[side].aval.shape[i] for i in dot_roles(use)[2])
  if side == 0:  # the output has the parameter's free axes first
    first = 1 + len(batch[0])
    rest = list(range(first + weight_free, cotangent.ndim))
    axes = [*range(first), *rest, *range(first, first + weight_free)]
    cotangent = cotangent.transpose(axes)
  return Contraction(operand, cotangent.reshape(data.shape[0], blocks, tokens, outputs))


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
    and is_known(use.eqn)
    and [position for position, _ in use.weights] == [1]
    and len(use.data) == 1
    and use.eqn.params["batch_group_count"] == 1
    and math.prod(use.eqn.outvars[0].aval.shape) > 0
    and math.prod(use.eqn.invars[0].aval.shape) > 0
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

  Slices and one product are several times faster on CPUs than `conv_general_dilated_patches`.
  Entries of a patch are in the order (kernel axes, channels).
  """
  groups, positions, _, _ = conv_sizes(use)
  units = data.shape[0]
  cot = _last_channels(cotangent, use.eqn.params["dimension_numbers"].out_spec)
  patches = _windows(use, _padded(use, data))
  if groups == 1:
    operand = jnp.concatenate(patches, axis=-1).reshape(units, 1, positions, -1)
    return Contraction(operand, cot.reshape(units, 1, positions, -1))
  stacked = jnp.stack(patches, axis=-2)  # [B, n, positions..., kernel, channels]
  split = stacked.reshape(units, positions, len(patches), groups, -1)
  operand = split.transpose(0, 3, 1, 2, 4).reshape(units, groups, positions, -1)
  cot = cot.reshape(units, positions, groups, -1)
  return Contraction(operand, cot.transpose(0, 2, 1, 3))


def conv_grams(use: Use, data: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gram matrices float32[B, groups, T, T] of the patches, and their squared norms [B, groups, T].

  The product of two patches is a sum over the kernel of products of two pixels, so the Gram
  matrix of the pixels, made once, holds every term: no patches, and fewer operations by up to the
  size of the kernel.
  """
  groups, positions, _, _ = conv_sizes(use)
  x = _padded(use, data).astype(jnp.float32)
  units, side = x.shape[0], x.shape[1:-1]  # [B, n, spatial..., channels]
  pixels = jnp.moveaxis(x.reshape(units, math.prod(side), groups, -1), 2, 1)
  product = jnp.einsum("bgpk,bgqk->bgpq", pixels, pixels, precision=jax.lax.Precision.HIGHEST)
  product = product.reshape(units * groups, *side, *side, 1)
  strides, out = use.eqn.params["window_strides"], _positions(use)
  total = jnp.zeros((), jnp.float32)
  for offset in _offsets(_kernel(use)):
    begin = [i * d for i, d in zip(offset, use.eqn.params["rhs_dilation"], strict=True)]
    end = [s + (n - 1) * step + 1 for s, n, step in zip(begin, out, strides, strict=True)]
    both = ([0, 0, *begin, 0, *begin, 0], [units * groups, side[0], *end, side[0], *end, 1])
    window = jax.lax.slice(product, *both, (1, 1, *strides, 1, *strides, 1))
    total = total + window
  squares = jnp.sum(jnp.square(x.reshape(units, *side, groups, -1)), axis=-1)
  patches = sum(_windows(use, squares))
  norms = jnp.moveaxis(jnp.asarray(patches).reshape(units, positions, groups), 2, 1)
  return total.reshape(units, groups, positions, positions), norms


def conv_cotangent(use: Use, cotangent: jax.Array) -> jax.Array:
  """[B, groups, T, outputs of a group]."""
  groups, positions, _, _ = conv_sizes(use)
  cot = _last_channels(cotangent, use.eqn.params["dimension_numbers"].out_spec)
  return jnp.moveaxis(cot.reshape(cot.shape[0], positions, groups, -1), 2, 1)


def conv_pixels(use: Use) -> int:
  """Pixels of a unit's padded input."""
  params = use.eqn.params
  shape = use.eqn.invars[0].aval.shape
  spec = params["dimension_numbers"].lhs_spec
  sides = [
    (shape[i] - 1) * d + 1 + low + high
    for i, d, (low, high) in zip(spec[2:], params["lhs_dilation"], params["padding"], strict=True)
  ]
  return shape[spec[0]] * math.prod(sides)


def kernel_size(use: Use) -> int:
  """Positions of a kernel."""
  return math.prod(_kernel(use))


def skips_pixels(use: Use) -> bool:
  """Whether some pixel may be in no patch, so that norms do not see whether it is finite."""
  params = use.eqn.params
  steps = (*params["window_strides"], *params["rhs_dilation"])
  return any(d > 1 for d in steps) or any(low < 0 or high < 0 for low, high in params["padding"])


def _padded(use: Use, data: jax.Array) -> jax.Array:
  """The input with its padding and dilation: [B, n, spatial..., channels]."""
  params = use.eqn.params
  x = _last_channels(data, params["dimension_numbers"].lhs_spec)
  no_pad = [(0, 0, 0)]
  spatial = zip(params["padding"], params["lhs_dilation"], strict=True)
  config = [*no_pad * 2, *((low, high, d - 1) for (low, high), d in spatial), *no_pad]
  return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def _last_channels(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
  """[B, ...] of a layout (batch, channels, spatial...) -> [B, n, spatial..., channels]."""
  return x.transpose([0, 1 + spec[0], *(1 + i for i in spec[2:]), 1 + spec[1]])


def _kernel(use: Use) -> list[int]:
  """Sizes of the kernel's spatial axes."""
  spec = use.eqn.params["dimension_numbers"].rhs_spec
  return [use.eqn.invars[1].aval.shape[i] for i in spec[2:]]


def _positions(use: Use) -> list[int]:
  """Sizes of the output's spatial axes."""
  spec = use.eqn.params["dimension_numbers"].out_spec
  return [use.eqn.outvars[0].aval.shape[i] for i in spec[2:]]


def _windows(use: Use, x: jax.Array) -> list[jax.Array]:
  """What each entry of the kernel sees of a padded input, in the order of the kernel."""
  strides, dilation = use.eqn.params["window_strides"], use.eqn.params["rhs_dilation"]
  out = tuple(_positions(use))
  return [_window(x, offset, out, strides, dilation) for offset in _offsets(_kernel(use))]


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
  """float32[groups, kernel * channels, outputs] -> the layout of the kernel."""
  spec = use.eqn.params["dimension_numbers"].rhs_spec
  shape = use.eqn.invars[1].aval.shape
  groups, _, outputs = total.shape
  arranged = total.reshape(groups, *_kernel(use), shape[spec[1]], outputs)
  arranged = jnp.moveaxis(arranged, 0, -2)  # [spatial..., channels, groups, outputs]
  arranged = arranged.reshape(*arranged.shape[:-2], groups * outputs)
  order = (*spec[2:], spec[1], spec[0])
  return arranged.transpose([order.index(i) for i in range(len(shape))])


def is_lookup(use: Use) -> bool:
  """Whether it is a lookup of whole rows of a table, as embeddings are."""
  if use.name != "gather" or [position for position, _ in use.weights] != [0]:
    return False
  if not is_known(use.eqn) or use.eqn.params["mode"] not in _MODES:
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
  limits = jnp.iinfo(data.dtype)
  # Beyond int32, indices are outside of any table; converted they might come back inside.
  rows = jnp.clip(data, max(limits.min, -(2**31)), min(limits.max, 2**31 - 1)).astype(jnp.int32)
  rows = rows.reshape(data.shape[0], math.prod(data.shape[1:]))
  if use.eqn.params["mode"] == _MODE.CLIP:
    rows = jnp.clip(rows, 0, num_rows - 1)
  else:
    rows = jnp.where((rows >= 0) & (rows < num_rows), rows, -1)
  return Lookup(rows, cotangent.reshape(*rows.shape, width), num_rows)
