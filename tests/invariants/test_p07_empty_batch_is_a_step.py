"""P7: an empty Poisson batch is a normal step: noise is added, the step is counted."""

import jax
import numpy as np
import pytest
from support import STEPS, key_file, lines, small_config

from dp_jax.training.loop import Loop
from dp_jax.training.run import train


def _run(folder, step):
  """Trains with `step` in the loop: the moves of its empty steps, and the result."""
  moves = []

  def observed(self, state, index):
    before = jax.tree.map(np.array, state.params)
    after = step(self, state, index)
    if len(self.sampler.indices(index)) == 0:
      moves.append(max(np.abs(np.asarray(after.params[n]) - before[n]).max() for n in before))
    return after

  # Of 1,437 units each is drawn with probability 0.0002: with this key, most steps are empty.
  config = small_config(
    data={"source": "digits", "declared": "public"}, privacy__sampling_rate=0.0002,
    privacy__delta=1e-6, privacy__adjacency="add_or_remove_one",
    privacy__expected_batch_size=50,
  )  # fmt: skip
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Loop, "step", observed)
    result = train(config, folder / "run", test_key_file=key_file(folder), progress=False)
  return moves, result


def _noise_was_added(moves):
  return all(0 < move < np.inf for move in moves)


def test_every_empty_step_adds_noise_and_counts(tmp_path):
  moves, result = _run(tmp_path, Loop.step)
  assert len(moves) >= 3
  assert _noise_was_added(moves)
  assert result.steps == STEPS
  logged = lines(tmp_path / "run" / "private" / "training.jsonl")
  assert [entry["step"] for entry in logged] == list(range(1, STEPS + 1))
  assert sum(entry["units"] == 0 for entry in logged) == len(moves)


def test_skipping_an_empty_batch_is_caught(tmp_path):
  original = Loop.step

  def skipping(self, state, index):  # the broken variant
    if len(self.sampler.indices(index)):
      return original(self, state, index)
    return state._replace(step=state.step + 1)

  moves, _ = _run(tmp_path, skipping)
  assert len(moves) >= 3 and not _noise_was_added(moves)


def test_a_plain_run_of_empty_batches_finishes_too(tmp_path):
  config = small_config(privacy__sampling_rate=0.001, privacy__enabled=False)
  assert train(config, tmp_path / "run", progress=False).steps == STEPS
