"""Whole solvers on neighbouring data: what each release moves by, and that nothing else is used.

The noised answers that a solver got on one data set are given to it on its neighbours too. Then
each sum before its noise may differ by the bound that is accounted for, and the head not by a bit:
it is a function of the releases alone.
"""

import dataclasses

import jax
import numpy as np
import pytest

from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.shares import Part
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers import feature_covariance, head, least_squares, newton
from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.feature_units import Rows, array_data
from dp_jax.solvers.head import Preprocessing
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.noised import Releases
from dp_jax.solvers.solve import plan

UNITS, K, D, CLASSES = 40, 3, 6, 3
FACTORS = {"zero_out": 1.0, "add_or_remove_one": 1.0, "replace_one": 2.0}
BEFORE = Preprocessing(power=0.5, centre_share=0.1)
STEPS = Descent(steps=3, clip_norm=0.1, learning_rate=1.0, bias=True, average=0.67)
METHODS = {
  # So that the noised eigenvalue matters.
  "least_squares": LeastSquares(BEFORE, moment_share=0.1, eigenvalue_share=0.6, ridge=3.0),
  "newton": Newton(BEFORE, steps=2, clip_norm=0.5),
  "feature_covariance": FeatureCovariance(BEFORE, STEPS),
  "gradient_descent": FeatureCovariance(Preprocessing(), STEPS, moment_share=0.0),
}


class Replayed:
  """Takes the place of `Releases`: keeps the sums, and answers as it did on the first data."""

  def __init__(self, mechanisms, answers):
    self.mechanisms, self.sums, self._answers = mechanisms, {}, answers
    self._releases = Releases(mechanisms, MasterKey(bytes(range(32))))

  @property
  def exact(self):
    return self._releases.exact

  def vector(self, purpose, total, step=0):
    leaves = zip(*map(jax.tree.leaves, total), strict=True)
    parts = [np.ravel(np.add(s, e, dtype=np.float64)) for s, e in leaves]
    return self._answer("vector", purpose, total, step, np.concatenate(parts))

  def symmetric(self, purpose, total, step=0):
    upper = np.triu(np.add(total.sum, total.error, dtype=np.float64))
    whole = upper + np.triu(upper, 1).swapaxes(-1, -2)
    return self._answer("symmetric", purpose, total, step, whole)

  def scalar(self, purpose, value, step=0):
    return self._answer("scalar", purpose, value, step, np.asarray(value))

  def _answer(self, name, purpose, total, step, exact):
    assert (purpose, step) not in self.sums
    self.sums[purpose, step] = exact
    if (purpose, step) not in self._answers:
      self._answers[purpose, step] = getattr(self._releases, name)(purpose, total, step)
    return self._answers[purpose, step]


def _units():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((UNITS, K, D)).astype(np.float32)
  x[1] *= 1e30
  x[2, 0], x[3, 1], x[4] = np.nan, np.inf, 0
  x[5] *= 1e-30
  x[6:20] = x[6, 0]
  labels = rng.integers(0, CLASSES, (UNITS, K)).astype(np.int32)
  labels[6:20] = 1
  labels[7, 1] = 99
  real = rng.random((UNITS, K)) < 0.7
  real[1:4], real[6:20], real[38] = True, True, False
  return x, labels, real


def _neighbours(adjacency):
  """The data, and some that differ in one unit."""
  whole = _units()
  yield whole
  x, labels, real = whole
  for unit in (0, 1, 2, 6, 7, UNITS - 1):
    a, b, c = x.copy(), labels.copy(), real.copy()
    if adjacency == "zero_out":
      c[unit] = False
    elif adjacency == "replace_one":
      a[unit], b[unit], c[unit] = -2 * a[6], (b[unit] + 1) % CLASSES, True
    elif unit:
      a, b, c = (np.delete(each, unit, axis=0) for each in whole)
    else:  # one more, in front of all
      a, b, c = (np.concatenate([each[6:7], each]) for each in whole)
    yield a, b, c


