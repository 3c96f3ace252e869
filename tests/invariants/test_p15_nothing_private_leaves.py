"""P15: on data declared private, nothing data-dependent and un-noised leaves `private/`.

Two runs differ in every image and label (and in how many records are malformed), and in nothing
that is public. With one secret key, all that they leave outside `private/` and `checkpoints/`
must be the same, byte by byte, but for the noised parameters, their hash, and times.
"""

import json
import re

import numpy as np
import pytest
from support import (
  finish,
  flags_of,
  key_file,
  small_config,
  start,
  without_hashes,
  write_npz,
)

import dp_jax
from dp_jax.training.run import train

COUNT = 120
NOISED = ("release/params.safetensors", "release/manifest.json")


def _data(folder, seed, malformed):
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, 3, COUNT)
  labels[:malformed] = 77
  images = rng.integers(0, 255, (COUNT, 6, 6, 1), np.uint8)
  return write_npz(folder, images, labels)


def _run(folder, seed, declared, malformed=0):
  """What one run shows outside private/ and checkpoints/: name -> content."""
  folder.mkdir()
  config = small_config(
    data={
      "source": "npz", "path": str(_data(folder / "data", seed, malformed)), "declared": declared,
      "num_classes": 3,
    },
    train__steps=4,
  )  # fmt: skip
  code, out, err = finish(start(
    "train", *flags_of(config), f"--workdir={folder / 'run'}", "--json",
    f"--test_key_file={key_file(folder)}",
  ))  # fmt: skip
  assert code == 0, err
  result = json.loads(out.splitlines()[-1])
  shown = {"stdout": out.replace(str(result.pop("wall_seconds")), ""), "stderr": _timeless(err)}
  for path in sorted((folder / "run").rglob("*")):
    name = str(path.relative_to(folder / "run"))
    if path.is_file() and not name.startswith(("private/", "checkpoints/")):
      shown[name] = path.read_bytes().decode("latin-1") if name not in NOISED else ""
  texts = {name: text.replace(str(folder), "FOLDER") for name, text in shown.items()}
  if declared != "private":
    return texts
  return {name: without_hashes(text, folder / "run" / "release") for name, text in texts.items()}


def _timeless(text):
  text = re.sub(r"train: step [123]/4, .*\n", "", text)  # on a slow machine there are more of them
  return re.sub(r"\d+ units/s|\d+ s left|step 4/4, |\.0+", "", text)


def _leaks(a, b):
  return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


@pytest.fixture(scope="module")
def private_runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("p15")
  return [_run(folder / f"private{i}", i, "private", malformed=10 * i) for i in (0, 1)], folder


def test_everything_outside_private_is_the_same_for_other_data(private_runs):
  (a, b), _ = private_runs
  assert "release/privacy.json" in a and "report.html" in a and "config.json" in a
  assert _leaks(a, b) == []
  assert json.loads(a["stdout"].splitlines()[-1].replace('"wall_seconds": ,', ""))["metrics"] == {}


def test_what_training_saw_is_kept_to_the_owner(private_runs):
  _, folder = private_runs
  run = folder / "private1" / "run"
  assert (run / "private" / "training.jsonl").exists()
  assert len(json.loads((run / "private" / "bad_records.json").read_text())["train"]) > 0
  assert json.loads((run / "private" / "metrics.jsonl").read_text().splitlines()[-1])["final"]
  for name in ("private", "checkpoints"):
    assert (run / name).stat().st_mode & 0o777 == 0o700
  for path in [*run.glob("private/*"), *run.glob("checkpoints/**/*")]:
    assert path.stat().st_mode & 0o077 == 0, path
  assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", ["nan", "infinite", "huge", "one valid label"])
def test_no_record_stops_a_run_or_shows_in_what_it_prints(tmp_path, capfd, kind):
  """A private run whose evaluation or training split holds such records completes in silence."""
  rng = np.random.default_rng(0)
  images = rng.random((40, 4, 4, 1), np.float32)
  labels = rng.integers(0, 3, 40)
  if kind == "one valid label":  # of none, the run is refused: a public fact in its statement
    labels[1:] = 50
  else:
    images[3] = {"nan": np.nan, "infinite": np.inf, "huge": 3e38}[kind]
  data = write_npz(tmp_path / "data", images, labels)
  config = small_config(
    data={
      "source": "npz", "path": str(data), "declared": "private", "num_classes": 3,
      "value_range": [0.0, 1.0],
    },
    train__steps=2, eval={"every": 1},
  )  # fmt: skip
  train(config, tmp_path / "run", progress=False)
  assert capfd.readouterr() == ("", "")
  arrays = dp_jax.load_release(tmp_path / "run" / "release").arrays
  assert all(np.isfinite(x).all() for x in arrays.values())


def test_accuracy_and_loss_in_the_report_are_caught(tmp_path):
  """The broken variant is what public data may show: accuracy and loss, without noise."""
  a, b = (_run(tmp_path / f"public{seed}", seed, "public") for seed in (0, 1))
  assert {"metrics.jsonl", "report.html", "stdout"} <= set(_leaks(a, b))
