"""Solvers end to end on made-up features: the private path runs, and gives what it should."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import classifier

from dp_jax.models.build import ModelSpec
from dp_jax.models.feature_head import check_blocks
from dp_jax.models.functional import split
from dp_jax.privacy.ledger import BudgetError, Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.descent import Descent, descend
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.feature_units import Rows, array_data
from dp_jax.solvers.head import ROW_NORM, Preprocessing, public_statistics
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import CURVATURE_BOUND, Newton, _curvature
from dp_jax.solvers.noised import Releases
from dp_jax.solvers.solve import plan, solve
from dp_jax.solvers.statistics import (
  accumulate,
  cross_moment,
  row_sum,
  second_moment,
  weighted_moments,
)

KEY = MasterKey(bytes(range(32)), is_test=True)
SPEC = PrivacySpec(3.0, 1e-4)
CENTRED = Preprocessing(centre_share=0.05)
STEPS = Descent(steps=10, clip_norm=0.5, learning_rate=40.0, bias=True)
METHODS = {
  "least_squares": LeastSquares(CENTRED),
  "newton": Newton(CENTRED),
  "feature_covariance": FeatureCovariance(CENTRED, STEPS),
  "dp_fc": FeatureCovariance(CENTRED, STEPS, whiten=0.0, precondition=1.0),
  "gradient_descent": FeatureCovariance(Preprocessing(), STEPS, moment_share=0.0),
}
N, D, CLASSES = 3001, 8, 3


def _made_up(n=N, seed=0):
  """Three classes around three directions, with one offset for all."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, CLASSES, n)
  x = 1.5 * np.eye(D)[labels] + 0.6 * rng.standard_normal((n, D)) + 1.0
  return x.astype(np.float16), labels.astype(np.int32)


def _accuracy(head, seed=1):
  x, labels = _made_up(1000, seed)
  return np.mean(np.argmax(np.asarray(head.logits(x)), axis=1) == labels)


@pytest.fixture(scope="module")
def solutions():
  """Each method on the same data with the same key, in shards of 512."""
  x, labels = _made_up()
  data = array_data(x, labels, CLASSES, shard_size=512)
  return {name: solve(data, method, SPEC, key=KEY) for name, method in METHODS.items()}


@pytest.mark.parametrize("name", METHODS)
def test_the_private_path_runs_within_its_budget(name, solutions):
  found = solutions[name]
  assert _accuracy(found.head) > 0.85
  epsilon = found.ledger.epsilon(SPEC.delta)
  assert SPEC.epsilon * (1 - 1e-3) <= epsilon <= SPEC.epsilon
  assert {r.mechanism.noise_multiplier for r in found.ledger.releases} == {
    m.noise_multiplier for m in found.mechanisms.values()
  }


@pytest.mark.parametrize("name", METHODS)
def test_a_shard_size_that_does_not_divide_changes_nothing(name, solutions):
  """The published code counts records twice in its padded pass."""
  x, labels = _made_up()
  data = array_data(x, labels, CLASSES, shard_size=1000)
  got = solve(data, METHODS[name], SPEC, key=KEY).head
  want = solutions[name].head
  np.testing.assert_allclose(got.kernel, want.kernel, rtol=0, atol=2e-3 * np.abs(want.kernel).max())


def test_a_padded_pass_counts_each_record_once():
  x, labels = _made_up(100)
  for size in (7, 100, 64):
    rows = Rows(array_data(x, labels, CLASSES, shard_size=size))
    moment, cross = (
      np.asarray(accumulate(rows, each).sum)
      for each in (second_moment(1.0), cross_moment(1.0, CLASSES))
    )
    unit = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(moment, unit.T @ unit, rtol=0, atol=0.5)
    np.testing.assert_allclose(np.trace(moment), 100, rtol=0.01)
    np.testing.assert_allclose(cross, unit.T @ np.eye(CLASSES)[labels], rtol=0.01)
  # The broken variant: padding repeats the last records, and the mask is not looked at.
  twice = np.concatenate([x, x[-28:]])
  broken = Rows(array_data(twice, np.concatenate([labels, labels[-28:]]), CLASSES, shard_size=64))
  assert np.trace(np.asarray(accumulate(broken, second_moment(1.0)).sum)) > 126


