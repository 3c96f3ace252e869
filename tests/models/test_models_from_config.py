"""Models and their sizes from the configuration: trained, released and read back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_config

import dp_jax
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.release import write_parameters
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state

MODELS = {
  "linear": {},
  "resnet": {"depth": 18, "width": 4, "groups": 2},
  "vit": {"depth": 1, "width": 8, "heads": 2, "patch": 4},
  "wide_resnet": {"depth": 10, "width": 1, "groups": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_release_gives_back_every_model(tmp_path, name):
  config = small_config(
    model={"name": name, "kwargs": MODELS[name]}, privacy={"enabled": False, "sampling_rate": 0.3}
  )
  run = prepare(config)
  # Values that no initialisation gives.
  moved = {name: x + 0.1 for name, x in run.params.items()}
  state = init_state(moved, run.optimizer, run.mesh)
  tmp_path.chmod(0o700)
  write_parameters(run, WorkDir(tmp_path), state, 0, False, Ledger())
  release = dp_jax.load_release(tmp_path)
  assert release.spec == run.task.spec and release.spec.kwargs == MODELS[name]
  for key, value in release.arrays.items():
    np.testing.assert_array_equal(value, moved[key])
  inputs = jnp.asarray(run.eval_loader.load(np.arange(4), 4)[0]["inputs"][:, 0])
  expected = run.released.predict(moved, inputs)
  np.testing.assert_allclose(release.predict(np.asarray(inputs)), expected, atol=1e-5)
  np.testing.assert_allclose(np.sum(expected, axis=1), 1, atol=1e-5)


@pytest.fixture(scope="module")
def half():
  return small_config(train__compute_dtype="bfloat16", train__steps=2)


def test_bfloat16_is_what_computes_and_float32_is_what_is_kept(half, tmp_path):
  train_config = dataclasses.replace(half.train, engine="vmap")
  run = prepare(dataclasses.replace(half, train=train_config))
  folder = WorkDir(tmp_path)
  loop = loop_module._loop(run, folder, MasterKey(bytes(range(32))))
  state = init_state(run.params, run.optimizer, run.mesh)
  units, mask = run.loader.load(np.arange(8), 32)
  arguments = (
    state.params, run.frozen, loop.functions.zeros(state.params), units, mask,
    np.zeros(32, np.uint32), jax.random.key(0),
  )  # fmt: skip
  lowered = loop.functions.accumulate.lower(*arguments)
  products = [line for line in lowered.as_text().splitlines() if "stablehlo.convolution" in line]
  assert len(products) >= 2 and all("xbf16>" in line for line in products)
  total, aux = lowered.compile()(*arguments)
  kinds = {str(x.dtype) for x in jax.tree.leaves((state, total, aux.norms, aux.losses))}
  assert kinds <= {"float32", "int32"}


def test_a_run_in_bfloat16_completes_and_releases_float32(half, tmp_path):
  result = train(half, tmp_path / "run", progress=False)
  assert result.epsilon <= 4.0
  release = dp_jax.load_release(tmp_path / "run")
  assert {str(x.dtype) for x in release.arrays.values()} == {"float32"}
