"""Accuracy on private held-out data as a release of its own: noised, with its own small epsilon.

The people of the evaluation split are other people than those who were trained on, or should be; so
this release is entered in a ledger that the caller names. That of the held-out data gives the
guarantee of those who are in them alone; whoever may be in both is protected by the sum.
"""

import math
import secrets
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dp_jax.evaluation.classification import evaluate
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.keys import step_key
from dp_jax.gradients.noise import add_noise
from dp_jax.privacy.calibration import calibrate
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.report import formatting
from dp_jax.training.config import Config
from dp_jax.training.held_out import people_of
from dp_jax.training.release import load_release, run_folder
from dp_jax.training.using import held_out_loader
from dp_jax.training.workdir import append_line

# As in clipping: room for the rounding of the sum.
_MARGIN = 1 - 2**-10


def release_accuracy(
  path: Path, config: Config, epsilon: float, delta: float, ledger_file: Path
) -> dict[str, Any]:
  """Releases the accuracy of a model on data.eval_split, averaged over units.

  A unit counts by the share of its records that are classified rightly, so blanking it moves the
  sum by at most 1. Each call draws fresh noise and pays for itself.

  Args:
    path: the release.
    config: says where the held-out data are and what their units are.
    epsilon: of this release.
    delta: of this release.
    ledger_file: the ledger of the held-out data; made if it is not there.

  Returns:
    What was released, as JSON values; appended to `released_metrics.jsonl` beside the release.

  Raises:
    ValueError: under add-or-remove-one, where the number of units is secret; or if the ledger's
      budget would be overdrawn. Nothing has been released then.
  """
  adjacency, unit = config.privacy.adjacency, config.privacy.unit
  if adjacency == "add_or_remove_one":
    raise ValueError(
      "an accuracy divides by the number of units, which privacy.adjacency='add_or_remove_one'"
      " keeps secret: evaluate under zero_out."
    )
  table, num_units = _evaluate(path, config)
  spec = PrivacySpec(epsilon, delta, unit, adjacency)
  mechanism = calibrate(spec, FullBatch(), steps=1)
  ledger = Ledger(ledger_file)
  # A name of its own for each call: fresh noise is another release.
  ledger.reserve(mechanism, "evaluation", run=secrets.token_hex(16))
  accuracy = noised_share(shares(table), num_units, mechanism, MasterKey.from_os())
  accounted = mechanism.epsilon(delta)
  result = {
    "split": config.data.eval_split,
    "accuracy": accuracy,
    "stddev": mechanism.stddev / (_MARGIN * num_units),
    "epsilon": accounted,
    "delta": delta,
    "unit": unit,
    "adjacency": adjacency,
    "num_units": num_units,
    "ledger": {"releases": len(ledger.releases), "epsilon": ledger.epsilon(delta)},
  }
  result["statement"] = _statement(result)
  append_line(run_folder(path) / "released_metrics.jsonl", result)
  return result


def _evaluate(path: Path, config: Config) -> tuple[PredictionTable, int]:
  """Predictions on the split by unit, and how many units it has."""
  release = load_release(path)
  loader = held_out_loader(release, config)
  held_out = evaluate(
    release.predictor(), loader, release.spec.num_classes, config.eval.microbatch_size
  )
  _, people = people_of(config, loader.source)
  return held_out.table.of_people(people, {}, {}), len(np.unique(people))


def shares(table: PredictionTable) -> np.ndarray:
  """float64[units with a record]: the share of each one's records that are right, in [0, 1]."""
  _, units = np.unique(table.unit, return_inverse=True)
  known = (table.label >= 0).reshape(len(units), -1)
  right = (table.predicted == table.label).reshape(len(units), -1) & known
  of_records = right.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
  return np.bincount(units, of_records) / np.maximum(np.bincount(units), 1)


def noised_share(values: np.ndarray, num_units: int, mechanism: Mechanism, key: MasterKey) -> float:
  """The mean of values in [0, 1] over `num_units`, with noise; cut to [0, 1] after it.

  Args:
    values: float[n], one a unit; units without a value count as zero.
    num_units: the public number of units.
    mechanism: one step on the full batch, clip norm 1.
    key: used once.
  """
  total = _MARGIN * math.fsum(np.clip(values, 0.0, 1.0))
  high = np.float32(total)
  pair = Compensated(jnp.asarray(high), jnp.asarray(np.float32(total - float(high))))
  noised = float(add_noise(pair, mechanism.stddev, step_key(key, "evaluation", 0)))
  return min(1.0, max(0.0, noised / (_MARGIN * num_units)))


def _statement(result: dict[str, Any]) -> str:
  unit = formatting.one_line(result["unit"], 60)
  ledger = result["ledger"]
  return (
    f"The accuracy on the {result['split']} split was released with"
    f" ({formatting.round_up(result['epsilon'])}, {formatting.plain(result['delta'])})-differential"
    f" privacy for each {unit} of that split ({result['adjacency'].replace('_', '-')}; the number"
    f" of units, {formatting.count(result['num_units'])}, is public). It is a release beside that"
    f" of the model: one {unit} that is in the training data too is covered by the sum of both. The"
    f" ledger that was given holds {ledger['releases']} releases, epsilon"
    f" {formatting.round_up(ledger['epsilon'])} in all at this delta."
  )
