"""Metrics of groups and their largest gaps equal those of fairlearn's MetricFrame."""

import numpy as np
import pytest
from made_up_tables import binary_table
from sklearn import metrics

from dp_jax.evaluation.fairness import fairness, measure

fairlearn = pytest.importorskip(
  "fairlearn.metrics", reason="needs fairlearn: pip install 'dp_jax[dev]'"
)

COLUMNS = ["sex", "ward"]


@pytest.fixture(scope="module")
def table():
  """600 people with one or two records; ward c is small."""
  rng = np.random.default_rng(0)
  units = np.sort(np.r_[np.arange(600), rng.integers(0, 600, 200)])
  sex = np.array(["f", "m"])[rng.integers(0, 2, 600)][units]
  ward = np.array(["a", "b", "c"])[rng.choice(3, 600, p=[0.6, 0.35, 0.05])][units]
  label = rng.random(len(units)) < 0.4
  score = np.clip(0.35 + 0.3 * label * (ward != "b") + 0.25 * rng.standard_normal(len(units)), 0, 1)
  return binary_table(units, label, score, {"sex": sex, "ward": ward})


@pytest.mark.parametrize(
  ("name", "function"),
  [
    ("accuracy", metrics.accuracy_score),
    ("true_positive_rate", fairlearn.true_positive_rate),
    ("false_positive_rate", fairlearn.false_positive_rate),
    ("auroc", metrics.roc_auc_score),
  ],
)
@pytest.mark.parametrize("columns", [["sex"], ["ward"], COLUMNS])
def test_each_group_and_the_largest_gap(table, name, function, columns):
  frame = fairlearn.MetricFrame(
    metrics=function, y_true=table.label,
    y_pred=table.score if name == "auroc" else table.predicted,
    sensitive_features={column: table.groups[column] for column in columns},
  )  # fmt: skip
  (measured,) = measure([table], columns, name, private=False, resamples=20)
  found = fairness(measured)
  assert found.overall.value == pytest.approx(frame.overall, abs=1e-6)
  whole = [group for group in found.groups if list(group.columns) == columns]
  assert len(whole) == len(frame.by_group)
  for group in whole:
    theirs = frame.by_group[group.values if len(columns) > 1 else group.values[0]]
    assert group.value.value == pytest.approx(theirs, abs=1e-6)
    assert group.gap.value == pytest.approx(theirs - frame.overall, abs=1e-6)
  if all(group.status == "shown" for group in whole):  # small ones are not ranked here
    (spread,) = [each for each in found.columns if list(each.columns) == columns]
    assert spread.largest_gap.value == pytest.approx(frame.difference(), abs=1e-6)
    assert spread.largest_gap.value > 0
  else:
    assert "ward" in columns
