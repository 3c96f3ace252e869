"""Rules: norm and clipped sum of the per-unit gradients of one kind of use.

For each unit of a batch, a *contraction* is a parameter's gradient as a sum of outer products
sum_t x_t (x) c_t of operands and cotangents: matrix products, convolutions (x are patches) and
embeddings (x are one-hot rows, never made). Its squared norm is computed from Gram matrices,
sum_ts (x_t . x_s)(c_t . c_s), or by making the sum, whichever is cheaper.

A norm is an upper bound. Both forms cancel: with activations of 200 and tokens that cancel, a
rounded Gram sum can come out far too small, or negative. So the worst rounding error is added,
n 2^-24 times the same sum of magnitudes, and the magnitudes are those of the tokens' norms. Here n
counts the rounding of the norm itself and, with T terms once more, that of the clipped sum, which
adds the same tokens in float32.

Everything is scaled before it is squared: gradients of 1e-30 and 1e30 have norms in float32, and
their squares do not.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dp_jax.gradients.engines.norms import sum_of_squares
from dp_jax.gradients.ghost.tokens import by_tokens

_UNIT_ROUNDOFF = 2.0**-24
_HIGHEST = jax.lax.Precision.HIGHEST
# Scales stay in a range where neither they nor their reciprocals vanish.
_SMALLEST, _LARGEST = 2.0**-120, 2.0**120


@dataclasses.dataclass(frozen=True)
class Contraction:
  """Gradients sum_t x_t (x) c_t of a batch of units.

  Attributes:
    operand: float[B, N, T, K]; N are independent blocks (batch axes of the product, groups).
    cotangent: float[B, N, T, O].
  """

  operand: jax.Array
  cotangent: jax.Array

  @property
  def sizes(self) -> tuple[int, int, int, int]:
    """(N, T, K, O)."""
    _, blocks, tokens, inputs = self.operand.shape
    return blocks, tokens, inputs, self.cotangent.shape[-1]


def gram_is_cheaper(blocks: int, tokens: int, inputs: int, outputs: int) -> bool:
  """Whether Gram matrices cost fewer operations than the gradients themselves."""
  del blocks  # both costs are proportional to it
  return tokens * (inputs + outputs) <= inputs * outputs


def norms(c: Contraction) -> jax.Array:
  """Upper bounds of the norms, float32[B]."""
  x, cot, scale = _scaled(c)
  return scale * jnp.sqrt(_squared_norms(x, cot))


def _scaled(c: Contraction) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Operand and cotangent with entries of at most 1, and the scale float32[B] of their product."""
  x, cot = c.operand.astype(jnp.float32), c.cotangent.astype(jnp.float32)
  # Token by token: one may have the large operand, and another the large cotangent.
  largest = _largest(x, (3,))
  x, cot = x / largest, cot * largest
  scale = _largest(cot, (1, 2, 3))
  return x, cot / scale, scale.reshape(-1)


def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  found = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
  return jnp.clip(found, _SMALLEST, _LARGEST)


def fast_norms(c: Contraction) -> tuple[jax.Array, jax.Array]:
  """As `norms`, without the scaling and its copies.

  Returns:
    (norms, slack), float32[B]. The true norm is at most norm + slack: squares below the range of
    float32 vanish. Where squares are above it, the norm is infinite or the slack NaN.
  """
  x, cot = c.operand.astype(jnp.float32), c.cotangent.astype(jnp.float32)
  slack = _slack(_squares(x), x.shape[-1], _squares(cot), cot.shape[-1])
  return jnp.sqrt(_squared_norms(x, cot)), slack


