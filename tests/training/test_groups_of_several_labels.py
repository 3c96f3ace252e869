"""Several labels at once, some not known, from a table to the comparison of two runs."""

import numpy as np
import pytest
from support import small_config

from dp_jax.evaluation.predictions import load_predictions
from dp_jax.runs.compare import compare_runs
from dp_jax.runs.release_metrics import shares
from dp_jax.training.run import train


def _table(path, rows=240):
  """Two labels that follow from two numbers; a tenth of one is blank."""
  rng = np.random.default_rng(0)
  lines = ["person,sex,x,y,edema,effusion"]
  for i in range(rows):
    x, y = rng.random(2)
    edema = "" if i % 10 == 0 else int(x + 0.3 * rng.standard_normal() > 0.5)
    effusion = int(y + 0.3 * rng.standard_normal() > 0.5)
    lines.append(f"p{i // 2},{'fm'[i // 2 % 2]},{x:.4f},{y:.4f},{edema},{effusion}")
  path.write_text("\n".join(lines) + "\n")
  return path


def _config(path, **privacy):
  return small_config(
    data={
      "source": "csv", "path": str(path), "declared": "public", "features": ["x", "y"],
      "feature_ranges": [[0.0, 1.0], [0.0, 1.0]], "label_columns": ["edema", "effusion"],
      "blank": "ignore", "eval_fraction": 0.5, "groups": ["sex"], "max_records_per_unit": 2,
    },
    model={"name": "linear"}, train__steps=6, train__learning_rate=1.0,
    privacy={
      "epsilon": 50.0, "delta": 1e-3, "sampling": "full_batch", "unit": "person", **privacy
    },
  )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("labels")
  path = _table(folder / "table.csv")
  configs = {"private": _config(path), "plain": _config(path, enabled=False)}
  results = {name: train(config, folder / name, progress=False) for name, config in configs.items()}
  return folder, results


def test_a_run_is_evaluated_label_by_label(runs):
  folder, results = runs
  found = results["private"].metrics["test"]
  assert set(found) == {"accuracy", "loss", "auroc", "average_precision"}
  table = load_predictions(folder / "private" / "predictions.npz")
  assert table.has_several_labels and table.label.shape == table.score.shape == (len(table.unit), 2)
  known = table.label >= 0
  assert not known.all()
  assert found["accuracy"] == np.mean(table.predicted[known] == table.label[known])
  assert 0 <= shares(table).min() <= shares(table).max() <= 1


def test_groups_are_compared(runs):
  folder, _ = runs
  outcome = compare_runs(folder / "private", folder / "plain", ["sex"], resamples=100)
  auroc, accuracy = outcome.content["comparisons"]
  assert (auroc["metric"], accuracy["metric"]) == ("auroc", "accuracy")
  assert auroc["first"]["overall"][0] > 0.5 and len(auroc["first"]["groups"]) == 2
  with pytest.raises(ValueError, match="no group column 'class'"):
    compare_runs(folder / "private", folder / "plain", ["class"])