def _solved(method, adjacency, units, answers):
  """(the arrays of the head, the sums before noise) of a method."""
  x, labels, real = units
  secret = adjacency == "add_or_remove_one"
  data = array_data(
    x, labels, CLASSES, record_mask=real, shard_size=16, num_units=UNITS if secret else None
  )
  spec = PrivacySpec(20.0, 1e-4, adjacency=adjacency)
  releases = Replayed(plan(method, spec, float(UNITS) if secret else None), answers)
  found = method.solve(data, releases)
  planned = {(p, step) for p, each in releases.mechanisms.items() for step in range(each.steps)}
  assert set(releases.sums) == planned
  return found.arrays(), releases


def _check(method, adjacency, neighbours=None):
  """Largest movement of each purpose as a share of what is accounted; the head stays as it is."""
  answers, moved, whole = {}, {}, None
  for units in neighbours or _neighbours(adjacency):
    arrays, releases = _solved(method, adjacency, units, answers)
    if whole is None:
      whole, sums = arrays, releases.sums
    for name, value in arrays.items():
      np.testing.assert_array_equal(value, whole[name], err_msg=name)
    for (purpose, step), value in releases.sums.items():
      bound = FACTORS[adjacency] * releases.mechanisms[purpose].clip_norm
      share = np.linalg.norm(np.ravel(value - sums[purpose, step])) / bound
      moved[purpose] = max(share, moved.get(purpose, 0.0))
  return moved


@pytest.mark.parametrize("adjacency", FACTORS)
@pytest.mark.parametrize("name", METHODS)
def test_one_unit_moves_each_release_by_what_is_accounted_and_nothing_else(name, adjacency):
  moved = _check(METHODS[name], adjacency)
  assert max(moved.values()) <= 1, moved
  if adjacency != "replace_one":  # of two units at the bounds, few are opposite
    for purpose, share in moved.items():
      assert share > 0.9 or "eigenvalue" in purpose, (purpose, share)


@pytest.mark.parametrize("adjacency", FACTORS)
def test_moments_are_exact_where_a_unit_may_be_missing(adjacency, monkeypatch):
  """Else in some orders of units all that follow one that is taken out are rounded alike."""
  asked = []

  def spy(original):
    return lambda *args, exact: asked.append(exact) or original(*args, exact=exact)

  for module, name in (
    (least_squares, "second_moment"), (least_squares, "cross_moment"),
    (feature_covariance, "second_moment"), (newton, "weighted_moments"),
  ):  # fmt: skip
    monkeypatch.setattr(module, name, spy(getattr(module, name)))
  for method in METHODS.values():
    _solved(method, adjacency, _units(), {})
  assert asked == [adjacency == "add_or_remove_one"] * 4


# What an exchange moves, in units of what blanking does; anything else twice that.
EXCHANGED = {least_squares.MOMENT: 2**0.5, newton.HESSIAN: 2**0.5, least_squares.EIGENVALUE: 1.0}


@pytest.mark.parametrize("name", METHODS)
def test_exchanging_a_unit_needs_the_noise_of_what_it_moves(name):
  blanked, exchanged = (
    plan(METHODS[name], PrivacySpec(3.0, 1e-4, adjacency=adjacency))
    for adjacency in ("zero_out", "replace_one")
  )
  for purpose, mechanism in blanked.items():
    factor = EXCHANGED.get(purpose, 2.0)
    assert exchanged[purpose].stddev == pytest.approx(factor * mechanism.stddev, rel=1e-3)


