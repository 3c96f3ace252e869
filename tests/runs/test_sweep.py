"""`sweep`: what it trains, keeps, states and refuses; of private data only a path is shown."""

import dataclasses
import json
import re

import numpy as np
import pytest
from made_up_work_directories import people_table
from support import flags_of, small_config, write_npz

from dp_jax import cli
from dp_jax.config.run_config import Config
from dp_jax.evaluation.predictions import load_predictions
from dp_jax.privacy.accounting.composition import account_releases
from dp_jax.privacy.ledger import Ledger
from dp_jax.runs import sweep as sweep_module
from dp_jax.runs.sweep import sweep
from dp_jax.training.setup.target import make_mechanism

TARGETS = [1.0, 4.0]


def _config(folder, declared="public") -> Config:
  """Two groups, of which the one has easier records; a linear model in two full-batch steps."""
  rng = np.random.default_rng(0)
  labels, ward = rng.integers(0, 2, 160), np.array(["a", "b"] * 80)
  images = rng.random((160, 4, 4, 1), np.float32)
  images[:, 0, 0, 0] = labels * np.where(ward == "a", 1.0, 0.2)
  data = write_npz(folder / "data", images, labels, ward=ward)
  return small_config(
    data={"source": "npz", "path": str(data), "declared": declared, "groups": ["ward"],
          "num_classes": 2},
    model={"name": "linear"}, train={"steps": 2, "learning_rate": 0.5},
    privacy={"delta": 1e-3, "sampling": "full_batch"},
  )  # fmt: skip


class MadeUpTraining:
  """Leaves what `train` leaves of a completed run, as far as a sweep reads it.

  Attributes:
    trained: the folders that were asked for, in order.
  """

  def __init__(self):
    self.trained = []

  def __call__(self, config, path, **rest):
    self.trained.append("/".join(path.parts[-2:]))
    (path / "private").mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"config": config.to_dict()}))
    accuracy = 0.95 if not config.privacy.enabled else 0.6 + 0.05 * config.privacy.epsilon
    table = people_table(accuracy + 0.01 * config.seed)
    ward = np.array(["a", "b"])[table.unit % 2]
    table = dataclasses.replace(table, groups={"ward": ward})
    (path / "predictions.npz").write_bytes(table.to_bytes())
    if config.privacy.enabled:
      _, mechanism = make_mechanism(config, 160)
      ledger = Ledger(rest["ledger_file"], rest["ledger_budget"])
      ledger.reserve(mechanism, "training", unit="record", run=str(path))
      note = path / "private" / "ledger_identity.json"
      note.write_text(json.dumps({"ledger": str(ledger.path), "run": str(path)}))
    (path / "private" / "result.json").write_text("{}")


@pytest.fixture(name="training")
def _training(monkeypatch):
  made_up = MadeUpTraining()
  monkeypatch.setattr(sweep_module, "train", made_up)
  return made_up


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  folder = tmp_path_factory.mktemp("sweep")
  config = _config(folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sweep_module, "train", MadeUpTraining())
    return folder, config, sweep(config, folder / "runs", TARGETS, 2, progress=False)


def test_each_target_and_seed_is_a_run_and_the_table_has_them(done):
  folder, _, outcome = done
  found = {str(p.parent.relative_to(folder / "runs")) for p in folder.rglob("config.json")}
  names = ("epsilon_1", "epsilon_4", "plain")
  assert found == {f"{name}/seed_{seed}" for name in names for seed in (0, 1)}
  seeds = {json.loads(p.read_text())["config"]["seed"] for p in folder.rglob("config.json")}
  assert seeds == {0, 1}
  rows = outcome.table.rows
  assert [row.epsilon for row in rows] == [1.0, 4.0, None]
  for row, name in zip(rows, names, strict=True):
    tables = [
      load_predictions(folder / "runs" / name / f"seed_{s}" / "predictions.npz") for s in (0, 1)
    ]
    right = [table.predicted == table.label for table in tables]
    assert row.accuracies == pytest.approx([r.mean() for r in right], abs=1e-6)
    assert row.accuracy.low < row.accuracy.value == pytest.approx(np.mean(row.accuracies))
    ward = tables[0].groups["ward"] == "a"
    gaps = [abs(r[ward].mean() - r[~ward].mean()) for r in right]
    assert row.gaps["ward"].value == pytest.approx(np.mean(gaps), abs=1e-6)


