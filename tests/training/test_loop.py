"""The loop: transfers by name alone, a log that does not hold up the device, SIGTERM."""

import dataclasses
import os
import signal

import jax
import numpy as np
import pytest
from support import STEPS, key_file, lines, small_config

from dp_jax.parallel.stopping import Stopped, listening
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import hooks
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.flops import flops_per_unit, peak_flops
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
  folder = WorkDir(tmp_path_factory.mktemp("loop"))
  folder.private.mkdir()
  run = prepare(small_config(train__engine="vmap"))
  return loop_module._loop(run, folder, MasterKey(bytes(range(32))))


def test_a_transfer_by_accident_is_an_error(loop, monkeypatch):
  """The broken variant hands host arrays to the compiled functions."""
  state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
  state = loop.step(state, 0)
  original = loop_module.Loop._microbatches
  monkeypatch.setattr(
    loop_module.Loop, "_microbatches",
    lambda self, indices: (jax.device_get(piece) for piece in original(self, indices)),
  )  # fmt: skip
  with pytest.raises(Exception, match=r"(?i)disallowed host-to-device"):
    loop.step(state, 1)


def test_a_line_of_the_log_is_written_when_the_next_step_is_under_way(loop, tmp_path, monkeypatch):
  monkeypatch.setattr(hooks, "_WRITE_SECONDS", -1.0)  # as if steps were long
  log = loop_module.PrivateLog(tmp_path / "log.jsonl", loop.run)
  loop = dataclasses.replace(loop, log=log)
  state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
  for step in range(3):
    state = loop.step(state, step)
    log.after_step(step + 1, state)
    assert (len(lines(tmp_path / "log.jsonl")) if step else 0) == step
  log.flush()
  written = lines(tmp_path / "log.jsonl")
  assert [entry["step"] for entry in written] == [1, 2, 3]
  assert [entry["units"] for entry in written] == [
    len(loop.sampler.indices(step)) for step in range(3)
  ]
  assert all(entry["loss"] > 0 and 0 <= entry["clip_fraction"] <= 1 for entry in written)


def test_sigterm_finishes_the_step_saves_and_the_same_call_goes_on(tmp_path):
  original = loop_module.Loop.step

  def step(self, state, index):
    if index == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    return original(self, state, index)

  config = small_config(checkpoint={"every": 100})
  before = signal.getsignal(signal.SIGTERM)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop_module.Loop, "step", step)
    with pytest.raises(Stopped, match=f"step 3 of {STEPS} is saved; the same command goes on"):
      train(config, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  assert signal.getsignal(signal.SIGTERM) is before
  assert not (tmp_path / "run" / "release").exists()
  log = tmp_path / "run" / "private" / "training.jsonl"
  assert [entry["step"] for entry in lines(log)] == [1, 2, 3]
  steps = []

  def observed(self, state, index):
    steps.append(index)
    return original(self, state, index)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop_module.Loop, "step", observed)
    train(config, tmp_path / "run", progress=False)
  assert steps == list(range(3, STEPS))
  train(config, tmp_path / "whole", test_key_file=key_file(tmp_path), progress=False)
  params = "release/params.safetensors"
  assert (tmp_path / "run" / params).read_bytes() == (tmp_path / "whole" / params).read_bytes()


def test_outside_the_main_thread_nothing_is_noted():
  from concurrent.futures import ThreadPoolExecutor

  def listen():
    with listening() as stop:
      return stop.received

  assert ThreadPoolExecutor(1).submit(listen).result() is False


@pytest.mark.parametrize(("kind", "peak"), [
  ("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v5", 459e12),
  ("TPU v6 lite", 918e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12),
  ("NVIDIA H200", 989e12), ("NVIDIA B200", 2250e12), ("cpu", None), ("Tesla T4", None),
])  # fmt: skip
def test_peak_of_known_devices(kind, peak):
  assert peak_flops(kind) == peak


def test_the_model_s_operations_are_those_of_its_products():
  run = prepare(small_config(model={"name": "linear"}))
  # Forward, and the gradient of the kernel: two products of 64 x 10, two operations each.
  assert flops_per_unit(run) == pytest.approx(2 * 2 * 64 * 10, rel=0.3)


def test_bf16_and_float32_train_nearly_the_same(tmp_path):
  finals = {}
  for dtype in ("float32", "bfloat16"):
    config = small_config(train__compute_dtype=dtype, train__steps=3)
    folder = tmp_path / dtype
    train(config, folder, test_key_file=key_file(tmp_path), progress=False)
    finals[dtype] = lines(folder / "private" / "training.jsonl")
  for one, other in zip(*finals.values(), strict=True):
    assert one["units"] == other["units"]
    assert np.isclose(one["norm_median"], other["norm_median"], rtol=0.05)
    assert one["norm_median"] != other["norm_median"]
