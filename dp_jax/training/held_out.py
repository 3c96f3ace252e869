"""What a run keeps of its evaluation: predictions by person and group, for comparisons."""

from typing import Any

import numpy as np

from dp_jax.config.run_config import Config
from dp_jax.data.sources.source import Source
from dp_jax.data.unit_index import UnitIndex
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.files.atomic import write_bytes
from dp_jax.models.pretrained import weights
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.open_data import read_groups
from dp_jax.training.setup.prepare import Run
from dp_jax.training.step import TrainState


def write_predictions(run: Run, folder: WorkDir, step: int, table: PredictionTable) -> None:
  """Writes predictions of the released model, that of a step: beside the report of public data."""
  path = folder.predictions(run.config.data.declared)
  write_bytes(path, _of_people(run, table, step).to_bytes())


def keep_step(
  run: Run, folder: WorkDir, step: int, state: TrainState, table: PredictionTable
) -> None:
  """Keeps the model of a step and its predictions, for a comparison at equal accuracy.

  Only of a run without privacy: the guarantee of a private one is for its last step.
  """
  arrays = {**state.average, **run.frozen}
  declared = run.config.data.declared
  content = weights.to_bytes(arrays, run.task.spec, declared=declared, ancestry=run.ancestry)
  folder.unprotected.mkdir(mode=0o700, exist_ok=True)
  write_bytes(folder.unprotected / f"step_{step}.safetensors", content)
  write_bytes(folder.kept_predictions(step), _of_people(run, table, step).to_bytes())


def _of_people(run: Run, table: PredictionTable, step: int) -> PredictionTable:
  data, source = run.config.data, run.eval_loader.source
  unit, people = people_of(run.config, source)
  about: dict[str, Any] = {
    "split": data.eval_split,
    "data_digest": source.fingerprint(),
    "unit": unit,
    "class_names": list(run.task.spec.task.get("class_names", ())),
    "step": step,
  }
  return table.of_people(people, read_groups(data, source), about)


def people_of(config: Config, source: Source) -> tuple[str, np.ndarray]:
  """What stands behind records, and int64[num_records] which; one without an id is its own.

  For files that stay in `private/`, or of public data: whatever the ids are, this raises nothing,
  since a run that is done must not be lost for them. No release may be made of it, as a person of
  several records may count as several here.
  """
  unit, own = config.privacy.unit, np.arange(len(source))
  if unit == "record":
    return unit, own
  try:
    missing = config.data.missing_values
    index = UnitIndex.from_ids(source.column(unit), 1, missing_values=missing)
    units = index.unit_of_records
    return unit, np.where(units < 0, len(own) + own, units)
  except Exception:  # they need not say whose they are, and ids have no common type
    return "record", own