def test_records_of_a_unit_are_averaged():
  """A unit of two equal records is the unit of one; a masked or malformed record is not there."""
  x, labels = _made_up(200)
  alone = array_data(x, labels, CLASSES, shard_size=64)
  doubled = np.stack([x, x, np.full_like(x, np.nan), x], axis=1)
  of_each = np.stack([labels, labels, labels, np.full_like(labels, CLASSES)], axis=1)
  grouped = array_data(doubled, of_each, CLASSES, shard_size=64)
  for statistic in (second_moment(1.0), cross_moment(1.0, CLASSES)):
    want, got = (np.asarray(accumulate(Rows(data), statistic).sum) for data in (alone, grouped))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  method = METHODS["feature_covariance"]
  want, got = (solve(data, method, SPEC, key=KEY).head for data in (alone, grouped))
  np.testing.assert_allclose(got.kernel, want.kernel, atol=2e-3 * np.abs(want.kernel).max())


def test_the_same_key_gives_the_same_bits_and_a_fresh_one_others(solutions):
  x, labels = _made_up()
  data = array_data(x, labels, CLASSES, shard_size=512)
  method = METHODS["least_squares"]
  again, fresh = solve(data, method, SPEC, key=KEY).head, solve(data, method, SPEC).head
  assert (np.asarray(again.kernel) == np.asarray(solutions["least_squares"].head.kernel)).all()
  assert (np.asarray(fresh.kernel) != np.asarray(again.kernel)).any()


def test_rows_that_do_not_fit_in_memory_are_made_anew():
  x, labels = _made_up(300)
  data = array_data(x, labels, CLASSES, shard_size=64)
  kept, not_kept = Rows(data), Rows(data, memory_budget=1000)
  for _ in range(2):
    for (a, _), (b, _) in zip(kept, not_kept, strict=True):
      assert (np.asarray(a["inputs"]) == np.asarray(b["inputs"])).all()
  assert not_kept._kept is None and len(kept._kept) == 5


def test_little_noise_gives_the_ridge_solution():
  x, labels = _made_up()
  data = array_data(x, labels, CLASSES)
  method = LeastSquares(Preprocessing(), moment_share=0.4, ridge=1.0)
  head = solve(data, method, PrivacySpec(30.0, 1e-4), key=KEY).head
  unit = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
  target = np.eye(CLASSES)[labels] - 1 / CLASSES
  want = np.linalg.solve(unit.T @ unit, unit.T @ target)
  assert np.corrcoef(np.ravel(head.kernel), np.ravel(want))[0, 1] > 0.99


def test_public_statistics_cost_nothing():
  public = public_statistics(array_data(*_made_up(2000, seed=5), CLASSES))
  before = Preprocessing(public=public)
  method = FeatureCovariance(before, STEPS, moment_share=0.0)
  assert [part.share for part in method.parts()] == [1.0]
  x, labels = _made_up()
  found = solve(array_data(x, labels, CLASSES), method, SPEC, key=KEY)
  assert found.ledger.count == 1
  assert _accuracy(found.head) > 0.85
  with pytest.raises(ValueError, match="public statistics"):
    dataclasses.replace(method, moment_share=0.1).parts()


def test_a_noised_mean_takes_the_place_of_a_public_one():
  public = public_statistics(array_data(*_made_up(2000, seed=5), CLASSES))
  # A public mean that is far off, as that of other records may be.
  before = Preprocessing(public=dataclasses.replace(public, centre=public.centre + 1))
  x, labels = _made_up()
  unit = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
  found = {}
  for share in (0.0, 0.1):
    method = FeatureCovariance(
      dataclasses.replace(before, centre_share=share), STEPS, moment_share=0.0
    )
    assert [part.share for part in method.parts()] == ([share] if share else []) + [1 - share]
    head = solve(
      array_data(x, labels, CLASSES), method, PrivacySpec(30.0, 1e-4), key=KEY
    ).head  # fmt: skip
    found[share] = np.linalg.norm(head.centre - unit.mean(axis=0))
    assert head.transform is not None
  assert found[0.0] > 1
  assert found[0.1] < 0.02


