"""The study of imbalance, small: digits, two epsilons, one seed, few steps."""

from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image
from support import small_config

from dp_jax.training.setup.open_data import open_split
from experiments.imbalance import plot, study
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
  assert lines[2] == "| 50% | none | 81.0% ± 12.7 | 25.0% ± 0.0 |  |  |"
  assert lines[3].endswith("| 40.0% ± 0.0 (all: 81.0% ± 0.0) | -15.0 ± 0.0 |")
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


def test_data_of_a_folder_and_of_features(tmp_path):
  """`tfds:` sources come through the same door; tests/data/test_tfds_source.py reads one."""
  rng = np.random.default_rng(0)
  for split, count in (("train", 8), ("test", 2)):
    for name in ("cat", "dog"):
      (tmp_path / "images" / split / name).mkdir(parents=True)
      for i in range(count):
        image = Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8))
        image.save(tmp_path / "images" / split / name / f"{i}.png")
  vectors = {
    f"{split}_{name}": values
    for split, n in (("train", 16), ("test", 4))
    for name, values in (
      ("features", rng.normal(size=(n, 5)).astype(np.float16)), ("labels", np.arange(n) // (n // 2))
    )
  }  # fmt: skip
  np.savez(tmp_path / "vectors.npz", **vectors)
  for source, path, more, shape in (
    ("folder", "images", {"input_shape": [6, 6, 3]}, (6, 6, 3)),
    ("npz", "vectors.npz", {"num_classes": 2}, (5,)),
  ):
    data = {"source": source, "path": str(tmp_path / path), "declared": "public", **more}
    config = small_config(data=data, model={"name": "linear"})
    made = study.with_rare_class(config, tmp_path / source, 1, 0.25, 0)
    train, test = (open_split(made, split) for split in ("train", "test"))
    assert train.info.input_shape == shape and len(test) == 4
    assert made.data.value_range == train.info.value_range or shape == (5,)
    read = train.gather(np.arange(len(train)))
    assert np.bincount(read["label"]).tolist() == [8, 2]
    first = open_split(config, "train")[0]["inputs"]
    np.testing.assert_array_equal(read["inputs"][0], first)
  (tmp_path / "images" / "train" / "cat" / "torn.png").write_bytes(b"torn")
  config = small_config(data={
    "source": "folder", "path": str(tmp_path / "images"), "declared": "public",
    "input_shape": [6, 6, 3],
  }, model={"name": "linear"})  # fmt: skip
  with pytest.raises(ValueError, match="a record that cannot be read"):
    study.with_rare_class(config, tmp_path / "torn", 1, 0.25, 0)


def test_plot(tmp_path):
  points = [
    Point(share, epsilon, 0, 0.8, (0.9, 0.5 * share), None if epsilon is None else (0.8, 0.4))
    for share in (0.5, 1.0)
    for epsilon in (None, 2.0)
  ]
  content = {
    "label": 1, "difficulty": study.difficulty(points), "points": [asdict(p) for p in points],
  }  # fmt: skip
  plot.draw(content).savefig(tmp_path / "plot.png")
  assert (tmp_path / "plot.png").stat().st_size > 5000
