"""The clipped sum of a table of rows that units look up: whole numbers, exact in any order.

A row that many tokens share is a sum of as many terms, B T of them, which a scatter adds one after
the other: in float32 they can round alike, and one unit then moves the sum by more than the clip
norm. So each token's entry is first rounded to a whole multiple of a grid that depends on the clip
norm and shapes alone; multiples are added. What a unit adds is then a function of that unit,
wherever it stands and whatever the others are, and is at most T sqrt(D) half units from its
gradient: below 2^-13 of the clip norm.

A number is sum_i limb_i 2^(-coarse - i fine) of C', the clip norm rounded up to a power of two.
The first limb may wrap around while it is summed, since its last value fits: as many units as there
are, of what each adds at most. The others cannot.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated, two_sum
from dp_jax.gradients.ghost.rules import Lookup, lookup_cotangent

# The first limb: 2^12 C' fits. A token of a unit that is clipped to C is smaller, since tokens that
# cancel leave the rounding that norms allow for: (D + 4 T) 2^-24 of the square of all of them.
_COARSE = 18
# Of a tied table only the whole gradient is at most C. What is looked up may be larger, and the
# product take it away; norms allow for 2 (D + 8) 2^-24 of its square then, so that 2^12 C is never
# reached.
_TIED = 12
# What is kept of C', at least: far smaller gradients than C keep their bits too.
_BITS = 48


def clipped_sum(
  lookup: Lookup, scales: jax.Array, bound: float, *, nets: int = 1, plain: bool = False
) -> Compensated:
  """The sum over units of their scaled gradients of a table.

  Args:
    lookup: of a batch of units.
    scales: float32[B], zero for padding.
    bound: the clip norm C of the table.
    nets: 2 where this is one of several sums of the table, and a unit may add more than C to it.
    plain: give the nearest float32, without an error.

  Returns:
    Leaves float32[num_rows, D].
  """
  units, _, width = lookup.cotangent.shape
  keep = scales.reshape(-1, 1, 1)
  terms = jnp.where(keep != 0, lookup_cotangent(lookup), 0.0) * keep
  rows = jnp.where(lookup.rows < 0, lookup.num_rows, lookup.rows).reshape(-1)
  exponent = math.ceil(math.log2(bound))
  coarse, fine, count = _limbs(units, rows.size, width, nets)
  values = terms.reshape(-1, width) * np.float32(2.0 ** (coarse - exponent))
  parts = []
  for _ in range(1 + count):
    whole = jnp.round(values)
    parts.append(whole.astype(jnp.int32))
    values = (values - whole) * np.float32(2.0**fine)  # exact
  places, table_rows = _compact(rows, lookup.num_rows)
  size = lookup.num_rows if table_rows is None else rows.size
  zeros = jnp.zeros((size, (1 + count) * width), jnp.int32)
  sums = zeros.at[places].add(jnp.concatenate(parts, axis=1), mode="drop")
  total = _as_pair(jnp.split(sums, 1 + count, axis=1), fine, exponent - coarse)
  if plain:
    total = Compensated(pairs.collapse(total), None)
  if table_rows is None:
    return total
  empty = jnp.zeros((lookup.num_rows, width), jnp.float32)
  return jax.tree.map(lambda x: empty.at[table_rows].set(x, mode="drop"), total)


def _limbs(units: int, tokens: int, width: int, nets: int) -> tuple[int, int, int]:
  """Bits below C' of the first limb, bits of each further one, and how many of these.

  The first limb of the sum must fit, below 2^31: `units` times what a unit adds.

  So many tokens of all units are added; each further limb of one is at most 2^(fine - 1).
  """
  largest = 0 if nets == 1 else _TIED
  coarse = min(_COARSE, 30 - largest - math.ceil(math.log2(max(1, units))))
  fine = 31 - math.ceil(math.log2(max(2, tokens)))
  if fine < 1:
    raise UserError(f"{tokens} lookups in one sum are too many: give a smaller microbatch_size.")
  wanted = max(_BITS, 13 + math.ceil(math.log2(max(1, tokens // units) * math.sqrt(width))))
  return coarse, fine, max(1, -(-(wanted - coarse) // fine))


def _compact(rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array | None]:
  """A place for each token, so that a batch of few tokens is not summed in a large table.

  Returns:
    int32[n], the place of each token, the same for tokens of one row; and int32[n], the row of
    each place (or one past the table), or None where places are the rows themselves.
  """
  if rows.size >= num_rows:
    return rows, None
  order = jnp.argsort(rows)
  ordered = rows[order]
  rank = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]]))
  rank = rank.astype(jnp.int32)
  places = jnp.zeros_like(rank).at[order].set(rank)
  return places, jnp.full_like(rows, num_rows).at[rank].set(ordered)


def _as_pair(limbs: list[jax.Array], fine: int, exponent: int) -> Compensated:
  """The numbers as pairs, to about 2^-48 of each; the first limb is in units of 2^exponent."""
  total: Compensated | None = None
  for index, limb in enumerate(limbs):
    unit = np.float32(2.0 ** (exponent - index * fine))
    high = (limb >> 12) << 12  # 31 bits do not fit in a float32, but 19 and 12 do
    part = Compensated(*two_sum(high.astype(jnp.float32) * unit,
                                (limb - high).astype(jnp.float32) * unit))  # fmt: skip
    total = part if total is None else pairs.add(total, part)
  assert total is not None
  return total