def fast_norms_of_grams(
  grams: jax.Array, squares: jax.Array, inputs: int, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The same from the Gram matrices [B, N, T, T] of the operand and its squared norms [B, N, T]."""
  cot = cotangent.astype(jnp.float32)
  total = _gram_norms(grams, squares, inputs, cot)
  return jnp.sqrt(total), _slack(squares, inputs, _squares(cot), cot.shape[-1])


def _slack(x: jax.Array, inputs: int, cot: jax.Array, outputs: int) -> jax.Array:
  """float32[B], from squared norms of tokens [B, N, T]: what may vanish when they are squared.

  A square below 2^-126 counts as zero, so a norm of n entries misses at most sqrt(n) 2^-63; the
  product of two Gram matrices misses no more in the root, and one 2^-63 a token.
  """
  x, cot = jnp.sqrt(x), jnp.sqrt(cot)
  parts = 1.0 + math.sqrt(outputs) * x + math.sqrt(inputs) * cot
  return 2.0**-61 * jnp.sum(parts, axis=(1, 2))


def _squared_norms(x: jax.Array, cot: jax.Array) -> jax.Array:
  """float32[B, N, T, K] and [B, N, T, O] -> upper bounds of the squared norms, float32[B]."""
  blocks, tokens, inputs, outputs = *x.shape[1:], cot.shape[-1]
  if tokens == 1:
    # One outer product: a product of two norms, without cancellation.
    return jnp.sum(_squares(x) * _squares(cot), axis=(1, 2))
  if gram_is_cheaper(blocks, tokens, inputs, outputs):
    return _gram_norms(_gram(x, x), _squares(x), inputs, cot)
  magnitude = jnp.sum(jnp.sqrt(_squares(x) * _squares(cot)), axis=2)  # [B, N]
  grads = gradients(Contraction(x, cot))
  found = jnp.sqrt(_squares(grads.reshape(*grads.shape[:2], inputs * outputs)))
  return jnp.sum(jnp.square(found + 2 * tokens * _UNIT_ROUNDOFF * magnitude), axis=1)


def _gram_norms(grams: jax.Array, squares: jax.Array, inputs: int, cot: jax.Array) -> jax.Array:
  """Squared norms float32[B] from the operand's Gram matrices and squared norms of tokens."""
  tokens, outputs = cot.shape[2:]
  magnitude = jnp.sum(jnp.sqrt(squares * _squares(cot)), axis=2)  # [B, N]
  total = _sum_of_pairs(grams * _gram(cot, cot))
  error = (inputs + outputs + 4 * tokens) * _UNIT_ROUNDOFF * jnp.square(magnitude)
  return jnp.sum(jnp.maximum(total, 0.0) + error, axis=1)


def longest_parts(c: Contraction) -> jax.Array:
  """The largest norm of sum_{t < s} x_t (x) c_t over s, of each unit, float32[B]: an upper bound.

  With H_ts = (x_t . x_s)(c_t . c_s), the square of a part is the sum of H over its own terms. The
  Gram matrices are those of the norm.
  """
  x, cot = c.operand.astype(jnp.float32), c.cotangent.astype(jnp.float32)
  gram = _gram(x, x) * _gram(cot, cot)
  terms = gram.shape[-1]
  before = np.tril(np.full((terms, terms), 2.0, np.float32), -1) + np.eye(terms, dtype=np.float32)
  squares = jnp.cumsum(jnp.sum(gram * before, axis=-1), axis=-1)
  squares = jnp.max(squares, axis=-1, initial=0.0)
  slack = _slack(_squares(x), x.shape[-1], _squares(cot), cot.shape[-1])
  return jnp.sqrt(jnp.sum(squares, axis=-1)) + slack


def magnitudes(c: Contraction) -> jax.Array:
  """sum_t |x_t| |c_t| of each unit, float32[B]: what its gradient is at most, without any sign."""
  x, cot, scale = _scaled(c)
  by_block = jnp.sum(jnp.sqrt(_squares(x) * _squares(cot)), axis=2)
  return scale * jnp.sqrt(jnp.sum(jnp.square(by_block), axis=1))


def gradients(c: Contraction) -> jax.Array:
  """Each unit's gradient, float32[B, N, K, O]."""
  x, cot = c.operand.astype(jnp.float32), c.cotangent.astype(jnp.float32)
  return jnp.einsum("bntk,bnto->bnko", x, cot, precision=_HIGHEST)


def summed(c: Contraction, dtype: DTypeLike = jnp.float32) -> jax.Array:
  """The sum of all units' gradients, [N, K, O] of the dtype in which they are added."""
  x, cot = c.operand.astype(dtype), c.cotangent.astype(dtype)
  blocks, tokens, inputs, outputs = c.sizes
  if blocks == 1:
    tokens *= x.shape[0]
    x, cot = x.reshape(tokens, inputs), cot.reshape(tokens, outputs)
    return jnp.einsum("tk,to->ko", x, cot, precision=_HIGHEST)[None]
  return jnp.einsum("bntk,bnto->nko", x, cot, precision=_HIGHEST)


def concatenate(contractions: list[Contraction]) -> Contraction:
  """The contraction of a parameter that is used several times in the same way."""
  return Contraction(
    jnp.concatenate([c.operand.astype(jnp.float32) for c in contractions], axis=2),
    jnp.concatenate([c.cotangent.astype(jnp.float32) for c in contractions], axis=2),
  )


@dataclasses.dataclass(frozen=True)
class Lookup:
  """Gradients of a table of rows: sum_t onehot(id_t) (x) c_t of a batch of units.

  Attributes:
    rows: int32[B, T]; a negative one is a lookup outside the table, without gradient.
    cotangent: float[B, T, D].
    num_rows: rows of the table.
  """

  rows: jax.Array
  cotangent: jax.Array
  num_rows: int


def lookup_norms(lookup: Lookup) -> jax.Array:
  """Upper bounds of the norms, float32[B]: repeated rows add up before the square."""
  cot = lookup_cotangent(lookup)
  scale = _largest(cot, (1, 2))
  return scale.reshape(-1) * jnp.sqrt(_lookup_squared_norms(lookup.rows, cot / scale))


def fast_lookup_norms(lookup: Lookup) -> tuple[jax.Array, jax.Array]:
  """(norms, slack) as of `fast_norms`."""
  cot = lookup_cotangent(lookup)
  lengths = jnp.sqrt(_squares(cot))
  slack = 2.0**-61 * jnp.sum(1.0 + math.sqrt(cot.shape[-1]) + lengths, axis=1)
  return jnp.sqrt(_lookup_squared_norms(lookup.rows, cot)), slack


def _lookup_squared_norms(rows: jax.Array, cot: jax.Array) -> jax.Array:
  tokens, width = cot.shape[1:]
  magnitude = jnp.sum(jnp.sqrt(_squares(cot)), axis=1)

  def of_some(some_rows: jax.Array, some_cot: jax.Array) -> jax.Array:
    same = some_rows[:, :, None] == rows[:, None, :]
    return jnp.sum(jnp.where(same, _gram(some_cot, cot), 0.0), axis=2)

  sums = by_tokens(of_some, (rows, cot), tokens)
  total = jnp.sum(jax.lax.optimization_barrier(sums), axis=1)
  error = (width + 4 * tokens) * _UNIT_ROUNDOFF * jnp.square(magnitude)
  return jnp.maximum(total, 0.0) + (error if tokens > 1 else 0.0)


def tied_norms(lookup: Lookup, product: Contraction) -> jax.Array:
  """Upper bounds for a table that is looked up and multiplied with: both terms and the cross term.

  Args:
    lookup: of the table [V, D].
    product: operand [B, 1, T, D] and cotangent [B, 1, T, V], the gradient of its rows.

  Returns:
    float32[B]; |A + B|^2 = |A|^2 + |B|^2 + 2 <A, B>, where the cross term needs the cotangent of
    the looked-up columns only.
  """
  x, logits, product_scale = _scaled(product)
  cot = lookup_cotangent(lookup)
  lookup_scale = _largest(cot, (1, 2))
  cot, lookup_scale = cot / lookup_scale, lookup_scale.reshape(-1)
  scale = jnp.maximum(product_scale, lookup_scale)
  ratios = product_scale / scale, lookup_scale / scale
  return scale * jnp.sqrt(_tied_squared_norms(lookup, cot, x, logits, ratios))


def fast_tied_norms(lookup: Lookup, product: Contraction) -> tuple[jax.Array, jax.Array]:
  """(norms, slack) as of `fast_norms`."""
  x, logits = product.operand.astype(jnp.float32), product.cotangent.astype(jnp.float32)
  cot = lookup_cotangent(lookup)
  _, slack = fast_lookup_norms(lookup)
  slack += _slack(_squares(x), x.shape[-1], _squares(logits), logits.shape[-1])
  # The cross term misses no more in the root than both together.
  one = jnp.ones(cot.shape[0], jnp.float32)
  return jnp.sqrt(_tied_squared_norms(lookup, cot, x, logits, (one, one))), 2 * slack


def _tied_squared_norms(
  lookup: Lookup,
  cot: jax.Array,
  x: jax.Array,
  logits: jax.Array,
  ratios: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """Squared norms float32[B], of a product scaled by the first ratio and a lookup by the second."""
  product_square = jnp.square(ratios[0]) * _squared_norms(x, logits)
  lookup_square = jnp.square(ratios[1]) * _lookup_squared_norms(lookup.rows, cot)
  cross, error = _cross_term(lookup, cot, x[:, 0], logits[:, 0])
  cross, error = cross * ratios[0] * ratios[1], error * ratios[0] * ratios[1]
  return jnp.maximum(product_square + lookup_square + 2 * cross, 0.0) + 2 * error


def _cross_term(
  lookup: Lookup, cot: jax.Array, x: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """<A, B> of lookup and product, and a bound of its rounding error."""
  rows = jnp.maximum(lookup.rows, 0)

  def of_some(some_x: jax.Array, some_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    columns = jnp.take_along_axis(some_logits, rows[:, None, :], axis=2)  # [B, T, S]
    sums = jnp.sum(columns * _gram(some_x, cot), axis=2)
    return sums, jnp.max(jnp.abs(columns), axis=2, initial=0.0)

  sums, largest = by_tokens(of_some, (x, logits), rows.shape[1])
  cross = jnp.sum(jax.lax.optimization_barrier(sums), axis=1)
  tokens, width = cot.shape[1:]
  magnitude = jnp.sum(jnp.sqrt(_squares(x)), axis=1) * jnp.sum(jnp.sqrt(_squares(cot)), axis=1)
  largest = jnp.max(largest, axis=1, initial=0.0)
  error = (width + 4 * tokens + 4 * x.shape[1]) * _UNIT_ROUNDOFF * magnitude * largest
  return cross, error


def lookup_cotangent(lookup: Lookup) -> jax.Array:
  """float32[B, T, D], zero for lookups outside the table."""
  inside = (lookup.rows >= 0)[:, :, None]
  return jnp.where(inside, lookup.cotangent.astype(jnp.float32), 0.0)


def _squares(x: jax.Array) -> jax.Array:
  """float32[..., n] -> float32[...]."""
  return sum_of_squares(x.reshape(math.prod(x.shape[:-1]), x.shape[-1])).reshape(x.shape[:-1])


def _sum_of_pairs(x: jax.Array) -> jax.Array:
  """float32[..., T, S] -> float32[...]; two sums, of T and of S terms, that are not merged."""
  return jnp.sum(jax.lax.optimization_barrier(jnp.sum(x, axis=-1)), axis=-1)


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
  """[..., T, K] -> [..., T, T]."""
  return jnp.einsum("...tk,...sk->...ts", x, y, precision=_HIGHEST)


def flops(kind: str, sizes: tuple[int, int, int, int]) -> int:
  """Floating-point operations a unit of the norm, by rule."""
  blocks, tokens, inputs, outputs = sizes
  if kind == "outer product":
    return 2 * blocks * (inputs + outputs)
  if kind == "gram":
    return 2 * blocks * tokens * tokens * (inputs + outputs)
  return 2 * blocks * tokens * inputs * outputs