def test_the_model_gives_the_logits_of_the_head(solutions):
  head = solutions["feature_covariance"].head
  sizes = {"power": head.power, "centred": True, "transformed": True}
  model = classifier("feature_head", sizes, (D,), CLASSES, (-1.0, 1.0)).build(seed=0)
  functional, arrays = split(model)
  assert {k: v.shape for k, v in arrays.items()} == {k: v.shape for k, v in head.arrays().items()}
  x = jnp.asarray(_made_up(50)[0], jnp.float32)
  np.testing.assert_allclose(
    functional.bind(head.arrays())(x), head.logits(x), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("blocks", [((3, 1.0), (5, 4.0)), ((8, 3.0),)])
def test_blocks_are_as_features_multiplied_before(blocks):
  """One factor for all columns changes nothing, since rows are scaled to norm 1."""
  x, labels = _made_up()
  before = Preprocessing(power=0.5, centre_share=0.1, blocks=blocks)
  method = FeatureCovariance(before, STEPS, moment_share=0.2)
  found = solve(array_data(x, labels, CLASSES), method, SPEC, key=KEY).head
  # The power comes first, so that factors are not raised to it.
  factors = np.repeat([factor**2 for _, factor in blocks], [columns for columns, _ in blocks])
  plain = dataclasses.replace(method, preprocessing=dataclasses.replace(before, blocks=()))
  multiplied = x.astype(np.float32) * factors.astype(np.float32)
  want = solve(array_data(multiplied, labels, CLASSES), plain, SPEC, key=KEY).head
  np.testing.assert_allclose(found.logits(x[:50]), want.logits(multiplied[:50]), atol=2e-3)
  sizes = {"power": 0.5, "centred": True, "transformed": True, "blocks": blocks}
  spec = classifier("feature_head", sizes, (D,), CLASSES, (-1.0, 1.0))
  functional, _ = split(ModelSpec.from_json(spec.to_json()).build(seed=0))
  rows = jnp.asarray(x[:50], jnp.float32)
  np.testing.assert_allclose(
    functional.bind(found.arrays())(rows), found.logits(rows), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("before", [
  Preprocessing(power=2.0, centre_share=0.1), Preprocessing(centre_share=0.1, blocks=((D, 1e10),)),
])  # fmt: skip
def test_a_record_that_overflows_on_the_way_changes_no_more_than_another(before):
  """Finite numbers whose square, or product with a factor, is infinite."""
  x, labels = _made_up(200)
  clean, hostile = x.astype(np.float32), x.astype(np.float32)
  clean[7], hostile[7] = 0, 1e30
  hostile[7, 2] = 1.0
  sums = []
  for rows in (clean, hostile):
    data = array_data(rows, labels, CLASSES, shard_size=64)
    mapped = before.rows(data, None)
    assert all(np.isfinite(units["inputs"]).all() for units, _ in mapped)
    sums.append(np.asarray(accumulate(mapped, row_sum(ROW_NORM)).sum))
  assert np.linalg.norm(sums[1] - sums[0]) < ROW_NORM * (1 + 1e-5)


@pytest.mark.parametrize(("blocks", "named"), [
  (((3, 1.0), (4, 2.0)), "of 7 columns, but there are 8"), (((8, 0.0),), "positive factor"),
  (((3.5, 1.0), (4.5, 1.0)), "whole number"), (((8,),), "columns, factor"),
  (((8, float("nan")),), "positive factor"),
])  # fmt: skip
def test_blocks_that_do_not_fit_are_refused(blocks, named):
  with pytest.raises(ValueError, match=named):
    check_blocks(blocks, D)


def test_a_hessian_that_does_not_fit_is_refused_with_its_size():
  method = dataclasses.replace(METHODS["newton"], memory_budget=10**5)
  x, labels = _made_up(50)
  data = array_data(x, labels, CLASSES)
  data = dataclasses.replace(data, num_features=1280, num_classes=1000)
  with pytest.raises(ValueError, match=r"1000 classes on 1280 features takes 42\.7 GiB"):
    solve(data, method, SPEC, key=KEY)


def test_nothing_runs_that_the_ledger_does_not_allow():
  ledger = Ledger(None, PrivacySpec(2.0, 1e-4))
  x, labels = _made_up(50)
  with pytest.raises(BudgetError):
    solve(array_data(x, labels, CLASSES), METHODS["least_squares"], SPEC, ledger=ledger)
  assert ledger.count == 0


def test_a_number_of_units_that_is_secret_is_declared_not_counted():
  """P2: else N would stand in the ledger, and be what sums are divided by."""
  x, labels = _made_up(50)
  spec = dataclasses.replace(SPEC, adjacency="add_or_remove_one")
  method = METHODS["least_squares"]
  with pytest.raises(ValueError, match="declare the data's num_units"):
    solve(array_data(x, labels, CLASSES), method, spec)
  found = solve(array_data(x, labels, CLASSES, num_units=60.0), method, spec)
  assert {each.declared_batch_size for each in found.mechanisms.values()} == {60.0}
  for wrong in (0, -1.0, float("nan")):
    with pytest.raises(ValueError, match="num_units"):
      array_data(x, labels, CLASSES, num_units=wrong)


def test_only_a_test_key_can_be_given():
  x, labels = _made_up(50)
  with pytest.raises(ValueError, match="give no key"):
    solve(array_data(x, labels, CLASSES), METHODS["newton"], SPEC, key=MasterKey.from_os())


def test_a_solver_that_fails_half_way_has_paid():
  """What it releases is in the ledger before the first release is made."""
  x, labels = _made_up(50)
  ledger, data = Ledger(), array_data(x, labels, CLASSES)

  def no_more():
    assert ledger.count == 4
    yield from ()

  with pytest.raises(ValueError, match="no shards"):
    solve(dataclasses.replace(data, shards=no_more), METHODS["least_squares"], SPEC, ledger=ledger)
  assert ledger.count == 4


def test_shares_and_settings_out_of_range_are_refused():
  with pytest.raises(ValueError, match="must be above 0"):
    plan(LeastSquares(moment_share=0.8, eigenvalue_share=0.3), SPEC)
  with pytest.raises(ValueError, match="do not fit together"):
    array_data(np.zeros((3, 2)), np.zeros(4, np.int32), 2)
  for average in (-0.1, 2.0, float("nan")):
    with pytest.raises(ValueError, match=f"average={average}"):
      Descent(average=average)


def test_heads_of_the_last_steps_are_averaged():
  x, labels = _made_up()
  rows = Rows(array_data(x, labels, CLASSES, shard_size=512))
  settings = Descent(steps=3, learning_rate=5.0, schedule="constant", bias=True)
  method = FeatureCovariance(Preprocessing(), settings, moment_share=0.0)

  def head(**changes):
    releases = Releases(plan(method, SPEC), KEY)
    return descend(rows, releases, dataclasses.replace(settings, **changes), None)

  second, third = head(steps=2), head()
  averaged = head(average=0.67)
  for name, value in averaged.items():
    np.testing.assert_allclose(value, (second[name] + third[name]) / 2, rtol=1e-5, atol=1e-6)
  assert not np.allclose(averaged["kernel"], third["kernel"], atol=1e-3)
  for name, value in head(average=0.0).items():
    np.testing.assert_array_equal(value, third[name])


def test_averaging_changes_no_release():
  settings = Descent(steps=4)
  plain, averaged = (
    plan(FeatureCovariance(descent=dataclasses.replace(settings, average=each)), SPEC)
    for each in (0.0, 0.5)
  )
  assert plain == averaged


def test_the_hessian_at_a_head_of_zeros_is_that_of_numpy_in_every_compilation():
  """With the head closed over, some compilations gave zeros at this size."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((5000, 560)).astype(np.float32)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  rows = Rows(array_data(x, np.zeros(len(x), np.int32), 10))
  expected = 0.09 * x.T.astype(np.float64) @ x
  for _ in range(4):
    statistic = weighted_moments.__wrapped__(1.0, _curvature, CURVATURE_BOUND)  # compiled anew
    for block in np.asarray(accumulate(rows, statistic, jnp.zeros((560, 10))).sum):
      np.testing.assert_allclose(block, expected, rtol=0.02, atol=1e-3)
