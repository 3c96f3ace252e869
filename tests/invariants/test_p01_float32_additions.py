"""P1 by rounding: float32 additions are bounded, whatever the arrangement of units and tokens.

Each arrangement was made to round badly: partial sums that hover at a power of two, where they
round differently with a unit and without it. One coordinate holds all; the rest is there so that
sums are products and scatters, as in a model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import lookups, rounding
from dp_jax.gradients.ghost.rules import lookup_cotangent

CLIP_NORM = 1.0
# What a unit adds that is clipped: C less the margin.
CLIPPED = CLIP_NORM * (1 - 2**-10)
HALF_MARGIN = CLIP_NORM * 2**-11
# The Gram matrices of 16 terms are the cheaper way to a norm then.
WIDTH = 32
ULP = np.float32(2**-8)


def matrix_product(params, unit, key):
  """The gradient of the first entry is the sum of the unit's numbers; T terms an entry."""
  del key
  return jnp.sum((jnp.pad(unit[:, None], ((0, 0), (0, WIDTH - 1))) @ params)[:, 0])


def embedding(params, unit, key):
  """All tokens are in one row."""
  del key
  rows = (unit > 1e9).astype(jnp.int32)
  return jnp.sum(params[rows][:, 0] * unit)


LOSSES = {matrix_product: jnp.zeros((WIDTH, WIDTH)), embedding: jnp.zeros((5, 4))}


@functools.cache
def _grad_fn(loss, engine, exact=False):
  # Without a budget gradients are not made unit by unit, but added by products.
  grad_fn = dp_jax.clipped_grad(
    loss, CLIP_NORM, engine=engine, compensated=True, memory_budget=0, exact=exact
  )
  return jax.jit(grad_fn)


def _moved(loss, units, position, engine="ghost", grad_fn=None):
  """How far blanking one unit moves the first entry."""
  grad_fn = _grad_fn(loss, engine) if grad_fn is None else grad_fn

  def total(mask):
    pair, _ = grad_fn(LOSSES[loss], jnp.asarray(units), mask)
    return float(pair.sum[0, 0]) + float(pair.error[0, 0])

  return abs(total(np.ones(len(units), bool)) - total(np.arange(len(units)) != position))


def _hovering(high, low, count, top):
  """Terms that drive two sums apart while the power of two `top` lies between them."""
  quantum = np.spacing(np.float32(top)) / np.float32(2)
  steps = [1 + ULP, -1 + ULP, -2, 2, -1 - ULP, 3, -3]
  terms = []
  for _ in range(count):
    found = []
    for step in steps:
      term = quantum * np.float32(step)
      a, b = np.float32(high + term), np.float32(low + term)
      if a >= top > b:
        found.append((a - b, -abs(float(a) - top - 4 * quantum), term, a, b))
    _, _, term, high, low = max(found)
    terms.append(term)
  return np.asarray(terms, np.float32), high, low


def _units_that_hover(count):
  """Half of the units build a partial sum just above a power of two; the others hover there."""
  top = 2.0 ** np.floor(np.log2(count / 2))
  one = np.float32(CLIPPED * (1 - 2**-12))
  units, high, low = [one], one, np.float32(0)
  while high < top:
    units.append(min(one, np.float32(top + 0.3 - high)))
    high, low = np.float32(high + units[-1]), np.float32(low + units[-1])
  rest, _, _ = _hovering(high, low, count - len(units), top)
  return np.concatenate([units, rest]).astype(np.float32)[:, None]


def _units_whose_tokens_cancel(count, tokens):
  """One of full norm, then units that add nothing: one token up, tokens that hover, one down."""
  top = 2.0 ** np.floor(np.log2(0.45 * 2**12 / np.sqrt(2 * WIDTH + 4 * tokens)))
  units = np.zeros((count, tokens), np.float32)
  units[0, 0] = CLIPPED * (1 - 2**-12)
  high, low = units[0, 0], np.float32(0)
  for unit in units[1:]:
    unit[0] = top - (float(high) + float(low)) / 2
    rest, up, down = _hovering(high + unit[0], low + unit[0], tokens - 2, top)
    unit[1:-1], unit[-1] = rest, -top
    high, low = np.float32(up + unit[-1]), np.float32(down + unit[-1])
  return units


