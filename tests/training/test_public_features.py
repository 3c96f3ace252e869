"""solver.public_features: statistics that cost nothing, of records that nothing protects."""

import dataclasses
import hashlib
import json
import subprocess

import numpy as np
import pytest
from support import key_file, small_config

from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.privacy.master_key import MasterKey
from dp_jax.solvers.descent import GRADIENT
from dp_jax.solvers.feature_units import array_data
from dp_jax.solvers.head import CENTRE, public_statistics
from dp_jax.solvers.least_squares import CROSS, EIGENVALUE, MOMENT
from dp_jax.solvers.newton import HESSIAN
from dp_jax.solvers.noised import Releases
from dp_jax.statement.privacy_json import NOT_COVERED_FEATURES, record_digest
from dp_jax.statement.verify import verify_release
from dp_jax.training import run as run_module
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup import prepare as prepare_module
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.setup.public_features import read_public_features

D, CLASSES, N = 8, 3, 700


def _rows(count, seed):
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, CLASSES, count)
  x = 1.5 * np.eye(D)[labels] + 0.6 * rng.standard_normal((count, D)) + 1.0
  return x.astype(np.float16), labels


def _npz(path, *, seed=0, count=N, **changes):
  arrays = {}
  for split, n, offset in (("train", count, 0), ("test", 300, 100)):
    arrays[f"{split}_features"], arrays[f"{split}_labels"] = _rows(n, seed + offset)
  np.savez(path, **(arrays | changes))
  return path


def _folder(path, *splits, **origin):
  writer = ShardWriter(path, num_classes=CLASSES, origin=origin, records_per_shard=300)
  for split, rows in zip(("train", "test"), splits, strict=False):
    writer.append(split, *rows)
  writer.close()
  return path


@pytest.fixture
def paths(tmp_path):
  """Private features, and public ones of other records."""
  return _npz(tmp_path / "private.npz"), _npz(tmp_path / "public.npz", seed=1, count=500)


def config(path, public, method="feature_covariance", *, declared="private", **changes):
  solver = {"method": method, "public_features": public and str(public)}
  if method == "feature_covariance":
    solver["moment_share"] = 0.0
  descends = method == "feature_covariance"
  descent = {"steps": 6, "learning_rate": 40.0, "momentum": 0.0, "schedule": "cosine"}
  clips = {} if method == "least_squares" else {"clip_norm": 0.5}
  return small_config(
    data={"source": "npy" if path.is_dir() else "npz", "path": str(path), "declared": declared,
          "num_classes": CLASSES},
    model={"name": "feature_head"},
    privacy={"epsilon": 3.0, "delta": 1e-4, "sampling": "full_batch", **clips},
    train={"steps": 1, **(descent if descends else {}), "microbatch_size": 200},
    solver=solver, **changes,
  )  # fmt: skip


@pytest.mark.parametrize(("method", "releases"), [
  ("feature_covariance", [GRADIENT]), ("least_squares", [MOMENT, EIGENVALUE, CROSS]),
  ("newton", [HESSIAN, GRADIENT]),
])  # fmt: skip
def test_the_centre_costs_nothing_and_the_statement_names_the_file(
  paths, tmp_path, method, releases
):
  path, public = paths
  result = train(config(path, public, method, declared="public"), tmp_path / "run", progress=False)
  assert result.metrics["test"]["accuracy"] > 0.8
  found = verify_release(tmp_path / "run" / "release")
  assert not found.problems, str(found)
  assert [entry["purpose"] for entry in found.record["releases"]] == releases
  digest = hashlib.sha256(public.read_bytes()).hexdigest()
  fact = f"sha256 {digest}, split train of public.npz"
  assert found.record["treated_as_public"]["public_features"] == fact
  assert found.record["statement_long"].count(fact) == 2
  assert NOT_COVERED_FEATURES in found.record["not_covered"]
  arrays = load_release(tmp_path / "run").arrays
  assert ("transform" in arrays) == (method == "feature_covariance")
  x = np.load(public)["train_features"].astype(np.float64)
  mean = (x / np.linalg.norm(x, axis=1, keepdims=True)).mean(axis=0)
  # Rows are clipped to a little less than their norm before they are added up.
  np.testing.assert_allclose(arrays["centre"], mean, rtol=4e-3)
  record = found.record
  record["not_covered"].remove(NOT_COVERED_FEATURES)
  record["digest"] = record_digest(record)
  (tmp_path / "run" / "release" / "privacy.json").write_text(json.dumps(record))
  problems = verify_release(tmp_path / "run" / "release").problems
  assert any(NOT_COVERED_FEATURES in problem for problem in problems)


