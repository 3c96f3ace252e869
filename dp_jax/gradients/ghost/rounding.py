"""How many units a plain float32 product may add before its result becomes part of a pair.

A unit that is masked out changes the partial sums that the units after it are added to, and so how
these round. Let u units be added, each by T terms an entry (tokens, positions; one for a plain
matrix product), their scaled gradients of norm at most C. An addition rounds by at most 2^-24 of
its result, so neighbours differ by at most 2^-23 of all results together, as norms of vectors.

* T = 1. Over any order of additions the results sum to at most u (u + 1) / 2 times C: neighbours
  differ by u (u + 1) 2^-24 C.
* T > 1. While the terms of one unit are added, one after the other along the contracted axis, the
  results hold the units before it and a part of this one, which may be larger than the whole, since
  terms cancel. Let no part of a unit be above 2 C (`longest_parts`). Where a product is cut into
  blocks of the contracted axis, a block may begin within a unit, and hold at most 3 C of it. So the
  results sum to T (u^2 / 2 + 5 u) times C, and neighbours differ by T (u^2 + 10 u) 2^-24 C.
* Units of larger parts are added alone. A sum that begins with a unit rounds what is its own, and
  its norm allows for that.
* A few products, and a few units alone, are added without pairs: `TREE` products of u units by a
  small tree, 12 u 2^-24 C, and n units alone, n (n + 1) 2^-24 C.

Where the product is one of several sums of a parameter (a tied table), its sum of a unit may be
larger than C: up to 2 C, and a block hold 4 C of it, where units are added together; far larger
where they are added alone, and then always as pairs, as the several sums are. The bound is half of
the margin of clipping, 2^-11 C, and covers a sum over all parameters, since C does.
"""

import jax

# Half of the margin of clipping, in units of 2^-24 of the clip norm.
_BOUND = 2**13
# How many products of `units_at_a_time` units are added by a tree.
TREE = 4
# How many units may be added alone without pairs.
ALONE = 24
# What a part of a unit's terms may be, in units of the clip norm, for it not to be added alone.
LONGEST = 2.0


def units_at_a_time(terms: int, nets: int = 1) -> int:
  """The most units that one product may add; at least 1.

  Args:
    terms: of a unit, an entry.
    nets: 2 where the product is one of several sums of a parameter, else 1.
  """
  units = 1
  while _differ(units + 1, terms, nets) <= _BOUND:
    units += 1
  return units


def _differ(units: int, terms: int, nets: int) -> int:
  """By how much neighbours differ, in units of 2^-24 of the clip norm."""
  inside = units if terms == 1 and nets == 1 else (8 + 2 * nets) * units * terms
  alone = ALONE * (ALONE + 1) if nets == 1 else 0
  return nets * (terms * units**2 + 12 * units) + inside + alone


def unusual(longest: jax.Array, bound: float) -> jax.Array:
  """bool[B], which units must be added alone; those of parts that are not finite are among them.

  Args:
    longest: float32[B], of each unit, clipped.
    bound: the clip norm.
  """
  return ~(longest <= LONGEST * bound)