def test_the_total_is_the_composition_of_the_ledger_of_all_runs(done):
  folder, _, outcome = done
  releases = Ledger(folder / "runs" / "ledger.jsonl").releases
  assert len(releases) == outcome.table.private_runs == 4
  assert outcome.table.total == account_releases(releases, 1e-3).epsilon
  # The broken variant: one run's epsilon for the whole sweep.
  assert outcome.table.total > 1.3 * max(TARGETS)
  statement = outcome.table.statement()
  assert "No run's epsilon covers a sweep" in statement and "4 private runs" in statement
  selection = [row.selection for row in outcome.table.rows]
  assert selection[2] is None
  assert all(s > e for s, e in zip(selection[:2], TARGETS, strict=True))


def test_files_agree_and_stand_alone(done):
  folder, _, outcome = done
  content = json.loads((folder / "runs" / "sweep.json").read_text())
  assert content == json.loads(json.dumps(outcome.table.to_dict()))
  text = (folder / "runs" / "sweep.html").read_text()
  assert not re.search(r"(https?:)?//[a-z]", text) and "<script" not in text
  assert text.count("<svg") == 2 and text.count("<table") == 3
  markdown = (folder / "runs" / "sweep.md").read_text()
  rows = [line for line in markdown.splitlines() if line.startswith("|")]
  assert len(rows) == 2 + 3 and len({row.count("|") for row in rows}) == 1
  assert (folder / "runs" / "sweep.svg").read_text().count("<svg") == 1
  assert (folder / "runs" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_complete_runs_are_kept_and_others_go_on(done, training):
  folder, config, outcome = done
  again = sweep(config, folder / "runs", TARGETS, 2, progress=False)
  assert training.trained == [] and again.table == outcome.table
  # A run that was killed before it was complete goes on, in its own folder.
  (folder / "runs" / "epsilon_4" / "seed_1" / "private" / "result.json").unlink()
  assert sweep(config, folder / "runs", TARGETS, 2, progress=False).table == outcome.table
  assert training.trained == ["epsilon_4/seed_1"]
  one = sweep(config, folder / "runs", [4.0], 1, progress=False)
  assert one.table.private_runs == 4  # what earlier sweeps released counts


def test_private_data_only_the_path_is_shown(tmp_path, capfd):
  """With real training: a private run and a plain one."""
  config = _config(tmp_path, "private")
  arguments = [*flags_of(config), f"--workdir={tmp_path / 'runs'}", "--epsilons=2", "--seeds=1"]
  for flag in ([], ["--json"]):
    assert cli.main(["sweep", *arguments, *flag]) == 0
    out, err = capfd.readouterr()
    path = str(tmp_path / "runs" / "private" / "sweep.html")
    assert (json.loads(out) if flag else out.strip()) == ({"written_to": path} if flag else path)
    assert "accuracy" not in err
  top = sorted(p.name for p in (tmp_path / "runs").iterdir())
  assert top == ["epsilon_2", "ledger.jsonl", "plain", "private"]
  private = tmp_path / "runs" / "private"
  for each in (private, *private.iterdir()):
    assert each.stat().st_mode & 0o077 == 0, each
  assert "Not covered by any guarantee" in (private / "sweep.html").read_text()


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "give at least one epsilon"),
    (["--epsilons=1,x"], "--epsilons=1,x must be numbers"),
    (["--epsilons=1,-2"], "epsilon -2.0 must be positive"),
    (["--epsilons=1,1.0"], "name one twice"),
    (["--epsilons=1", "--seeds=0"], "seeds=0 must be at least 1"),
    (["--epsilons=1", "--groups=colour"], "there is no group column 'colour'; one of class, ward"),
    (["--epsilons=1", "--config.privacy.sampling_rate=0.5"], "no meaning under sampling"),
  ],
)
def test_bad_input_is_one_line_before_anything_is_trained(tmp_path, capsys, arguments, said):
  config = _config(tmp_path)
  folder = tmp_path / "runs"
  assert cli.main(["sweep", *flags_of(config), f"--workdir={folder}", *arguments]) == 2
  out, err = capsys.readouterr()
  assert out == "" and said in err and len(err.splitlines()) == 1
  assert not folder.exists()


def test_another_sweep_in_the_folder_is_refused(done):
  folder, config, _ = done
  other = Config.from_dict({**config.to_dict(), "train": {"steps": 3}})
  with pytest.raises(ValueError, match=r"belongs to another run: .*train.steps was 2, is 3"):
    sweep(other, folder / "runs", TARGETS, 2, progress=False)
  with pytest.raises(ValueError, match="is the work directory of a run"):
    sweep(config, folder / "runs" / "plain" / "seed_0", TARGETS, 2, progress=False)