def _tokens_that_round_up(count, tokens):
  """The last unit's tokens are each half an ulp, and a little, above a multiple of it."""
  units = np.full((count, tokens), 0.999 * CLIPPED / tokens, np.float32)
  ulp = np.spacing(np.float32(units[:-1].sum(dtype=np.float64)))
  # What the norm allows for is taken off too.
  each = CLIPPED / tokens / np.sqrt(1 + (4 + 4 * tokens) * 2.0**-24) / ulp - 0.5 - 2**-6
  whole = np.floor(each) + (np.arange(tokens) < (each - np.floor(each)) * tokens)
  units[-1] = (whole + 0.5 + 2**-6) * ulp
  return units


@pytest.mark.parametrize("count", [90, 256, 1024, 4096])
def test_units_that_hover_at_a_power_of_two(count):
  moved = _moved(matrix_product, _units_that_hover(count), 0)
  assert CLIPPED * 0.999 < moved <= CLIPPED + HALF_MARGIN


@pytest.mark.parametrize(("count", "tokens"), [(32, 128), (16, 16), (48, 3), (5, 100)])
def test_tokens_of_other_units_that_cancel(count, tokens):
  moved = _moved(matrix_product, _units_whose_tokens_cancel(count, tokens), 0)
  assert CLIPPED * 0.999 < moved <= CLIPPED + HALF_MARGIN