def test_the_public_moment_whitens(paths):
  """By its formula, in float64: (M + ridge of the mean eigenvalue)^-whiten, at most 1."""
  values = config(*paths).to_dict()
  values["solver"] |= {"whiten": 0.4, "ridge": 0.7}
  run = prepare(type(config(*paths)).from_dict(values))
  found = _solved(run, _rows(50, 9)).transform
  x = np.load(paths[1])["train_features"].astype(np.float64)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  x -= np.asarray(run.public_features.statistics.centre, np.float64)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  moment = x.T @ x / len(x)
  values, vectors = np.linalg.eigh(moment)
  white = (values + 0.7 * values.mean()) ** -0.4
  expected = (vectors * white / white.max()) @ vectors.T
  np.testing.assert_allclose(found, expected, atol=1e-4)


def _solved(run, rows):
  """The head that a prepared run's solver fits to some private rows."""
  releases = Releases(run.solving.mechanisms, MasterKey(bytes(32), is_test=True))
  return run.solving.method.solve(array_data(*rows, CLASSES), releases)


def _same_normalisation(tmp_path, public):
  """Whether centre and transform are the same for two sets of private records."""
  tmp_path.mkdir()
  heads = []
  for seed in (0, 5):
    path = _npz(tmp_path / f"private{seed}.npz", seed=seed)
    heads.append(_solved(prepare(config(path, public)), _rows(N, seed)))
  a, b = heads
  assert (a.kernel != b.kernel).any()
  return bool((a.centre == b.centre).all() and (a.transform == b.transform).all())


def test_private_records_have_no_part_in_the_normalisation(paths, tmp_path, monkeypatch):
  """What is released without noise is a function of public records alone."""
  assert _same_normalisation(tmp_path / "as_it_is", paths[1])

  def of_the_data(config, record, sources):  # the broken variant
    found = read_public_features(config, record, sources)
    rows = array_data(*sources[0].gather(np.arange(N)).values(), CLASSES)
    return dataclasses.replace(found, statistics=public_statistics(rows))

  monkeypatch.setattr(prepare_module, "read_public_features", of_the_data)
  assert not _same_normalisation(tmp_path / "broken", paths[1])


def test_a_folder_of_shards_has_the_hash_that_sha256sum_gives(paths, tmp_path):
  public = _folder(tmp_path / "public", _rows(500, 1), declared="public")
  run = prepare(config(paths[0], public))
  shown = subprocess.run(
    "sha256sum manifest.json train_*.npy | sha256sum", shell=True, cwd=public, text=True,
    capture_output=True, check=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
  )  # fmt: skip
  assert run.public_features.digest == shown.stdout.split()[0]
  from_npz = prepare(config(*paths)).public_features.statistics
  np.testing.assert_array_equal(run.public_features.statistics.moment, from_npz.moment)


def test_a_run_does_not_go_on_under_other_public_features(paths, tmp_path, monkeypatch):
  """Old noise on another normalisation: the difference would be free of noise."""
  path, public = paths
  secret, folder = key_file(tmp_path), tmp_path / "run"
  train(config(path, public), tmp_path / "whole", test_key_file=secret, progress=False)

  def killed(*arguments):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(run_module, "solve_state", killed)
    with pytest.raises(KeyboardInterrupt):
      train(config(path, public), folder, test_key_file=secret, progress=False)
  content = public.read_bytes()
  _npz(public, seed=2, count=500)
  with pytest.raises(ValueError, match="public_features_digest was") as refused:
    train(config(path, public), folder, test_key_file=secret, progress=False)
  assert "old noise on new gradients" in str(refused.value)
  assert not (folder / "release").exists()
  public.write_bytes(content)
  train(config(path, public), folder, test_key_file=secret, progress=False)
  a, b = ((run / "release/params.safetensors").read_bytes() for run in (tmp_path / "whole", folder))
  assert a == b


MADE_BY = {"weights_sha256": "ab", "preprocessing_sha256": "cd", "source_sha256": {"train": "ef"}}


