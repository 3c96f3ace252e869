"""The first step of a linear head of zeros over all data: its clipped sum by the closed form."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.dispatch import ClipAux
from dp_jax.privacy.sampling import FullBatch
from dp_jax.solvers.closed_form import ClosedFormSum, ZeroHead, zero_head
from dp_jax.training.setup.prepare import Run

# Of features that are read at a time, and once more while they are added up.
_BYTES = 2**28


def head_at_zero(run: Run) -> ZeroHead | None:
  """The head, if the closed form serves the first step of a run; None otherwise.

  It does under `engine="auto"` if all data is one batch and all arrays of a linear model are zero.
  """
  config = run.config
  if run.privacy is None or config.train.engine != "auto" or jax.process_count() > 1:
    return None
  if not isinstance(run.mechanism.sampling, FullBatch) or config.data.augment != "none":
    return None
  return zero_head(
    run.task, run.params, run.frozen, run.mechanism.clip_norm, config.privacy.clipping
  )


def sum_at_zero(
  run: Run, head: ZeroHead, indices: np.ndarray
) -> tuple[Compensated, list[tuple[ClipAux, np.ndarray]]]:
  """The un-noised clipped sum over units, and what was seen of them, (ClipAux, mask) a piece."""
  record = head.num_features * run.loader.max_records_per_unit
  size = max(1, min(len(indices), _BYTES // (4 * record)))
  total = ClosedFormSum(head, run.mechanism.adjacency)
  seen: list[tuple[ClipAux, np.ndarray]] = []
  pieces = [indices[start : start + size] for start in range(0, len(indices), size)]
  with ThreadPoolExecutor(1) as ahead:
    following = ahead.submit(run.loader.load, pieces[0], size)
    for index in range(len(pieces)):
      units, mask = following.result()
      if index + 1 < len(pieces):
        following = ahead.submit(run.loader.load, pieces[index + 1], size)
      aux = total.add(units["inputs"], units["label"], mask, units["record_mask"])
      seen.append((jax.device_put(aux), mask))
  return total.total(), seen
