"""Figures of groups, and the comparison of two models on the same people."""

import json

import numpy as np
import pytest
from made_up_tables import binary_table, right_or_wrong
from sklearn.metrics import accuracy_score, log_loss, recall_score, roc_auc_score

from dp_jax.evaluation import bootstrap
from dp_jax.evaluation.fairness import fairness, largest_gap, measure
from dp_jax.evaluation.gaps import compare_tables
from dp_jax.evaluation.predictions import load_predictions


def _binary(seed=0, people=300, **about):
  rng = np.random.default_rng(seed)
  units = np.repeat(np.arange(people), 2)
  label = rng.integers(0, 2, 2 * people)
  score = np.clip(0.25 + 0.4 * label + 0.25 * rng.standard_normal(2 * people), 0.01, 0.99).round(2)
  groups = {
    "sex": np.array(["f", "m"])[units % 2],
    "age": np.array(["below 40", "40 to 60", "60 and above"])[units % 3],
  }
  return binary_table(units, label, score, groups, **about)


def _figures(table, columns, metric, *, private=False):
  (measured,) = measure([table], columns, metric, private=private, resamples=200)
  return fairness(measured)


@pytest.mark.parametrize(
  "metric", ["accuracy", "auroc", "true_positive_rate", "false_positive_rate", "loss"]
)
def test_the_metric_of_each_group_is_scikit_learns(metric):
  table = _binary()
  metrics = {
    "accuracy": lambda k: accuracy_score(table.label[k], table.predicted[k]),
    "auroc": lambda k: roc_auc_score(table.label[k], table.score[k]),
    "true_positive_rate": lambda k: recall_score(table.label[k], table.predicted[k]),
    "false_positive_rate": lambda k: recall_score(1 - table.label[k], table.predicted[k]),
    "loss": lambda k: log_loss(table.label[k], table.score[k]),
  }  # fmt: skip
  found = _figures(table, ["sex", "age"], metric)
  everyone = np.ones(len(table.label), bool)
  np.testing.assert_allclose(found.overall.value, metrics[metric](everyone), rtol=1e-5)
  assert len(found.groups) == 2 + 3 + 6
  for group in found.groups:
    own = everyone.copy()
    for column, value in zip(group.columns, group.values, strict=True):
      own &= table.groups[column] == value
    np.testing.assert_allclose(group.value.value, metrics[metric](own), rtol=1e-5)
    np.testing.assert_allclose(group.gap.value, group.value.value - found.overall.value)
    assert group.value.low < group.value.value < group.value.high
    assert group.records == own.sum() and group.units == own.sum() // 2
  values = [g.value.value for g in found.groups if g.columns == ("age",)]
  (spread,) = [c for c in found.columns if c.columns == ("age",)]
  np.testing.assert_allclose(spread.largest_gap.value, max(values) - min(values))
  worst = max if metric in ("loss", "false_positive_rate") else min
  names = [g.name for g in found.groups if g.columns == ("age",)]
  assert spread.worst == names[values.index(worst(values))]


def test_a_group_that_is_all_right_is_not_certain_to_be():
  """Every resample is all right too; the score interval of 60 people reaches down to 94%."""
  right = np.r_[np.ones(60), np.zeros(30), np.tile([0, 1], 30)]
  ward = np.repeat(["all", "none", "half"], [60, 30, 60])
  table = right_or_wrong(np.arange(150), right, {"ward": ward})
  by_name = {g.values[0]: g.value for g in _figures(table, ["ward"], "accuracy").groups}
  assert by_name["all"].to_list() == pytest.approx([1.0, 60 / (60 + 1.959964**2), 1.0])
  assert by_name["none"].to_list() == pytest.approx([0.0, 0.0, 1 - 30 / (30 + 1.959964**2)])
  assert 0.3 < by_name["half"].low < 0.45
  label = np.r_[np.ones(40), np.zeros(110)]
  rate = _figures(binary_table(np.arange(150), label, 0.9 * label, {"ward": ward}), ["ward"],
                  "true_positive_rate").overall  # fmt: skip
  assert rate.to_list() == [1.0, None, None]


