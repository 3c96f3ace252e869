"""Accuracy on private held-out data as a release of its own: noised, with its own small epsilon.

Formal guarantee: for each unit of the split, (epsilon, delta)-DP under the adjacency. Let s_u in
[0, 1] be the share of the records of unit u that are classified rightly. What is noised is the sum
over units of s_u - 1/2, where a unit without a readable record adds 0.

* s_u depends on the records of u alone: predictions are made record by record, by a model that does
  not depend on the split. A record without a unit is not used.
* So each unit adds a number in [-1/2, 1/2], and 0 if it is blanked: zero_out moves the sum by at
  most 1/2 = C, and replace_one by at most 1 = 2C, which are the numbers that a mechanism of clip
  norm C = 1/2 is accounted with. Uncentred shares would need C = 1 under both: twice the noise.
* The sum is computed in float64, rounded once, of shares that are scaled by 1 - 2^-10: that leaves
  2^-11 for the rounding, which is below N * 2^-48.
* N is public under both, and dividing by it, adding 1/2 and cutting to [0, 1] come after the noise.

The people of the evaluation split are other people than those who were trained on, or should be; so
this release is entered in a ledger that the caller names. That of the held-out data gives the
guarantee of those who are in them alone; whoever may be in both is protected by the sum.
"""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dp_jax.config.run_config import Config
from dp_jax.data.sources.source import Source
from dp_jax.data.unit_index import UnitIndex
from dp_jax.errors import UserError
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import GUARANTEE, Ancestor, Lineage, warnings_about
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.runs.using import held_out_loader
from dp_jax.statement import formatting
from dp_jax.tasks.evaluate import evaluate
from dp_jax.training.checkpoints.workdir import append_line
from dp_jax.training.release import PARAMS, Release, load_release, release_folder, run_folder
from dp_jax.training.setup.open_data import refuse_cut

# As in clipping: room for the rounding of the sum.
_MARGIN = 1 - 2**-10
# What one unit adds is within this of 0.
CLIP_NORM = 0.5


def release_accuracy(
  path: Path, config: Config, epsilon: float, delta: float, ledger_file: Path, *,
  trust_code: bool = False,
) -> dict[str, Any]:  # fmt: skip
  """Releases the accuracy of a model on data.eval_split, averaged over units.

  A unit counts by the share of its records that are classified rightly, all of them, whatever
  max_records_per_unit is; one without a readable record counts as half. Each call draws fresh noise
  and pays for itself.

  Args:
    path: the release.
    config: says where the held-out data are and what their units are.
    epsilon: of this release.
    delta: of this release, below one over the number of units.
    ledger_file: the ledger of the held-out data; made if it is not there.
    trust_code: run the code that the release names.

  Returns:
    What was released, as JSON values; appended to `released_metrics.jsonl` beside the release.

  Raises:
    ValueError: under add-or-remove-one, where the number of units is secret; if the held-out data
      do not say whose the records are, or privacy.unit is "record" and the release protects larger
      units; if delta is too large; or if the ledger's budget would be overdrawn. Nothing has been
      released then.
  """
  adjacency, unit = config.privacy.adjacency, config.privacy.unit
  if adjacency == "add_or_remove_one":
    raise UserError(
      "an accuracy divides by the number of units, which privacy.adjacency='add_or_remove_one'"
      " keeps secret: evaluate under zero_out."
    )
  release = load_release(path, trust_code=trust_code)
  own, *behind = _described(path, release)
  _check_unit(own, unit)
  mechanism = calibrate(PrivacySpec(epsilon, delta, unit, adjacency), FullBatch(), 1, CLIP_NORM)
  values, num_units = held_out_shares(release, config, delta)
  ledger = Ledger(ledger_file)
  # A name of its own for each call: fresh noise is another release.
  ledger.reserve(mechanism, "evaluation", unit=unit, run=secrets.token_hex(16))
  accuracy = noised_share(values, num_units, mechanism, MasterKey.from_os())
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
  result["statement"] = _statement(result, own, behind)
  append_line(run_folder(path) / "released_metrics.jsonl", result)
  return result


def held_out_shares(release: Release, config: Config, delta: float) -> tuple[np.ndarray, int]:
  """The share of each unit of the split that has a readable record, and how many units it has.

  Not noised: for `noised_share` alone.

  Raises:
    ValueError: if the split does not say whose the records are, other records decide which are in
      it, or delta is one over the number of units or more.
  """
  loader = held_out_loader(release, config)
  refuse_cut(config, loader.source)
  split, index = config.data.eval_split, _units(loader.source, config)
  num_units = len(index.members)
  if delta >= 1 / num_units:
    raise UserError(
      f"delta {delta:g} is not below one over the number of units of {split!r},"
      f" {num_units}: what is released could be a whole unit. Give a smaller delta."
    )
  if "accuracy" not in release.task.metrics:
    raise UserError("an accuracy is of tasks of classes or labels; the release's has none.")
  held_out = evaluate(release.evaluator(), loader, release.task, config.eval.microbatch_size)
  return shares(held_out.table.of_people(index.unit_of_records, {}, {})), num_units


def _described(path: Path, release: Release) -> Lineage:
  """What guarantee the model has, and the weights behind it: by its file.

  The file of an earlier version does not say its guarantee, which is then that of privacy.json.
  """
  own, *behind = weights.lineage(release_folder(path) / PARAMS)
  privacy = release.privacy
  if own.protected and own.unit is None and privacy is not None:
    test_key = bool(privacy.get("randomness", {}).get("test_key"))
    known: dict[str, Any] = {name: privacy.get(name) for name in GUARANTEE}
    own = dataclasses.replace(own, test_key=test_key, **known)
  return (own, *behind)


