"""What exchanging one unit for another moves each release by: the worst pair, by brute force.

Pairs of units are searched for, from many starts, that move a statistic the most. What they reach
is what is accounted under replace_one to a percent, so that no smaller number would do, and what
the float32 sums do with them stays below it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from dp_jax.solvers import statistics
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.head import Preprocessing
from dp_jax.solvers.least_squares import CROSS, EIGENVALUE, MOMENT, LeastSquares
from dp_jax.solvers.newton import CURVATURE_BOUND, HESSIAN, Newton, _curvature
from dp_jax.solvers.statistics import cross_moment, row_sum, second_moment, weighted_moments

D, K, CLASSES = 3, 2, 3
KERNELS = {
  "zeros": np.zeros((D, CLASSES)),
  "steep": 4 * np.random.default_rng(3).standard_normal((D, CLASSES)),
}
# Of all other units: one direction that they do not have, and two that they have.
OTHERS = np.diag([0.0, 2.0, 3.0])


def _rows(x):
  return x / max(1.0, np.linalg.norm(x, axis=-1).max())


def _moment(x):
  return np.einsum("ri,rj->ij", x, x) / K


def _cross(x):
  """Of records that are all of one class."""
  return np.stack([x.mean(axis=0), *np.zeros((CLASSES - 1, D))])


def _blocks(kernel, x):
  logits = x @ kernel
  p = np.exp(logits - logits.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  return np.einsum("rc,ri,rj->cij", p * (1 - p), x, x) / K


def _smallest(x):
  return np.linalg.eigvalsh(OTHERS + _moment(x))[0]


# name -> (what a unit of rows x gives, in float64; what is accounted for an exchange)
EXCHANGES = {
  "mean": (lambda x: x.mean(axis=0), 2.0),
  "second moment": (_moment, np.sqrt(2)),
  "smallest eigenvalue": (_smallest, 1.0),
  "cross moment": (_cross, 2.0),
  "Hessian": (functools.partial(_blocks, KERNELS["zeros"]), np.sqrt(2) * CURVATURE_BOUND),
  "Hessian, steep": (functools.partial(_blocks, KERNELS["steep"]), np.sqrt(2) * CURVATURE_BOUND),
}
STATISTICS = {
  "mean": row_sum(1.0),
  "second moment": second_moment(1.0),
  "smallest eigenvalue": second_moment(1.0),
  "cross moment": cross_moment(1.0, CLASSES),
  "Hessian": weighted_moments(1.0, _curvature, CURVATURE_BOUND),
  "Hessian, steep": weighted_moments(1.0, _curvature, CURVATURE_BOUND),
}


@functools.cache
def _worst(name):
  """The most that any pair that was found moves, and that pair [2, K, D]."""
  given, _ = EXCHANGES[name]

  def moved(flat):
    a, b = map(_rows, flat.reshape(2, K, D))
    return -np.linalg.norm(np.ravel(given(a) - given(b)))

  rng, best = np.random.default_rng(0), None
  for _ in range(6):
    found = optimize.minimize(moved, rng.standard_normal(2 * K * D), method="L-BFGS-B")
    best = found if best is None or found.fun < best.fun else best
  return -best.fun, np.stack([_rows(x) for x in best.x.reshape(2, K, D)])


@functools.cache
def _compiled(statistic):
  return jax.jit(statistic)


def _sum(statistic, units, *parameters):
  """The float32 pair of sums over units [n, K, D] of one class, as float64."""
  real = np.ones(units.shape[:2], bool)
  given = {"inputs": units, "label": np.zeros(real.shape, np.int32), "record_mask": real}
  total = _compiled(statistic)(given, np.ones(len(units), bool), *parameters)
  return np.add(total.sum, total.error, dtype=np.float64)


def _mirrored(x):
  upper = np.triu(x)
  return upper + np.triu(upper, 1).swapaxes(-1, -2)


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_worst_pair_reaches_what_is_accounted_and_no_more(name):
  accounted = EXCHANGES[name][1]
  moved, _ = _worst(name)
  assert moved <= accounted * (1 + 1e-9)
  if "steep" not in name:  # whose probabilities are never those of the bound
    # Any constant that is smaller by more than a percent is exceeded.
    assert moved > 0.99 * accounted


@pytest.mark.parametrize("name", EXCHANGES)
def test_sums_in_float32_move_by_no_more(name):
  accounted = EXCHANGES[name][1]
  _, pair = _worst(name)
  if "eigenvalue" in name:
    rest = np.sqrt(OTHERS.sum()) * np.array([[[0, 1, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]]])
    rest = np.concatenate([rest / np.sqrt(5)] * 5)
  else:
    rest = np.random.default_rng(1).standard_normal((20, K, D))
  kernel = KERNELS["steep" if "steep" in name else "zeros"]
  parameters = (jnp.asarray(kernel, jnp.float32),) if "Hessian" in name else ()
  found = []
  for unit in pair:
    units = np.concatenate([rest[:3], unit[None], rest[3:]]).astype(np.float32)
    total = _sum(STATISTICS[name], 1.001 * units, *parameters)  # which is clipped again
    if name not in ("mean", "cross moment"):
      total = _mirrored(total)
    found.append(np.linalg.eigvalsh(total)[0] if "eigenvalue" in name else total)
  moved = np.linalg.norm(np.ravel(found[0] - found[1]))
  assert moved <= accounted
  if "steep" not in name:
    assert moved > 0.97 * accounted


METHODS = (
  LeastSquares(Preprocessing(centre_share=0.1)),
  FeatureCovariance(Preprocessing(centre_share=0.1)),
  Newton(Preprocessing(centre_share=0.1)),
)


def test_solvers_account_for_these_numbers():
  names = {MOMENT: "second moment", EIGENVALUE: "smallest eigenvalue", HESSIAN: "Hessian"}
  for method in METHODS:
    for part in method.parts():
      if part.purpose in names:
        assert part.exchanged == pytest.approx(EXCHANGES[names[part.purpose]][1], rel=1e-12)
      else:  # means, cross moments and gradients can be opposite
        assert part.exchanged is None
      assert part.bound("zero_out") == part.bound("add_or_remove_one") == part.clip_norm
  assert EXCHANGES["cross moment"][1] == 2 * next(
    part.clip_norm for part in METHODS[0].parts() if part.purpose == CROSS
  )


def test_weights_of_both_signs_would_move_by_twice_the_bound():
  """Why they count as zero below zero: x and -x have one moment, and here opposite weights."""

  def signed(rows):
    return jnp.where(rows[:, :1] > 0, 0.5, -0.5)

  def unclamped(units, mask):
    rows, weights = statistics.weighted_rows(units, 1.0)
    return statistics._product(statistics.scaled(rows, signed(rows)[:, 0] * weights), rows, False)

  x = np.broadcast_to(np.eye(D)[0], (1, K, D)).astype(np.float32)
  for statistic, least, most in (
    (weighted_moments(1.0, signed, 0.5), 0.49, 0.5 * np.sqrt(2)), (unclamped, 0.99, 1.0),
  ):  # fmt: skip
    moved = np.linalg.norm(np.ravel(_sum(statistic, x) - _sum(statistic, -x)))
    assert least < moved <= most, statistic


def _most_moved(statistic):
  """Over made-up blocks of 128 rows along one axis, one of which turns to another."""
  rng, most = np.random.default_rng(0), 0.0
  for _ in range(200):
    units = np.zeros((statistics.BLOCK, 1, 2), np.float32)
    units[:, 0, 0] = rng.uniform(0.5, 1, len(units))
    units[5, 0] = 1, 0
    turned = units.copy()
    turned[5, 0] = 0, 1
    units[6:40], turned[6:40] = units[6:40, :, ::-1], turned[6:40, :, ::-1]
    change = _mirrored(_sum(statistic, units)) - _mirrored(_sum(statistic, turned))
    most = max(most, np.linalg.norm(change))
  return most


def test_what_both_sums_round_by_is_taken_off_the_bound(monkeypatch):
  assert 0.99 * np.sqrt(2) < _most_moved(second_moment(1.0)) <= np.sqrt(2)
  # Broken: rows of norm R itself, which leave nothing for the rounding of the two sums.
  monkeypatch.setattr(statistics, "ROW_SHARE", 1.0)
  assert _most_moved(second_moment.__wrapped__(1.0)) > np.sqrt(2) * (1 + 1e-6)