def _exchanges():
  """Records along the axes, and some with one unit exchanged: turned, and turned around.

  No other unit has a record along the first axis, so that the smallest eigenvalue is that unit's.
  """
  x = np.zeros((UNITS, K, D), np.float32)
  for unit in range(UNITS):
    x[unit, :, 1 + unit // 2 % (D - 1)] = (-1) ** unit
  labels = np.broadcast_to(np.arange(UNITS, dtype=np.int32)[:, None] // 2 % CLASSES, (UNITS, K))
  for axis, sign in ((0, 1), (1, 1), (2, -1), (0, -1)):
    changed = x.copy()
    changed[7] = sign * np.eye(D)[axis]
    yield changed, labels, np.ones((UNITS, K), bool)


def _without_bias(method):
  """An input that is always 1 is never turned around."""
  if not isinstance(method, FeatureCovariance):
    return method
  return dataclasses.replace(method, descent=dataclasses.replace(method.descent, bias=False))


@pytest.mark.parametrize("name", METHODS)
def test_exchanges_reach_what_is_accounted(name):
  """No release has more noise than the worst exchange asks for."""
  moved = _check(_without_bias(METHODS[name]), "replace_one", _exchanges())
  assert all(0.9 < share <= 1 for share in moved.values()), moved


def _twice_the_bound(patch):
  """As it was: for all releases what always holds."""
  patch.setattr(Part, "bound", lambda part, adjacency: part.clip_norm)


def _the_root_of_two_for_all(patch):
  patch.setattr(Part, "bound", lambda part, adjacency: part.clip_norm / 2**0.5)


def _no_more_than_blanking(patch):
  patch.setattr(Part, "bound", lambda part, adjacency: part.clip_norm / 2)


@pytest.mark.parametrize("broken", [_the_root_of_two_for_all, _no_more_than_blanking])
@pytest.mark.parametrize("name", ["least_squares", "feature_covariance", "newton"])
def test_less_noise_than_an_exchange_asks_for_is_caught(name, broken, monkeypatch):
  broken(monkeypatch)
  moved = _check(_without_bias(METHODS[name]), "replace_one", _exchanges())
  assert max(moved.values()) > 1.25, moved


def test_more_noise_than_any_exchange_asks_for_shows(monkeypatch):
  _twice_the_bound(monkeypatch)
  moved = _check(METHODS["least_squares"], "replace_one", _exchanges())
  assert moved[least_squares.MOMENT] < 0.71 and moved[least_squares.EIGENVALUE] <= 0.5


def _counts_what_is_there(patch):
  """The mean over records that are there, in place of a public number of units."""
  original = head.Preprocessing.centre

  def centre(self, data, releases):
    there = sum(float(np.sum(units["record_mask"])) for units, _ in Rows(data))
    return original(self, dataclasses.replace(data, num_units=there), releases)

  patch.setattr(head.Preprocessing, "centre", centre)


def _looks_at_the_largest_row(patch):
  """A ridge that depends on the data."""
  original = least_squares._ridge_solution

  def solution(moment, cross, ridge, edge):
    seen = float(np.asarray(LOOKED_AT["total"].sum)[0, 0])
    return original(moment, cross, ridge + seen, edge)

  accumulate = least_squares.accumulate

  def kept(rows, statistic):
    LOOKED_AT["total"] = accumulate(rows, statistic)
    return LOOKED_AT["total"]

  patch.setattr(least_squares, "accumulate", kept)
  patch.setattr(least_squares, "_ridge_solution", solution)


LOOKED_AT: dict = {}


def _uses_the_exact_eigenvalue(patch):
  original = Replayed.scalar

  def scalar(self, purpose, value, step=0):
    original(self, purpose, value, step)
    return value

  patch.setattr(Replayed, "scalar", scalar)


def _halves_a_bound(patch):
  patch.setattr(
    least_squares, "Part",
    lambda name, share, steps, bound, *exchanged: Part(name, share, steps, bound / 2),
  )  # fmt: skip


def _adds_up_twice(patch):
  """Each record in the sum twice, as the padded pass of the published code does."""
  original = feature_covariance.accumulate
  patch.setattr(
    feature_covariance, "accumulate",
    lambda rows, statistic: jax.tree.map(lambda x: 2 * x, original(rows, statistic)),
  )  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), [
  (_counts_what_is_there, "feature_covariance"), (_looks_at_the_largest_row, "least_squares"),
  (_uses_the_exact_eigenvalue, "least_squares"), (_halves_a_bound, "least_squares"),
  (_adds_up_twice, "feature_covariance"),
])  # fmt: skip
def test_broken_solvers_are_caught(broken, name, monkeypatch):
  broken(monkeypatch)
  try:
    moved = _check(METHODS[name], "zero_out")
  except AssertionError:  # the head depends on the data
    return
  assert max(moved.values()) > 1, "not caught"
