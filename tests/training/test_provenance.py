"""A chain of runs: what private records reached is known of every run that went on from there."""

import dataclasses
import json

import numpy as np
import pytest
from support import key_file, small_config, write_npz

from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import to_list
from dp_jax.statement.verify import verify_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

PLAIN, LAST = "unprotected/params.safetensors", "unprotected/step_1.safetensors"
RELEASE = "release/params.safetensors"


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
  """plain and release: of private data. plain_2: of public data, from plain, whose weights its
  learning rate leaves as they were. test_key: a private run from release, with a test key.
  """
  folder = tmp_path_factory.mktemp("chain")
  rng = np.random.default_rng(0)
  images, labels = rng.integers(0, 255, (40, 2, 2, 1), np.uint8), rng.integers(0, 2, 40)
  data = write_npz(folder / "data", images, labels, patient=np.arange(40))

  def config(start=None, *, private=True, declared="private", **changes):
    return small_config(
      data={"source": "npz", "path": str(data), "num_classes": 2, "declared": declared},
      model={"name": "linear", "weights": None if start is None else str(folder / start)},
      privacy={"enabled": private, "unit": "patient", "sampling": "full_batch",
               **({"epsilon": 4.0, "delta": 1e-3} if private else {})},
      train__steps=2, eval={"every": 1}, **changes,
    )  # fmt: skip

  def run(name, *args, key=None, **changes):
    train(config(*args, **changes), folder / name, test_key_file=key, progress=False)

  run("plain", private=False)
  same = {"declared": "public", "train__learning_rate": 1e-20}
  run("plain_2", f"plain/{PLAIN}", private=False, **same)
  run("release")
  run("test_key", f"release/{RELEASE}", key=key_file(folder))
  return folder, config


def _sha256(path):
  return weights.lineage(path)[0].sha256


@pytest.mark.parametrize(("start", "behind"), [
  (f"plain/{PLAIN}", None), (f"plain_2/{PLAIN}", f"plain/{PLAIN}"),
  (f"plain_2/{LAST}", f"plain/{PLAIN}"), (f"test_key/{RELEASE}", None),
])  # fmt: skip
def test_no_private_run_starts_from_what_private_records_reached(chain, start, behind):
  """Public data in between clean nothing: the arrays may be the same."""
  folder, config = chain
  with pytest.raises(ValueError, match=r"on data declared private; starting from .* would carry"):
    prepare(config(start))
  if behind is not None:
    first, last = (weights.load(folder / each)[1] for each in (behind, start))
    for name in first:
      np.testing.assert_allclose(last[name], first[name], rtol=1e-6)
    assert weights.lineage(folder / start)[1].sha256 == _sha256(folder / behind)


def test_a_plain_run_is_told_and_goes_on(chain):
  folder, config = chain
  run = prepare(config(f"plain_2/{PLAIN}", private=False, declared="public"))
  assert [each.sha256 for each in run.ancestry] == [
    _sha256(folder / f"{name}/{PLAIN}") for name in ("plain_2", "plain")
  ]
  assert any("hold records declared private" in each for each in run.warnings)


def test_that_guarantees_add_up_is_said_with_the_guarantee(chain):
  folder, config = chain
  epsilon = json.loads((folder / "release/release/privacy.json").read_text())["epsilon"]
  own = weights.lineage(folder / "release" / RELEASE)[0]
  assert (own.epsilon, own.delta, own.unit) == (epsilon, 1e-3, "patient")
  assert own.adjacency == "zero_out" and own.protected and own.traced and not own.test_key
  (said,) = prepare(config(f"release/{RELEASE}")).weights_warnings
  assert "the guarantees add up" in said and "0.001) for each patient under zero_out" in said


def test_a_private_run_states_and_passes_on_what_is_behind_it(chain):
  folder, _ = chain
  found = verify_release(folder / "test_key" / "release")
  assert not found.problems, str(found)
  assert "the guarantees add up" in found.record["statement"]
  behind = weights.lineage(folder / "test_key" / RELEASE)
  assert [(each.protected, each.test_key) for each in behind] == [(True, True), (True, False)]
  assert behind[1].sha256 == _sha256(folder / "release" / RELEASE)


def test_the_models_behind_features_count_as_well(chain, tmp_path):
  """A manifest carries the ancestry, a run on the features passes it on, and a resume compares."""
  folder, _ = chain
  for start, refused in ((f"plain_2/{PLAIN}", True), (f"release/{RELEASE}", False)):
    behind = weights.lineage(folder / start)
    origin = {"weights_sha256": behind[0].sha256, "weights_ancestry": to_list(behind)}
    features = tmp_path / start.partition("/")[0]
    writer = ShardWriter(features, num_classes=2, origin=origin)
    for split in ("train", "test"):
      writer.append(split, np.eye(40, 6, dtype=np.float32), np.arange(40) % 2)
    writer.close()
    private = small_config(
      data={"source": "npy", "path": str(features)}, model={"name": "linear"},
      privacy={"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch"}, train__steps=1,
    )  # fmt: skip
    plain = dataclasses.replace(
      private, privacy=dataclasses.replace(private.privacy, enabled=False, epsilon=None, delta=None)
    )
    run = prepare(plain)
    assert run.ancestry == behind and run.fingerprint()["features_ancestry"] == to_list(behind)
    if refused:
      with pytest.raises(ValueError, match="1 back in the ancestry of"):
        prepare(private)
    else:
      assert "the guarantees add up" in prepare(private).weights_warnings[0]
