"""The study of imbalance, small: digits, two epsilons, one seed, few steps."""

import numpy as np
import pytest
from support import small_config

from experiments.imbalance import study
from experiments.imbalance.study import Point


def test_small_study(tmp_path):
  config = small_config(
    model={"name": "linear"}, train={"steps": 4, "learning_rate": 0.5},
    privacy={"delta": 1e-3, "sampling": "full_batch"}, eval={"every": 2},
  )  # fmt: skip
  points = study.run_study(config, tmp_path, 8, [0.1, 1.0], [1.0, 8.0], 1)
  assert [(p.share, p.epsilon) for p in points] == [
    (share, epsilon) for share in (0.1, 1.0) for epsilon in (None, 1.0, 8.0)
  ]
  labels = [
    np.load(tmp_path / f"share_{share}" / "seed_0" / "train.npz")["label"] for share in ("0.1", "1")
  ]
  rare, whole = (np.bincount(each, minlength=10) for each in labels)
  assert rare[8] == round(0.1 * whole[8]) and (np.delete(rare, 8) == np.delete(whole, 8)).all()
  for point in points:
    assert 0 <= point.overall <= 1 and len(point.classes) == 10
    assert (point.matched is None) == (point.epsilon is None)
  plain = [p for p in points if p.epsilon is None]
  assert plain[1].overall > 0.3
  again = study.run_study(config, tmp_path, 8, [0.1, 1.0], [1.0, 8.0], 1)  # all are complete
  assert again == points


def test_tables():
  points = [
    Point(share, epsilon, seed, 0.8 + 0.02 * seed, (0.9, 0.5 * share), matched)
    for seed in (0, 1)
    for share in (0.5, 1.0)
    for epsilon, matched in ((None, None), (2.0, (0.81, 0.4)))
  ]
  lines = study.rare_table(points, 1).splitlines()
  assert lines[2] == "| 50% | none | 81.0% ± 12.7 | 25.0% ± 0.0 |  |"
  assert lines[3].endswith("| 40.0% ± 0.0 (all: 81.0% ± 0.0) |")
  found = study.difficulty(points)
  assert found["none"]["hard_to_easy"] == [1, 0]
  assert found["2"]["rank_correlation"] == pytest.approx(1.0)
  assert "| 2 | 1 (50%) 0 (90%) | 1.00 |" in study.difficulty_table(found)


@pytest.mark.parametrize(
  ("declared", "shares", "said"),
  [("private", [1.0], "must be public"), ("public", [0.0], r"must lie in \(0, 1\]")],
)
def test_bad_input(tmp_path, declared, shares, said):
  with pytest.raises(ValueError, match=said):
    study.run_study(small_config(data__declared=declared), tmp_path, 8, shares, [1.0], 1)
