"""What is done with a release: evaluating it, and predicting with it, on records like its own."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from dp_jax.config.run_config import Config
from dp_jax.data.units import UnitLoader
from dp_jax.errors import UserError
from dp_jax.files.atomic import write_bytes
from dp_jax.tasks.evaluate import evaluate, predictions
from dp_jax.training.release import Release, load_release, run_folder
from dp_jax.training.setup.first_records import check_first_records
from dp_jax.training.setup.open_data import is_strict, open_split
from dp_jax.training.setup.reading import as_trained, check_source


def evaluate_release(path: Path, config: Config, *, trust_code: bool = False) -> dict[str, Any]:
  """Evaluates a release on data.eval_split of a configuration.

  Args:
    path: the release.
    config: says where the records are.
    trust_code: run the code that the release names.

  Returns:
    The metrics, if the data is declared public. Of private data only the path of the file that
    they were written to: `private/evaluation.json` beside the release.
  """
  release = load_release(path, trust_code=trust_code)
  sums = evaluate(
    release.evaluator(), held_out_loader(release, config), release.task,
    config.eval.microbatch_size,
  )  # fmt: skip
  if config.data.declared == "public":
    return {"split": config.data.eval_split, **sums.scalars()}
  private = run_folder(path) / "private"
  private.mkdir(mode=0o700, exist_ok=True)
  out = private / "evaluation.json"
  write_bytes(out, (json.dumps(sums.details(), indent=2) + "\n").encode())
  return {"split": config.data.eval_split, "written_to": str(out)}


def predict_release(path: Path, config: Config, out: Path, *, trust_code: bool = False) -> None:
  """Writes predictions for data.eval_split as CSV: index, prediction, a probability a class.

  Of several labels, the prediction names those that are more likely than not, with ";" between. A
  table needs no label columns here. The file is readable by its owner alone: predictions on private
  records are as private as they.

  Args:
    path: the release.
    config: says where the records are.
    out: the file.
    trust_code: run the code that the release names.

  Raises:
    ValueError: if the file cannot be written.
  """
  release = load_release(path, trust_code=trust_code)
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(["index", *release.task.columns])
  loader = held_out_loader(release, config, labelled=False)
  for indices, probabilities, units, _ in predictions(
    release.predictor(), loader, config.eval.microbatch_size
  ):
    readable = units["record_mask"][:, 0]
    for index, row, good in zip(indices, probabilities, readable, strict=False):  # then padding
      # A malformed record has no prediction.
      cells = release.task.cells(row) if good else [""] * len(release.task.columns)
      writer.writerow([index, *cells])
  try:
    write_bytes(out, text.getvalue().encode())
  except OSError as error:
    raise UserError(f"cannot write {str(out)!r}: {error.strerror}.") from error


def held_out_loader(release: Release, config: Config, *, labelled: bool = True) -> UnitLoader:
  """Units of one record each, read as the model was trained.

  Args:
    release: the model.
    config: where the records are. What it leaves out of how they are read is taken from the model.
    labelled: False does without the labels of a table.

  Raises:
    ValueError: if it says something else of that than the model was trained with, or the records
      are not like those; with labels, also if none of the first of them can be used.
  """
  spec = release.spec
  config = as_trained(spec, config)
  data = config.data
  names = tuple(spec.task.get("class_names", ()))
  source = open_split(
    config, data.eval_split, shapes=spec.task, class_names=names or None, labelled=labelled,
  )  # fmt: skip
  check_source(spec, data, source.info)
  named = tuple(source.info.class_names)
  if named and names and named != names:
    raise UserError(f"the classes of {source.info.name} are not those of the model, in its order.")
  loader = UnitLoader(source, release.task.record, strict=is_strict(data))
  if labelled:  # predictions say of each record themselves that there is none
    split = f"data.eval_split={data.eval_split!r}"
    check_first_records(loader, split, private=data.declared != "public")
  return loader