def test_small_groups_of_public_data_are_marked_and_not_ranked():
  right = np.r_[np.ones(60), np.zeros(40), np.ones(50), np.zeros(5)]
  ward = ["a"] * 100 + ["b"] * 50 + ["c"] * 5
  found = _figures(right_or_wrong(np.arange(155), right, {"ward": ward}), ["ward"], "accuracy")
  assert [g.status for g in found.groups] == ["shown", "shown", "small"]
  assert found.groups[2].value.value == 0.0 and found.columns[0].worst == "ward a"


def test_small_groups_of_private_data_are_nowhere():
  right = np.r_[np.ones(60), np.zeros(40), np.ones(50), np.ones(2), np.zeros(3)]
  ward = ["a"] * 100 + ["b"] * 50 + ["c"] * 5
  table = right_or_wrong(np.arange(155), right, {"ward": ward})
  found = _figures(table, ["ward"], "accuracy", private=True)
  assert [g.status for g in found.groups] == ["shown", "suppressed", "suppressed"]
  for group in found.groups[1:]:
    assert group.units == group.records == 0
    assert group.value.to_list() == group.gap.to_list() == [None] * 3
  assert found.columns == ()
  comparison = compare_tables(
    (table, table), ("x", "y"), ["ward"], "accuracy", private=True, resamples=50
  )
  assert {c.name for c in comparison.changes} == {"ward a"}
  assert "ward c" not in json.dumps([c.to_dict() for c in comparison.changes])
  few = right_or_wrong(np.arange(5), np.ones(5), {"ward": ["a"] * 5})
  comparison = compare_tables((few, few), ("x", "y"), ["ward"], "accuracy", private=True)
  assert comparison.overall.to_list() == [None] * 3 == comparison.first.overall.to_list()


def _pair(drop, people=1500, seed=0):
  """Two models on the same people; the first is wrong on `drop` more of the women."""
  rng = np.random.default_rng(seed)
  sex = np.where(rng.random(people) < 0.4, "f", "m")
  difficulty = rng.random(people)
  ward = np.array(["a", "b", "c"])[rng.integers(0, 3, people)]
  right = [
    difficulty + 0.1 * rng.standard_normal(people) < 0.8 - own * (sex == "f") for own in (drop, 0)
  ]
  units, groups = np.arange(people), {"sex": sex, "ward": ward}
  return tuple(right_or_wrong(units, r, groups) for r in right)


def _verdicts(tables, columns=("sex", "ward")):
  found = compare_tables(
    tables, ("privacy", "no privacy"), columns, "accuracy", private=False, resamples=300
  )
  return found, {change.name: change.verdict for change in found.changes}


def test_a_planted_gap_is_found_and_told():
  found, verdicts = _verdicts(_pair(0.15))
  assert verdicts["sex f"] == verdicts["largest gap by sex"] == "widened"
  (change,) = [c for c in found.changes if c.name == "sex f"]
  assert "the gap widened (difference -" in change.sentence and "points" in change.sentence
  assert found.overall.excludes_zero and found.overall.value < 0
  assert found.changes[0].difference.value == change.difference.value
  _, swapped = _verdicts(_pair(0.15)[::-1])
  assert swapped["sex f"] == "narrowed"


def test_equal_models_give_no_evidence():
  table = _pair(0.1)[0]
  found, verdicts = _verdicts((table, table))
  assert set(verdicts.values()) == {"no evidence either way"}
  assert all(c.difference.value == 0 for c in found.changes)
  # The broken variant: no spread in the resamples, taken for certainty.
  assert all(c.difference.low < 0 < c.difference.high for c in found.changes)
  assert found.overall.value == 0 and found.overall.low < 0 < found.overall.high