@pytest.mark.parametrize("engine", ["ghost", "auto", "vmap", "loop"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_tokens_that_all_round_up(loss, engine):
  assert _moved(loss, _tokens_that_round_up(64, 2048), 63, engine) <= CLIP_NORM


def _broken(loss):
  """Traced anew: two equal functions would share what jit keeps."""
  grad_fn = dp_jax.clipped_grad(loss, CLIP_NORM, engine="ghost", compensated=True, memory_budget=0)
  return jax.jit(lambda *args: grad_fn(*args))


def test_a_product_over_many_units_is_caught(monkeypatch):
  units = _units_that_hover(256)
  monkeypatch.setattr(rounding, "units_at_a_time", lambda *_: 4096)
  moved = _moved(matrix_product, units, 0, grad_fn=_broken(matrix_product))
  assert moved > CLIPPED + HALF_MARGIN


def test_units_that_are_added_together_though_their_tokens_cancel_are_caught(monkeypatch):
  units = _units_whose_tokens_cancel(16, 16)
  monkeypatch.setattr(rounding, "unusual", lambda longest, bound: longest < -bound)
  moved = _moved(matrix_product, units, 0, grad_fn=_broken(matrix_product))
  assert moved > CLIP_NORM


def test_a_scatter_in_float32_is_caught(monkeypatch):
  def scattered(lookup, scales, bound, **_):
    del bound
    cotangent = lookup_cotangent(lookup) * scales[:, None, None]
    rows = jnp.maximum(lookup.rows, 0).reshape(-1)
    table = jnp.zeros((lookup.num_rows, cotangent.shape[-1]))
    return Compensated(table.at[rows].add(cotangent.reshape(rows.size, -1)), None)

  monkeypatch.setattr(lookups, "clipped_sum", scattered)
  units = _tokens_that_round_up(64, 2048)
  assert _moved(embedding, units, 63, grad_fn=_broken(embedding)) > 1.001 * CLIP_NORM


def _tied(params, unit, key):
  """A table of one row in use: looked up and weighed by one number, multiplied by another."""
  del key
  row = params[(unit[:1] > 1e9).astype(jnp.int32)][0]
  logits = jnp.pad(unit[1:], (0, 3))[None] @ params.T
  return row[0] * unit[0] - logits[0, 0]


def _tied_sum(units, exact=False):
  grad_fn = dp_jax.clipped_grad(_tied, CLIP_NORM, engine="ghost", compensated=True, exact=exact)
  (total, error), aux = jax.jit(grad_fn)(jnp.zeros((5, 4)), jnp.asarray(units, jnp.float32))
  return float(total[0, 0]) + float(error[0, 0]), np.asarray(aux.norms)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
  ("count", "unit"), [(11, (800, 800)), (2000, (500, 500)), (4096, (3, 2.1))]
)
def test_sums_of_a_tied_table_that_are_larger_than_their_difference(count, unit, exact):
  """A unit may look up far more than C, if it multiplies with as much."""
  total, norms = _tied_sum(np.full((count, 2), unit), exact)
  assert np.all(norms < 1)
  np.testing.assert_allclose(total, count * (unit[0] - np.float32(unit[1])), rtol=1e-5, atol=1e-5)


def test_a_lookup_that_leaves_no_room_for_the_product_is_caught(monkeypatch):
  monkeypatch.setattr(lookups, "_TIED", 0)
  total, _ = _tied_sum(np.full((11, 2), 800.0))
  assert abs(total) > 1000 * CLIP_NORM


@pytest.mark.parametrize("count", [16, 24, 25, 60])
def test_few_units_of_a_tied_table_whose_sums_are_large(count):
  """The others add nothing, but their products add up to 4096, and hover there."""
  units = np.zeros((count, 2), np.float32)
  units[0, 1] = 0.998 * CLIPPED
  high, low = units[0, 1], np.float32(0)
  for unit in units[1:]:
    step = min(800, 4096 - (float(high) + float(low)) / 2)
    if step <= 1:
      break
    unit[:] = step
    high, low = np.float32(high + unit[1]), np.float32(low + unit[1])
  left = np.flatnonzero(units[:, 0] == 0)[1:]
  hovering, _, _ = _hovering(high, low, len(left), 4096)
  units[left] = hovering[:, None]
  blank = units.copy()
  blank[0] = 0
  assert abs(_tied_sum(units)[0] - _tied_sum(blank)[0]) <= CLIP_NORM


def test_two_sums_of_one_parameter_are_added_as_pairs():
  """A tied table: what a unit looks up, and what it multiplies with, cancels."""

  def tied(params, unit, key):
    del key
    row = params[(unit > 1e9).astype(jnp.int32)][:, 0]
    return jnp.sum(row * unit) - jnp.sum(jnp.pad(unit[:, None], ((0, 0), (0, 3))) @ params.T[:, :1])

  units = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (2000, 1)), jnp.float32)
  grad_fn = jax.jit(dp_jax.clipped_grad(tied, CLIP_NORM, engine="ghost", compensated=True))
  total, _ = grad_fn(jnp.zeros((5, 4)), units)
  # A unit's two terms cancel exactly. Each sum is about 1500: in float32, 2^-14 from the other.
  assert abs(float(total.sum[0, 0]) + float(total.error[0, 0])) < 1e-6


def test_looked_up_rows_do_not_depend_on_the_order_of_units():
  rng = np.random.default_rng(1)
  units = rng.standard_normal((50, 7)).astype(np.float32)
  grad_fn = _grad_fn(embedding, "ghost")
  totals = [grad_fn(LOSSES[embedding], jnp.asarray(x))[0] for x in (units, rng.permutation(units))]
  jax.tree.map(np.testing.assert_array_equal, *totals)


@pytest.mark.parametrize("terms", [1, 2, 7, 16, 50, 128, 197, 512])
@pytest.mark.parametrize("nets", [1, 2])
def test_the_bound_is_kept_and_used(terms, nets):
  """The sum of all roundings of the docstring, written out addition by addition."""
  units = rounding.units_at_a_time(terms, nets)

  def bound(units):
    if terms == 1 and nets == 1:
      inside = sum(range(1, units + 1))
    else:
      residual = 2 + nets  # of a unit in which a block of the product begins
      own = 2
      inside = terms * sum(nets * before + residual + own for before in range(units))
    tree = nets * (2 * units + 4 * units)
    alone = sum(range(1, rounding.ALONE + 1)) if nets == 1 else 0
    return 2 * 2.0**-24 * (inside + tree + alone) * CLIP_NORM

  if units > 1:
    assert bound(units) <= HALF_MARGIN * (1 + 1e-12)
  assert bound(units + 1) > 0.8 * HALF_MARGIN
