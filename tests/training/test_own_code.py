"""A model, a task and a source of one's own, from a folder outside the repository."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import own_code
import pytest
from flax import linen, nnx
from support import ROOT, small_config

import dp_jax
from dp_jax.config.run_config import Config
from dp_jax.models.opening import from_object
from dp_jax.statement.verify import verify_release
from dp_jax.training.setup.given import program_digest
from dp_jax.training.setup.prepare import prepare


def _command(folder, *arguments, wait=True):
  """`dp-jax` started in the folder, as an installed program is."""
  code = "import sys; sys.path = [p for p in sys.path if p]; from dp_jax.cli import run; run()"
  # The package is found as if it were installed; the current directory is not on the path.
  env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  process = subprocess.Popen(
    [sys.executable, "-c", code, *arguments], cwd=folder, env=env, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  if not wait:
    return process
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory):
  """A run of own code: killed once it has a checkpoint, and then completed."""
  folder = tmp_path_factory.mktemp("elsewhere")
  own_code.write(folder)
  arguments = ("train", "--config=own_config.py", "--workdir=run")
  process = _command(folder, *arguments, "--config.train.steps=12", wait=False)
  steps = folder / "run" / "checkpoints"
  while process.poll() is None and not list(steps.glob("[1-9]*")):
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  code, out, err = _command(folder, *arguments)
  assert code == 0, err
  return folder, out


def test_it_is_trained_killed_resumed_verified_evaluated_and_reported_on(run):
  folder, out = run
  assert "mean_absolute_error" in out and "each person" in out
  assert verify_release(folder / "run" / "release").problems == []
  record = json.loads((folder / "run" / "release" / "privacy.json").read_text())
  code = record["treated_as_public"]["code"]
  assert {code[what]["name"] for what in ("model", "task", "source")} == {
    "own:Model", "own:Regression", "own:People",
  }  # fmt: skip
  assert code["model"]["kwargs"] == {"hidden": 3} and len(code["loss_sha256"]) == 64
  assert len(record["releases"]) == 1  # paid once, though it was killed
  code, out, err = _command(
    folder, "evaluate", "run/release", "--config=own_config.py", "--trust_code", "--json"
  )
  assert code == 0, err
  assert json.loads(out)["mean_absolute_error"] < 2.0
  code, _, err = _command(folder, "report", "run")
  assert code == 0, err


def test_code_that_a_release_names_is_not_run_unless_it_is_trusted(run):
  folder, _ = run
  with pytest.raises(ValueError, match=r"own:Regression.*trust_code"):
    dp_jax.load_release(folder / "run")
  code, _, err = _command(folder, "evaluate", "run/release", "--config=own_config.py")
  assert code == 2 and "--trust_code" in err and "Traceback" not in err


def test_a_release_is_not_read_with_other_code_than_it_was_made_with(run, tmp_path, monkeypatch):
  folder, _ = run
  own_code.write(tmp_path)
  (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "# more\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "own", raising=False)
  with pytest.raises(
    ValueError, match=r"own:Regression' is not the code that the release was made"
  ):
    dp_jax.load_release(folder / "run", trust_code=True)
  task = importlib.import_module("own").Regression()
  with pytest.raises(
    ValueError, match=r"own:Model' is not the code that the release was made with"
  ):
    dp_jax.load_release(folder / "run", task=task, trust_code=True)


def test_hosts_compare_the_code_of_others(monkeypatch):
  """Under one name with the version of dp_jax, it would not be compared."""
  from dp_jax.training import agreement

  shown = []
  monkeypatch.setattr(agreement, "agree", lambda seen, hidden: shown.append(seen))
  run = prepare(small_config())
  agreement.agree_on_run(dataclasses.replace(run, code={"model": {"sha256": "ab"}}), None)
  assert shown[0]["code"] == {"model": {"sha256": "ab"}} and "source" in shown[0]["dp_jax"]


def test_a_resume_under_other_code_is_refused(run, tmp_path, monkeypatch):
  """The file's hash tells, and where that is the same, the program that it makes."""
  own_code.write(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "own", raising=False)
  values = {
    "data": {"source": "own:People", "declared": "public", "value_range": (-8.0, 8.0),
             "max_records_per_unit": 2},
    "model": {"name": "own:Model"}, "task": {"name": "own:Regression"},
    "privacy": {"epsilon": 4.0, "delta": 1e-3, "unit": "person", "sampling_rate": 0.3},
    "train": {"steps": 12, "microbatch_size": 32}, "mesh": "data:1",
  }  # fmt: skip
  before = prepare(Config.from_dict(values)).fingerprint()["code"]
  assert prepare(Config.from_dict(values)).fingerprint()["code"] == before
  own = importlib.import_module("own")
  monkeypatch.setattr(own, "SCALE", 2.0)  # the file is as it was
  after = prepare(Config.from_dict(values)).fingerprint()["code"]
  assert after["model"] == before["model"] and after["loss_sha256"] != before["loss_sha256"]
  (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "# more\n")
  assert prepare(Config.from_dict(values)).fingerprint()["code"]["model"] != before["model"]


