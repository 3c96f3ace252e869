"""A standard normal that keeps its tails and leaves no lattice, in float32 arithmetic.

`jax.random.normal` in float32 starts from a uniform of 23 bits: it never returns more than 5.42 in
magnitude, and takes few distinct values. As privacy noise the first makes the true delta of a
single full-batch step at epsilon 10 more than a hundred times the promised 1e-6, and the second
lets "the sum was exactly zero" show through. This sampler is Box-Muller with

* a radius from a 76-bit uniform, fine near both ends, so that |z| reaches 10.26;
* an angle from 40 bits, reduced to an eighth of the circle, so that sines near zero keep their
  relative precision;
* 6 bits of dither below the last place of the float32, returned as a second float.

Box and Muller 1958; the attack on float lattices is Mironov 2012, "On significance of the least
significant bits for differential privacy".
"""

import math

import jax
import jax.numpy as jnp

_ANGLE_SPAN = 2**29  # the top three bits of the first angle word choose the eighth of the circle


def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Draws standard normals as unevaluated pairs.

  Args:
    key: one typed key.
    shape: the shape of the draw.

  Returns:
    (high, low), float32 of `shape`: the draw is high + low, |low| at most half an ulp of high.
    The values depend on key and shape only, not on how the result is sharded.
  """
  full = shape or (1,)
  half = (*full[:-1], -(-full[-1] // 2))
  first, second = jax.random.split(key)
  high, low = from_bits(*_two_words(first, half), *_two_words(second, half))

  def interleave(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, -1).reshape(*half[:-1], 2 * half[-1])
    return x[..., : full[-1]].reshape(shape)

  return interleave(high), interleave(low)


def _two_words(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Two uint32 random words an entry; generated where the entry is, under any sharding.

  `jax.random.bits` folds the two words of each threefry block into one. The keys of a split are
  whole blocks, and so the same 64 bits at half the cost.
  """
  if jax.random.key_impl(key) == "threefry2x32":
    blocks = jax.random.key_data(jax.random.split(key, shape))
    return blocks[..., 0], blocks[..., 1]
  words = jax.random.bits(key, (2, *shape), jnp.uint32)
  return words[0], words[1]


def from_bits(
  radius_high: jax.Array, radius_low: jax.Array, angle: jax.Array, rest: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Two independent normals from four uint32 words: float32[2, ...] high and low.

  The words are 64 bits of the radius, 32 of the angle, and, from the top, 8 more of the angle, 12
  more of the radius and twice 6 of dither.
  """
  radius = _radius(radius_high, radius_low, (rest >> 12) & 0xFFF)
  cosine, sine = _circle(angle, rest >> 24)
  high = jnp.stack([radius * cosine, radius * sine])
  dither = jnp.stack([(rest >> 6) & 0x3F, rest & 0x3F]).astype(jnp.float32)
  return high, ((dither + 0.5) / 64 - 0.5) * _ulp(high)


def _radius(high: jax.Array, low: jax.Array, lowest: jax.Array) -> jax.Array:
  """sqrt(-2 ln U) for U = (2^44 high + 2^12 low + lowest + 1/2) / 2^76; lowest has 12 bits."""
  below_half = high < jnp.uint32(2**31)
  # V = min(U, 1 - U), with full relative precision in float32 however small it is.
  v_high = jnp.where(below_half, high, ~high).astype(jnp.float32)
  v_low = jnp.where(below_half, low, ~low).astype(jnp.float32)
  v_lowest = jnp.where(below_half, lowest, 0xFFF - lowest).astype(jnp.float32)
  v = v_high * 2.0**-32 + (v_low * 2.0**-64 + (v_lowest + 0.5) * 2.0**-76)
  return jnp.sqrt(-2 * jnp.where(below_half, jnp.log(v), jnp.log1p(-v)))


def _circle(word: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A uniform point on the circle from 32 + 8 bits: (cosine, sine), float32."""
  fraction = (word & (_ANGLE_SPAN - 1)).astype(jnp.float32)
  fraction = (fraction + (extra.astype(jnp.float32) + 0.5) / 256) / _ANGLE_SPAN
  a, b = _cosine_and_sine(fraction * (math.pi / 4))
  swap = (word >> 31) == 1
  cosine, sine = jnp.where(swap, b, a), jnp.where(swap, a, b)
  cosine = jnp.where((word >> 30) & 1 == 1, -cosine, cosine)
  return cosine, jnp.where((word >> 29) & 1 == 1, -sine, sine)


def _cosine_and_sine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(cos x, sin x) for x in [0, pi/4], by Taylor's series: far cheaper than a general argument.

  The terms that are left out are below 2e-10 of the cosine and 3e-9 of the sine, a twentieth of
  float32's rounding; with the rounding of the sums, both are within 1.1 ulp.
  """
  square = x * x
  cosine = _series(square, [1 / math.factorial(n) for n in range(0, 12, 2)])
  return cosine, x * _series(square, [1 / math.factorial(n) for n in range(1, 11, 2)])


def _series(square: jax.Array, terms: list[float]) -> jax.Array:
  """terms[0] - terms[1] square + terms[2] square^2 - ..., from the smallest on."""
  total = jnp.full_like(square, terms[-1])
  for term in reversed(terms[:-1]):
    total = term - square * total
  return total


def _ulp(x: jax.Array) -> jax.Array:
  """The spacing of float32 at x: the exponent bits alone, times 2^-23."""
  exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
  return jax.lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-23