@pytest.mark.parametrize(("origin", "named"), [
  ({"declared": "private"}, "was made from data declared private"),
  ({"weights_sha256": "xx"}, "was made with weights_sha256 xx, and data/train with ab"),
  ({"preprocessing_sha256": "xx"}, "was made with preprocessing_sha256 xx, and data/train with cd"),
  ({"source_sha256": {"val": "ef"}}, "holds the records of data/train"),
])  # fmt: skip
def test_features_that_are_not_public_or_of_another_model_are_refused(tmp_path, origin, named):
  path = _folder(tmp_path / "data", _rows(N, 0), _rows(300, 100), **MADE_BY, declared="private")
  good = {**MADE_BY, "source_sha256": {"train": "gh"}, "declared": "public"}
  public = _folder(tmp_path / "public", _rows(500, 1), **good)
  prepare(config(path, public))
  public = _folder(tmp_path / "other", _rows(500, 1), **{**good, **origin})
  with pytest.raises(ValueError, match=named):
    train(config(path, public), tmp_path / "run", progress=False)
  assert not (tmp_path / "run").exists()


def _shuffled(rows):
  order = np.random.default_rng(3).permutation(len(rows[0]))
  return rows[0][order], rows[1][order]


@pytest.mark.parametrize(("rows", "named"), [
  (lambda: _shuffled(_rows(N, 0)), "holds the records of private.npz/train"),
  (lambda: _shuffled(_rows(300, 100)), "holds the records of private.npz/test"),
  (lambda: (_rows(500, 1)[0][:, :7], _rows(500, 1)[1]), r"records of shape \(7,\), and the data"),
  (lambda: (np.full((9, D), np.inf, np.float16), np.zeros(9, int)), "record 0 has numbers that"),
  (lambda: (np.zeros((9, D), np.float16), np.zeros(9, int)), "no two rows that differ"),
])  # fmt: skip
def test_the_data_itself_and_what_does_not_fit_is_refused(paths, tmp_path, rows, named):
  public = _folder(tmp_path / "other", rows())
  with pytest.raises(ValueError, match=named):
    train(config(paths[0], public), tmp_path / "run", progress=False)
  assert not (tmp_path / "run").exists()


def test_almost_the_same_records_are_other_records(paths, tmp_path):
  """The hash is of content: one number more or less."""
  x, labels = _rows(N, 0)
  x[5, 2] += 1
  prepare(config(paths[0], _folder(tmp_path / "other", (x, labels))))


@pytest.mark.parametrize(("solver", "named"), [
  ({"method": "none"}, r"solver\.public_features=.*is for a solver"),
  ({"method": "newton", "moment_share": None, "centre_share": 0.1},
   r"solver\.centre_share=0\.1 must be 0.*newton"),
  ({"moment_share": 0.1}, r"solver\.moment_share=0\.1 must be 0"),
  ({"method": "auto", "moment_share": 0.1}, r"solver\.moment_share=0\.1 must be 0"),
  ({"public_features": None, "public_split": "val"}, r"solver\.public_split='val'"),
  ({"public_split": "val"}, "has no array 'val_image'"),
  ({"public_features": "missing.npz"}, "no such folder: missing.npz"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(paths, solver, named):
  values = config(*paths).to_dict()
  values["solver"] |= solver
  with pytest.raises(ValueError, match=named):
    prepare(type(config(*paths)).from_dict(values))


def test_the_file_of_the_run_is_refused_under_any_name_of_it(paths, tmp_path):
  (tmp_path / "link.npz").symlink_to(paths[0])
  for public in (paths[0], tmp_path / "link.npz"):
    with pytest.raises(ValueError, match=r"is data\.path"):
      prepare(config(paths[0], public))


def test_no_noised_mean_beside_a_public_one(paths):
  assert CENTRE not in prepare(config(*paths)).releases


def test_what_is_said_of_the_weights_behind_them_is_said_of_the_run(paths, tmp_path):
  """As that they are a private release themselves, whose guarantee adds to this one."""
  said = {"weights_sha256": "ab", "weights_warnings": ["the weights are a release themselves"]}
  public = _folder(tmp_path / "public", _rows(500, 1), **said)
  found = set(prepare(config(paths[0], public)).weights_warnings)
  own = "that the starting weights are public is taken from the configuration"  # not recorded
  assert found == {own, *said["weights_warnings"]}
