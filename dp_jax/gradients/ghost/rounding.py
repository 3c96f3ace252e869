"""How many units a plain float32 product may add before its result becomes part of a pair.

A unit that is masked out changes the partial sums that the units after it are added to, and so how
these round. Let u units be added, each by T terms an entry (tokens, positions; one for a plain
matrix product), their scaled gradients of norm at most C. An addition rounds by at most 2^-24 of
its result, whatever the order, and neighbours differ by at most both roundings, 2^-23.

* T = 1. The results of all additions, over any order of them, sum to at most u (u + 1) / 2 times C:
  neighbours differ by u (u + 1) 2^-24 C.
* T > 1. While the terms of one unit are added, the results hold the other units, k C after k of
  them, and a part of this one. That part can be larger than what is left of it, since terms cancel:
  up to its magnitude M = sum_t |x_t| |c_t|. Along the contracted axis, unit after unit, the results
  sum to at most T (u^2 / 2 + sum of M / C) times C.
* u = 1. The sum begins with this unit. What it rounds is its own, and its norm allows for it.

Norms of vectors, by Minkowski's inequality; the same for a sum over several parameters, where C
covers all of them. Half of the margin of clipping, 2^-11 C, is the bound that `units_at_a_time`
keeps: T (u^2 + 2 u M / C) <= 2^13 with M at most 2 sqrt(T) C, about twice what tokens in unlike
directions have. Where a unit of the batch has more (its tokens cancel, which is rare), all are
added one at a time. Which way is taken may hang on one unit; each way is within half of the bound
of the exact sum.
"""

import math

import jax
import jax.numpy as jnp

# In units of 2^-24 of the clip norm: half of the margin of clipping.
_ROUNDING = 2**13


def units_at_a_time(terms: int) -> int:
  """The most units that one product may add, each by so many terms an entry; at least 1."""
  if terms <= 1:
    return math.isqrt(_ROUNDING)
  a, b = terms, 2 * terms * usual_magnitude(terms)  # a u^2 + b u <= _ROUNDING
  return max(1, int((math.sqrt(b * b + 4 * a * _ROUNDING) - b) / (2 * a)))


def usual_magnitude(terms: int) -> float:
  """What a unit's terms may add up to without their signs, in units of the clip norm."""
  return 2 * math.sqrt(terms)


def usual(magnitudes: jax.Array, bound: float, terms: int) -> jax.Array:
  """Whether no unit of a batch has terms that cancel more than `units_at_a_time` allows for.

  Args:
    magnitudes: float32[B], sum_t |x_t| |c_t| of each unit, clipped.
    bound: the clip norm of the parameter.
    terms: of a unit, an entry.

  Returns:
    bool[]; False where a magnitude is not finite.
  """
  return jnp.all(magnitudes <= bound * usual_magnitude(terms))