def test_constants_of_a_program_are_part_of_it():
  table = np.arange(4.0, dtype=np.float32)
  one = program_digest(lambda x: x @ table, np.ones(4, np.float32))
  assert one == program_digest(lambda x: x @ table, np.ones(4, np.float32))
  table = table + np.eye(4, dtype=np.float32)[2]
  assert program_digest(lambda x: x @ table, np.ones(4, np.float32)) != one


class _Net(linen.Module):
  @linen.compact
  def __call__(self, x):
    return linen.Dense(2)(x)


def _linear_pair():
  init = lambda key: {"w": jax.random.normal(key, (3, 2)) * 0.1, "b": jax.numpy.zeros(2)}  # noqa: E731
  return init, lambda params, x: x @ params["w"] + params["b"]


@pytest.mark.parametrize("kind", ["nnx", "linen", "pair"])
def test_objects_are_trained_like_what_a_configuration_names(tmp_path, kind):
  model = {
    "nnx": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "linen": lambda: (_Net(), _Net().init(jax.random.key(0), np.zeros((1, 3), np.float32))),
    "pair": _linear_pair,
  }[kind]()
  rng = np.random.default_rng(0)
  x = rng.uniform(-1, 1, (240, 3)).astype(np.float32)
  arrays = {"inputs": x, "label": (x[:, 0] > 0).astype(int), "patient": np.arange(240) // 2}
  config = {
    "data": {"declared": "public", "num_classes": 2, "value_range": (-1.0, 1.0),
             "max_records_per_unit": 2},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "unit": "patient", "sampling_rate": 0.5},
    "train": {"steps": 10, "learning_rate": 2.0, "microbatch_size": 64}, "mesh": "data:1",
  }  # fmt: skip
  result = dp_jax.train(
    config, tmp_path / "run", model=model, source=arrays, eval_source=arrays, progress=False
  )
  assert result.metrics["test"]["accuracy"] > 0.8 and "each patient" in result.statement
  assert verify_release(tmp_path / "run" / "release").problems == []
  release = dp_jax.load_release(tmp_path / "run", model=model)
  assert np.mean(release.predict(x).argmax(axis=1) == arrays["label"]) > 0.8
  with pytest.raises(ValueError, match="given as an object"):
    dp_jax.load_release(tmp_path / "run")


@pytest.mark.parametrize(("model", "told"), [
  (3, "is not an nnx.Module"),
  ((3, 4), "neither"),
  ((_Net(), 3), "neither"),
])  # fmt: skip
def test_what_is_no_model_is_refused(model, told):
  with pytest.raises(ValueError, match=told):
    from_object(model)


def test_batch_statistics_of_a_linen_module_are_refused():
  class Mixing(linen.Module):
    @linen.compact
    def __call__(self, x):
      return linen.Dense(2)(linen.BatchNorm(use_running_average=False)(x))

  variables = Mixing().init(jax.random.key(0), np.zeros((2, 3), np.float32))
  arrays = {"inputs": np.zeros((8, 3), np.float32), "label": np.zeros(8, int)}
  config = small_config(
    data={"source": "given", "declared": "public", "num_classes": 2, "value_range": (-1.0, 1.0)}
  )
  from dp_jax.training.setup.given import Given

  with pytest.raises(ValueError, match="BatchNorm in training mode"):
    prepare(config, Given((Mixing(), variables), None, arrays, arrays))
