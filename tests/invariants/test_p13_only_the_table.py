"""P13: only the rows of the table exist, and each accounts for what really differs.

What really differs is integrated here from the two densities, without an accountant: under
replace_one the sums of neighbours are two clip norms apart, and under the others one.
"""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from dp_accounting.privacy_accountant import NeighboringRelation as Relation
from scipy import stats

from dp_jax.privacy import FixedSize, FullBatch, Mechanism, Poisson, Stream, TruncatedPoisson
from dp_jax.privacy.sampling.schemes import rows
from dp_jax.privacy.spec import ADJACENCIES

NOISE, RATE, DELTA = 3.0, 0.25, 1e-5
SCHEMES = [
  FullBatch(),
  Poisson(RATE),
  TruncatedPoisson(RATE, 80, 100),
  FixedSize(25, 100),
  Stream(100, 100),
]


def true_delta(epsilon: float, rate: float, adjacency: str) -> float:
  """One step's delta: N(0, s^2), and with probability `rate` the unit shifts it.

  Neighbours without the unit do not shift; under replace_one they shift the other way.
  """
  x = np.linspace(-45, 45, 300_001)
  centre = stats.norm.pdf(x, 0, NOISE)
  here = (1 - rate) * centre + rate * stats.norm.pdf(x, 1, NOISE)
  there = centre
  if adjacency == "replace_one":
    there = (1 - rate) * centre + rate * stats.norm.pdf(x, -1, NOISE)
  gaps = [here - math.exp(epsilon) * there, there - math.exp(epsilon) * here]
  return max(np.maximum(gap, 0).sum() * (x[1] - x[0]) for gap in gaps)


def rate_of(sampling) -> float:
  return 1.0 if sampling.name == "stream" else sampling.sampling_rate


ROWS_AND_ACCOUNTANTS = [
  (sampling, row.adjacency, accountant)
  for row in rows()
  for sampling in SCHEMES
  if sampling.name == row.scheme
  for accountant in row.accountants
]


@pytest.mark.parametrize(("sampling", "adjacency", "accountant"), ROWS_AND_ACCOUNTANTS)
def test_each_row_covers_what_really_differs(sampling, adjacency, accountant):
  epsilon = Mechanism(sampling, NOISE, 1, 1.0, adjacency, accountant).epsilon(DELTA)
  found = true_delta(epsilon, rate_of(sampling), adjacency)
  assert found <= DELTA * (1 + 1e-6)
  # Exact accountants do not waste delta either; those of fixed-size batches and RDP are loose.
  if accountant != "rdp":
    assert found >= 0.98 * DELTA


def spends(event: dp_accounting.DpEvent, relation: Relation, accountant: str) -> float:
  """The true delta at the epsilon that a hand-made event gives, for a replaced unit."""
  if accountant == "pld":
    epsilon = pld.PLDAccountant(relation).compose(event).get_epsilon(DELTA)
  else:
    epsilon = rdp.RdpAccountant(None, relation).compose(event).get_epsilon(DELTA)
  return true_delta(epsilon, 1.0, "replace_one")


def test_replace_one_not_doubled_or_doubled_twice_is_caught():
  gaussian, halved = (dp_accounting.GaussianDpEvent(each) for each in (NOISE, NOISE / 2))

  def right(found):
    return 0.98 * DELTA <= found <= DELTA * (1 + 1e-3)

  assert right(spends(halved, Relation.ADD_OR_REMOVE_ONE, "pld"))
  assert right(spends(gaussian, Relation.REPLACE_ONE, "pld"))
  # The broken variants: PLD doubles under REPLACE_ONE already, and RDP never does.
  assert not right(spends(halved, Relation.REPLACE_ONE, "pld"))
  assert not right(spends(gaussian, Relation.ADD_OR_REMOVE_ONE, "pld"))
  assert spends(gaussian, Relation.REPLACE_ONE, "rdp") > 10 * DELTA
  assert spends(halved, Relation.REPLACE_ONE, "rdp") <= DELTA


def test_anything_else_is_refused():
  there = {(row.scheme, row.adjacency) for row in rows()}
  refused = 0
  for sampling, adjacency in itertools.product(SCHEMES, ADJACENCIES):
    if (sampling.name, adjacency) in there:
      Mechanism(sampling, NOISE, 1, adjacency=adjacency)
      continue
    with pytest.raises(ValueError, match="nearest row"):
      Mechanism(sampling, NOISE, 1, adjacency=adjacency)
    refused += 1
  assert (len(there), refused) == (10, 5)


def test_other_accountants_are_refused():
  for sampling, row in itertools.product(SCHEMES, rows()):
    if sampling.name != row.scheme:
      continue
    for accountant in {"pld", "rdp", "analytic_gaussian"} - set(row.accountants):
      with pytest.raises(ValueError, match="nearest that can"):
        Mechanism(sampling, NOISE, 1, 1.0, row.adjacency, accountant)