def test_what_is_the_same_in_every_resample_is_not_certain():
  """Two groups of which all records are right: the gap may be what either may be off by."""
  group = np.array(["a"] * 30 + ["b"] * 40)
  table = right_or_wrong(np.arange(70), np.ones(70, bool), {"ward": group})
  (measured,) = measure([table], ["ward"], "accuracy", private=False, resamples=200)
  found = fairness(measured)
  (spread,) = found.columns
  assert spread.largest_gap.value == 0 == spread.largest_gap.low
  low = min(g.value.low for g in found.groups)
  assert 0.05 < spread.largest_gap.high <= 1 - low + 1e-9
  for each in found.groups:
    assert each.gap.low < 0 < each.gap.high
  # One group that is all right beside one that is not: its part of the doubt counts too.
  right = np.concatenate([np.ones(30, bool), np.arange(40) % 4 > 0])
  table = right_or_wrong(np.arange(70), right, {"ward": group})
  (measured,) = measure([table], ["ward"], "accuracy", private=False, resamples=200)
  gap = fairness(measured).columns[0].largest_gap
  (bare,) = bootstrap.interval(*largest_gap(measured, np.array([1, 2])))
  assert gap.low < bare.low - 0.02 and gap.high >= bare.high


def test_an_area_of_one_has_no_interval_of_no_width():
  label = np.arange(60) % 2
  table = binary_table(np.arange(60), label, np.where(label, 0.9, 0.1), {})
  (measured,) = measure([table], [], "auroc", private=False, resamples=200)
  assert np.isnan(fairness(measured).overall.low)


def test_the_interval_of_the_gap_holds_the_truth_where_groups_are_nearly_always_right():
  """Two groups of 30 at 98%: the true gap is 0; of 200 draws nearly all intervals hold it.

  At a coverage of 90%, fewer than 160 of 200 have a probability below 1e-5.
  """
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(200):
    right = rng.random(60) < 0.98
    table = right_or_wrong(np.arange(60), right, {"ward": np.array(["a", "b"] * 30)})
    (measured,) = measure([table], ["ward"], "accuracy", private=False, resamples=50)
    held += fairness(measured).columns[0].largest_gap.low <= 0.0
  assert held >= 160


def test_a_group_that_changes_sides_by_as_much_has_no_wider_gap():
  rng = np.random.default_rng(0)
  sex = np.array(["f", "m"])[np.arange(2000) % 2]
  draws = rng.random(2000)
  tables = [
    right_or_wrong(np.arange(2000), draws < np.where(sex == worse, 0.6, 0.8), {"sex": sex})
    for worse in "fm"
  ]
  found, verdicts = _verdicts(tuple(tables), ["sex"])
  assert found.changes[0].difference.excludes_zero
  assert verdicts["sex f"] == "no evidence either way"
  assert "the group changed sides" in found.changes[0].sentence


def test_tables_of_other_records_are_refused():
  table = _binary(data_digest="a", split="test")
  for other, said in [
    (_binary(data_digest="b", split="test"), "data differ"),
    (_binary(data_digest="a", split="val"), "splits differ"),
    (_binary(seed=1, data_digest="a", split="test"), "different records or labels"),
  ]:
    with pytest.raises(ValueError, match=said):
      measure([table, other], ["sex"], "accuracy", private=False)


@pytest.mark.parametrize(
  ("metric", "said"), [("f1", "unknown metric 'f1'"), ("auroc", "needs two classes")]
)
def test_metrics_that_are_not_there_are_refused(metric, said):
  with pytest.raises(ValueError, match=said):
    measure([_pair(0)[0]], ["sex"], metric, private=False)


def test_a_table_comes_back_from_disk(tmp_path):
  table = _binary(data_digest="a", step=3)
  path = tmp_path / "predictions.npz"
  path.write_bytes(table.to_bytes())
  back = load_predictions(path)
  assert back.about == table.about and set(back.groups) == {"sex", "age"}
  np.testing.assert_array_equal(back.score, table.score)
  np.testing.assert_array_equal(back.groups["age"], table.groups["age"])
  path.write_bytes(table.to_bytes()[:200])
  with pytest.raises(ValueError, match="holds no predictions"):
    load_predictions(path)
  with pytest.raises(ValueError, match="cannot read predictions"):
    load_predictions(tmp_path / "none.npz")
