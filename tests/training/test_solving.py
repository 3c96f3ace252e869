"""Solvers as runs: the same folder, ledger, record and statement as any other, and `verify`."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from support import key_file, small_config

from dp_jax.config import solver_config
from dp_jax.config.run_config import Config
from dp_jax.config.solver_config import SolverConfig
from dp_jax.privacy.ledger import Ledger
from dp_jax.solvers.choice import CANDIDATES
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.head import Preprocessing
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.noised import Releases
from dp_jax.statement.privacy_json import record_digest
from dp_jax.statement.verify import verify_release
from dp_jax.training import run as run_module
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

D, CLASSES, N = 8, 3, 1003


def _features(folder, count=N, seed=0):
  """An npz file of features around three directions, with some that are no features at all."""
  rng = np.random.default_rng(seed)
  arrays = {}
  for split, n in (("train", count), ("test", 400)):
    labels = rng.integers(0, CLASSES, n)
    x = 1.5 * np.eye(D)[labels] + 0.6 * rng.standard_normal((n, D)) + 1.0
    arrays |= {f"{split}_features": x.astype(np.float16), f"{split}_labels": labels}
  folder.mkdir(exist_ok=True)
  np.savez(folder / "features.npz", **arrays)
  return folder / "features.npz"


def _config(path, method="feature_covariance", **changes):
  descends = method in ("feature_covariance", "auto")
  descent = {"steps": 6, "learning_rate": 40.0, "momentum": 0.0, "schedule": "cosine"}
  clips = {} if method == "least_squares" else {"clip_norm": 0.5}
  return small_config(
    data={"source": "npz", "path": str(path), "declared": "public", "num_classes": CLASSES},
    model={"name": "feature_head"},
    privacy={
      "epsilon": 3.0, "delta": 1e-4, "sampling": "full_batch", **clips,
      **changes.pop("privacy", {}),
    },
    train={"steps": 1, **(descent if descends else {}), "microbatch_size": 200},
    solver={"method": method, "centre_share": 0.05, **changes.pop("solver", {})},
    **changes,
  )  # fmt: skip


METHODS = ("feature_covariance", "least_squares", "newton", "auto")


@pytest.mark.parametrize("method", METHODS)
def test_a_solver_is_a_run_that_verifies(tmp_path, method):
  result = train(_config(_features(tmp_path / "data"), method), tmp_path / "run", progress=False)
  assert result.metrics["test"]["accuracy"] > 0.8
  found = verify_release(tmp_path / "run" / "release")
  assert not found.problems, str(found)
  record = found.record
  assert 3.0 * (1 - 1e-3) <= record["epsilon"] <= 3.0
  purposes = [entry["purpose"] for entry in record["releases"]]
  assert [part["purpose"] for part in record["parts"]] == purposes and len(purposes) >= 3
  assert all(purpose in result.statement for purpose in purposes)
  assert "releases in the ledger of these data" not in result.statement
  release = load_release(tmp_path / "run")
  x = np.load(tmp_path / "data" / "features.npz")["test_features"].astype(np.float32)
  assert release.predict(x).shape == (400, CLASSES)
  again = train(_config(tmp_path / "data" / "features.npz", method), tmp_path / "run")
  assert again.metrics == result.metrics


@pytest.fixture(scope="module")
def released(tmp_path_factory):
  folder = tmp_path_factory.mktemp("solver")
  train(_config(_features(folder / "data")), folder / "run", progress=False)
  return folder / "run"


def _rewrite(release, change):
  record = json.loads((release / "privacy.json").read_text())
  change(record)
  record["digest"] = record_digest(record)
  (release / "privacy.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
  "change",
  [
    lambda record: record["parts"].pop(),
    lambda record: record["parts"].append(record["parts"][0]),
    lambda record: record.pop("parts"),
    lambda record: record["parts"][0].update(mechanism={}),
    lambda record: record["parts"][0]["mechanism"].update(noise_multiplier=1e9),
    lambda record: record["parts"][0]["mechanism"].update(noise_multiplier=0.0),
    lambda record: record["mechanism"].update(noise_multiplier=1e3),
    lambda record: record["parts"][2]["mechanism"].update(steps=1),
    lambda record: record["parts"][1].update(purpose=record["parts"][0]["purpose"]),
  ],
)
def test_verify_rejects_parts_that_do_not_add_up(released, tmp_path, change):
  copy = tmp_path / "release"
  shutil.copytree(released / "release", copy)
  _rewrite(copy, change)
  problems = verify_release(copy).problems
  assert [line for line in problems if "privacy.json" not in line or "hash" not in line]


def test_a_killed_run_begins_again_with_the_same_noise(tmp_path, monkeypatch):
  path = _features(tmp_path / "data")
  config, secret = _config(path), key_file(tmp_path)
  train(config, tmp_path / "whole", test_key_file=secret, progress=False)

  def killed(*arguments):
    solve_state(*arguments)
    raise KeyboardInterrupt

  solve_state = run_module.solve_state
  monkeypatch.setattr(run_module, "solve_state", killed)
  with pytest.raises(KeyboardInterrupt):
    train(config, tmp_path / "killed", test_key_file=secret, progress=False)
  monkeypatch.undo()
  train(config, tmp_path / "killed", test_key_file=secret, progress=False)
  a, b = (load_release(tmp_path / name).arrays for name in ("whole", "killed"))
  assert all((np.asarray(a[name]) == np.asarray(b[name])).all() for name in a)
  entries = json.loads((tmp_path / "killed" / "release" / "privacy.json").read_text())["releases"]
  assert len(entries) == 3, "paid once"


def _killed_at(patch, stage):
  """Replaces a function by one that ends the process when it is called."""

  def killed(*_):
    raise KeyboardInterrupt

  if stage == "between two releases":
    vector, calls = Releases.vector, []

    def second(self, *arguments):
      calls.append(arguments)
      return vector(self, *arguments) if len(calls) < 2 else killed()

    patch.setattr(Releases, "vector", second)
  else:
    patch.setattr(run_module, stage, killed)


STAGES = ("reserve", "solve_state", "between two releases", "delete_keys", "write_parameters")


def test_killed_at_any_stage_it_releases_what_it_would_have_released(tmp_path):
  path, secret = _features(tmp_path / "data"), key_file(tmp_path)
  config = _config(path, "least_squares")
  train(config, tmp_path / "whole", test_key_file=secret, progress=False)
  workdir = tmp_path / "killed"
  for stage in STAGES:  # one after the other, in the same folder
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
      _killed_at(patch, stage)
      train(config, workdir, test_key_file=secret, progress=False)
  assert not list((workdir / "checkpoints").glob("*/keys"))
  train(config, workdir, progress=False)
  for name in ("params.safetensors", "privacy.json"):
    assert (workdir / "release" / name).read_bytes() == (
      tmp_path / "whole" / "release" / name
    ).read_bytes()
  assert Ledger(workdir / "ledger.jsonl").count == 4


def test_old_noise_is_not_put_on_other_statistics(tmp_path):
  """After a kill, other records or settings are refused, without a number of what differs."""
  path = _features(tmp_path / "data")
  config = dict(_config(path, "least_squares").to_dict())
  config["data"]["declared"] = "private"
  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    _killed_at(patch, "between two releases")
    train(Config.from_dict(config), tmp_path / "run", progress=False)
  other = json.loads(json.dumps(config))
  other["solver"]["ridge"] = 3.0
  with pytest.raises(ValueError, match=r"solver\.ridge was"):
    train(Config.from_dict(other), tmp_path / "run", progress=False)
  arrays = dict(np.load(path))
  arrays["train_features"][5, 2] += np.float16(0.5)
  np.savez(path, **arrays)
  with pytest.raises(ValueError, match="is of another run: the records differ"):
    train(Config.from_dict(config), tmp_path / "run", progress=False)


def test_elsewhere_a_solver_draws_other_noise(tmp_path, monkeypatch):
  """P10: other software rounds differently, and old noise on that would show the difference."""
  config = _config(_features(tmp_path / "data"), "least_squares")
  secrets = []

  def killed(*arguments):
    secrets.append(arguments[-1].secret)
    raise KeyboardInterrupt

  monkeypatch.setattr(run_module, "solve_state", killed)
  for environment in ("here", "here", "elsewhere"):
    monkeypatch.setattr(run_module, "environment", lambda name=environment: name)
    with pytest.raises(KeyboardInterrupt):
      train(config, tmp_path / "run", progress=False)
  assert secrets[0] == secrets[1] != secrets[2]


def test_solver_runs_share_a_ledger(tmp_path):
  path = _features(tmp_path / "data")
  ledger = tmp_path / "ledger.jsonl"
  for name in ("first", "second"):
    train(_config(path), tmp_path / name, ledger_file=ledger, progress=False)
  assert len(Ledger(ledger).releases) == 6
  found = verify_release(tmp_path / "second" / "release")
  assert not found.problems, str(found)
  assert "With all 6 releases in the ledger" in found.record["statement"]


@pytest.mark.parametrize("adjacency", ["replace_one", "add_or_remove_one"])
def test_every_adjacency_verifies(tmp_path, adjacency, monkeypatch):
  privacy = {"adjacency": adjacency}
  if adjacency == "add_or_remove_one":
    privacy["expected_batch_size"] = 1000.0
  config = _config(_features(tmp_path / "data"), "least_squares", privacy=privacy)
  divisors = []
  solve_state = run_module.solve_state

  def spy(solving, loader, num_units, *rest):
    divisors.append(num_units)
    return solve_state(solving, loader, num_units, *rest)

  monkeypatch.setattr(run_module, "solve_state", spy)
  train(config, tmp_path / "run", progress=False)
  # P2: never the number that is there, where that is secret.
  assert divisors == [1000.0 if adjacency == "add_or_remove_one" else N]
  found = verify_release(tmp_path / "run" / "release")
  assert not found.problems, str(found)
  text, bounds = found.record["statement"], ["1", "0.7071067811865476", "0.5", "1"]
  if adjacency == "replace_one":
    # What a record adds to the second moment may be 1, above .71; twice .71 is what an exchange
    # moves it by.
    assert "each moved by at most twice the bound given by replacing a record" in text
    assert "adds at most" not in text
  else:
    assert "to each of which a record adds at most the bound given" in text
    bounds = ["1"] * 4
  assert re.findall(r"bound ([0-9.]+),", text) == bounds


def test_bad_features_change_nothing_else_and_are_not_told(tmp_path):
  """A record that is not finite or has no class counts as zero, on private data silently."""
  path = _features(tmp_path / "data")
  arrays = dict(np.load(path))
  arrays["train_features"][7] = np.nan
  arrays["train_labels"][8] = 99
  np.savez(path, **arrays)
  config = _config(path)
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, declared="private"))
  result = train(config, tmp_path / "run", progress=False)
  assert result.metrics == {}
  assert not verify_release(tmp_path / "run" / "release").problems
  arrays = load_release(tmp_path / "run").arrays
  assert all(np.isfinite(value).all() for value in arrays.values())


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"privacy": {"sampling": "poisson", "sampling_rate": 0.1}}, "must be full_batch"),
    ({"privacy": {"enabled": False, "epsilon": None}}, "privacy.epsilon"),
    ({"privacy": {"expected_batch_size": 100.0}}, "expected_batch_size"),
    ({"privacy": {"adjacency": "add_or_remove_one"}}, "expected_batch_size"),
    ({"privacy": {"accountant": "rdp"}}, "'rdp'"),
    ({"solver": {"moment_share": 0.99}}, "solver.moment_share"),
    ({"solver": {"power": 0.0}}, "solver.power"),
    ({"solver": {"average": 1.5}}, "solver.average=1.5"),
    ({"solver": {"methd": "newton"}}, "did you mean 'method'"),
    ({"model": {"name": "linear"}}, "feature_head"),
  ],
)
def test_what_a_solver_cannot_do_is_refused_before_anything(tmp_path, changes, message):
  values = _config(_features(tmp_path / "data")).to_dict()
  for section, content in changes.items():
    values[section] |= content
  with pytest.raises(ValueError, match=message):
    train(Config.from_dict(values), tmp_path / "run", progress=False)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("method", "changes", "users"),
  [
    ("least_squares", {"solver": {"whiten": 0.3}}, "of use to feature_covariance alone"),
    (
      "least_squares",
      {"privacy": {"clip_norm": 0.5}},
      "of use to feature_covariance and newton alone",
    ),
    ("newton", {"solver": {"average": 0.5}}, "of use to feature_covariance alone"),
    ("newton", {"solver": {"bias": False}}, "of use to feature_covariance alone"),
    ("newton", {"train": {"learning_rate": 3.0}}, "of use to feature_covariance alone"),
    ("feature_covariance", {"solver": {"eigenvalue_share": 0.1}}, "of use to least_squares alone"),
    ("feature_covariance", {"train": {"ema": 0.5}}, "of use to no solver"),
    ("auto", {"train": {"warmup_steps": 2}}, "of use to no solver"),
  ],
)
def test_what_a_method_would_ignore_is_refused(method, changes, users):
  """Also what it has another default for; nothing is opened for that."""
  values = _config("nowhere.npz", method).to_dict()
  for section, content in changes.items():
    values[section] |= content
    ((key, value),) = content.items()
  message = f"^{section}.{key}={value!r} is not used by solver.method={method}: .*{users}"
  with pytest.raises(ValueError, match=message):
    Config.from_dict(values)


def test_auto_takes_the_settings_of_every_method_that_it_may_take():
  everything = SolverConfig(
    "auto", eigenvalue_share=0.1, whiten=0.3, precondition=0.2, damping=1.0, bias=True, average=0.5
  )
  for key, users in solver_config.USED_BY.items():
    section, name = key.split(".")
    if section == "solver":
      config = _config("nowhere.npz", "feature_covariance")
      given = {"method": "auto", name: getattr(everything, name)}
      if set(users) & set(CANDIDATES):
        Config.from_dict(config.to_dict() | {"solver": given})
      else:
        with pytest.raises(ValueError, match=key):
          Config.from_dict(config.to_dict() | {"solver": given})


def test_what_is_left_out_takes_the_defaults_of_the_method(tmp_path):
  path = _features(tmp_path / "data")
  found = {name: prepare(_config(path, name)).solving.method for name in METHODS}
  assert found["least_squares"] == LeastSquares(Preprocessing(centre_share=0.05))
  assert found["newton"] == Newton(Preprocessing(centre_share=0.05), clip_norm=0.5)
  default = FeatureCovariance()
  for field in ("moment_share", "whiten", "precondition", "ridge", "damping"):
    assert getattr(found["feature_covariance"], field) == getattr(default, field)
  given = prepare(_config(path, "newton", solver={"moment_share": 0.3, "ridge": 2.0}))
  assert (given.solving.method.hessian_share, given.solving.method.ridge) == (0.3, 2.0)


def test_the_loop_trains_the_same_model_without_privacy(tmp_path):
  path = _features(tmp_path / "data")
  config = _config(path).to_dict() | {"solver": {}}
  config["privacy"] = {"enabled": False, "sampling": "full_batch"}
  config["train"] |= {"steps": 20, "learning_rate": 5.0}
  run = prepare(Config.from_dict(config))
  assert run.solving is None and sorted(run.params) == ["head.bias", "head.kernel"]
  result = train(Config.from_dict(config), tmp_path / "plain", progress=False)
  assert result.metrics["test"]["accuracy"] > 0.9
  assert jax.tree.leaves(run.params)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_head_without_noise_is_the_plain_run_of_a_solver(tmp_path, method):
  """For `compare`: it has no guarantee, and no release."""
  path = _features(tmp_path / "data")
  values = _config(path, method).to_dict()
  values["privacy"] |= {"enabled": False}
  heads = []
  for name in ("one", "two"):
    result = train(Config.from_dict(values), tmp_path / name, progress=False)
    assert result.epsilon is None and "without differential privacy" in result.statement
    assert not (tmp_path / name / "release").exists()
    heads.append((tmp_path / name / "unprotected" / "params.safetensors").read_bytes())
  assert heads[0] == heads[1]  # whatever the key, there is no noise
  assert result.metrics["test"]["accuracy"] > 0.9