def _check_unit(model: Ancestor, unit: str) -> None:
  """Refuses records as units where the model protects larger ones: a person has many of them."""
  if unit == "record" and model.unit not in (None, "record"):
    raise UserError(
      f"privacy.unit='record', but the model protects each {model.unit!r}: name the column of the"
      " held-out data that says whose a record is."
    )


def _units(source: Source, config: Config) -> UnitIndex:
  """Whose the records are, by the rule of training; unlike in `private/`, nothing is made up.

  Messages hold neither ids nor the names of other columns.
  """
  unit, split = config.privacy.unit, config.data.eval_split
  if unit == "record":
    return UnitIndex.of_records(len(source), 1)
  try:
    ids = source.column(unit)
  except ValueError:
    raise UserError(
      f"privacy.unit={unit!r}, but the held-out data, the split {split!r}, have no such column: an"
      " accuracy that is released needs to know whose each record is."
    ) from None
  try:
    return UnitIndex.from_ids(ids, 1, missing_values=config.data.missing_values)
  except ValueError:
    raise UserError(
      f"the column {unit!r} of the held-out data, the split {split!r}, does not say whose the"
      " records are: it has to hold one number or one string for a record, and not for none."
    ) from None


def shares(table: PredictionTable) -> np.ndarray:
  """float64[units with a record]: the share of each one's records that are right, in [0, 1].

  A record is left out if its unit is negative, so that it has none, or none of its labels is known.
  """
  known = (table.label >= 0).reshape(len(table.unit), -1)
  right = (table.predicted == table.label).reshape(len(table.unit), -1) & known
  own = (table.unit >= 0) & known.any(axis=1)
  of_records = (right.sum(axis=1) / np.maximum(known.sum(axis=1), 1))[own]
  _, units = np.unique(table.unit[own], return_inverse=True)
  return np.bincount(units, of_records) / np.maximum(np.bincount(units), 1)


def centred_sum(values: np.ndarray) -> float:
  """The sum that is noised: of values in [0, 1], one a unit, each less 1/2.

  A unit without a value adds nothing. So blanking a unit moves it by at most CLIP_NORM, exchanging
  one for another by at most twice that (see the module).
  """
  return math.fsum(_MARGIN * (np.clip(values, 0.0, 1.0) - 0.5))


def noised_share(values: np.ndarray, num_units: int, mechanism: Mechanism, key: MasterKey) -> float:
  """The mean of values in [0, 1] over `num_units`, with noise; cut to [0, 1] after it.

  Args:
    values: float[n], one a unit; units without a value count as 1/2.
    num_units: the public number of units.
    mechanism: one step on the full batch, clip norm CLIP_NORM.
    key: used once.

  Raises:
    ValueError: if the mechanism is another.
  """
  if mechanism.clip_norm != CLIP_NORM or mechanism.steps != 1:
    raise UserError(f"one step of clip norm {CLIP_NORM} releases this, not {mechanism}")
  total = centred_sum(values)
  high = np.float32(total)
  pair = Compensated(jnp.asarray(high), jnp.asarray(np.float32(total - float(high))))
  noised = float(add_noise(pair, mechanism.stddev, step_key(key, "evaluation", 0)))
  return min(1.0, max(0.0, 0.5 + noised / (_MARGIN * num_units)))


def _statement(result: dict[str, Any], model: Ancestor, behind: Sequence[Ancestor]) -> str:
  unit = formatting.one_line(result["unit"], 60)
  ledger = result["ledger"]
  return (
    f"The accuracy on the {result['split']} split was released with"
    f" ({formatting.round_up(result['epsilon'])}, {formatting.plain(result['delta'])})-differential"
    f" privacy for each {unit} of that split ({result['adjacency'].replace('_', '-')}; the number"
    f" of units, {formatting.count(result['num_units'])}, is public). "
    f"{_of_the_model(model, unit, result['adjacency'])}"
    f" The ledger that was given holds {ledger['releases']} releases, epsilon"
    f" {formatting.round_up(ledger['epsilon'])} in all at this delta."
    f"{''.join(f' Warning: {text}.' for text in _of_ancestors(behind))}"
  )


def _of_ancestors(behind: Sequence[Ancestor]) -> list[str]:
  """What the weights behind the model mean for the accuracy, which tells of their data too."""
  exposed = [
    f"weights behind the model ({each.name!r}) hold records declared private that nothing protects,"
    " and its accuracy tells of them too"
    for each in behind if each.is_exposed
  ]  # fmt: skip
  said = [text for each in behind for text in warnings_about(each, 1)]
  return list(dict.fromkeys([*exposed, *said]))


def _of_the_model(model: Ancestor, unit: str, adjacency: str) -> str:
  """What the accuracy means for those whom the model was trained on."""
  if not model.is_release:
    how = "with the noise of a test key" if model.test_key else "without differential privacy"
    return (
      f"The model was trained {how}, and its accuracy tells of its training data: this protects"
      f" nobody who is in them, a {unit} of that split among them."
    )
  if (model.unit, model.adjacency) == (unit, adjacency):
    return (
      f"It is a release beside that of the model: one {unit} that is in the training data too is"
      " covered by the sum of both."
    )
  own = "does not say for whom its guarantee is"
  if model.unit is not None:
    own = f"has a guarantee for each {model.unit} ({str(model.adjacency).replace('_', '-')})"
  return (
    f"It is a release beside that of the model, which {own}: the two are of different kinds and do"
    f" not add up for one {unit} that is in the training data too."
  )
