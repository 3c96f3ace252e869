"""model_card.md of a release, with the front matter that model hubs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dp_jax.statement import formatting, sentences

_MEASURED = ("accuracy", "split")


def model_card(
  record: Mapping[str, Any],
  *,
  model_name: str = "model",
  dataset_name: str | None = None,
  license_name: str = "other",
  task: str = "image-classification",
) -> str:
  """The model card as Markdown: a function of the record, so that it can be written anew.

  Args:
    record: the content of privacy.json.
    model_name: for the title.
    dataset_name: what it was trained on; None takes `treated_as_public.data` of the record.
    license_name: of the parameters, as a hub's identifier ("apache-2.0", "other").
    task: the hub's identifier of the task.

  Returns:
    Front matter in YAML and a body in Markdown; names are escaped for both.
  """
  public = record["declared"] == "public"
  evaluation = record["evaluation"] if public else None
  accuracy, split = (None, "") if evaluation is None else tuple(evaluation[k] for k in _MEASURED)
  data = formatting.one_line(dataset_name or record["treated_as_public"].get("data", "own data"))
  title = f"{formatting.one_line(model_name)} trained on {data}"
  fields = _fields(record, license_name, task, data)
  if accuracy is not None:
    fields["metrics"] = ["accuracy"]
    fields["model-index"] = [{"name": title, "results": [_result(task, data, split, accuracy)]}]
  # Every value is written as JSON, which YAML contains.
  front = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
  said = claims(record)
  parts = [
    "\n".join(["---", *front, "---"]),
    f"# {formatting.markdown(title)}",
    said["opening"],
    "## Privacy\n\n" + said["statement"],
    said["table of numbers"],
    "## Evaluation\n\n" + _evaluation(accuracy, split, public),
    "## Intended use and limits\n\n" + _limits(record),
    "## How to verify\n\n```\npython -m dp_jax verify .\n```\n\n"
    "run in this folder, recomputes the numbers above and checks every file against its hash.",
  ]
  return "\n\n".join(parts) + "\n"


def claims(record: Mapping[str, Any]) -> dict[str, str]:
  """The parts of the card that state the guarantee, by name: functions of the record alone."""
  return {
    "opening": _opening(record),
    "statement": formatting.markdown(sentences.statement(record), 4000),
    "table of numbers": _numbers(record),
  }


def _fields(
  record: Mapping[str, Any], license_name: str, task: str, dataset_name: str
) -> dict[str, Any]:
  method = "gaussian-mechanism" if sentences.is_solver(record) else "dp-sgd"
  tags = ["differential-privacy", method, "jax", record["sampling"], record["accountant"]]
  return {
    "library_name": "dp_jax",
    "license": license_name,
    "pipeline_tag": task,
    "tags": ["not-private", "jax"] if record["randomness"]["test_key"] else tags,
    "datasets": [dataset_name],
  }


def _result(task: str, dataset_name: str, split: str, accuracy: float) -> dict[str, Any]:
  return {
    "task": {"type": task},
    "dataset": {"name": dataset_name, "type": "other", "split": split},
    "metrics": [{"type": "accuracy", "value": accuracy}],
  }


def _opening(record: Mapping[str, Any]) -> str:
  if record["randomness"]["test_key"]:
    return f"**{sentences.NOT_PRIVATE.capitalize()}.**"
  return (
    f"Trained with differential privacy: epsilon {formatting.round_up(record['epsilon'])}, delta "
    f"{formatting.plain(record['delta'])}, for each {formatting.markdown(record['unit'])}."
  )


def _numbers(record: Mapping[str, Any]) -> str:
  found = record["attacker"]
  note = " (if the key were secret)" if record["randomness"]["test_key"] else ""
  rows = [
    ("epsilon" + note, formatting.round_up(record["epsilon"])),
    ("delta", formatting.plain(record["delta"])),
    ("unit", formatting.markdown(record["unit"])),
    ("records of a unit, at most", formatting.count(record["max_records_per_unit"])),
    ("adjacency", record["adjacency"].replace("_", "-")),
    *_scheme(record),
    ("accountant", f"{record['accountant']}, {record['accountant_version']}"),
    (
      "membership advantage, at most" + note,
      formatting.round_up(found["mechanism_advantage_bound"], 3),
    ),
  ]
  lines = [f"| {name} | {value} |" for name, value in rows]
  return "\n".join(["| | |", "| --- | --- |", *lines])


def _scheme(record: Mapping[str, Any]) -> list[tuple[str, str]]:
  noise = formatting.short(record["noise_multiplier"])
  if sentences.is_solver(record):
    return [
      ("releases over all units", str(sentences.own_releases(record))),
      ("noise multiplier of one release as private as all", noise),
    ]
  return [
    ("sampling", record["sampling"].replace("_", " ")),
    ("sampling rate", formatting.short(record["sampling_rate"])),
    ("steps", formatting.count(record["steps"])),
    ("noise multiplier", noise),
    ("clip norm", formatting.short(record["clip_norm"])),
  ]


def _evaluation(accuracy: float | None, split: str, public: bool) -> str:
  if not public:
    return (
      "Not shown: the data are private, and a measured accuracy that carries no noise is not "
      "covered by the guarantee."
    )
  if accuracy is None:
    return "Not evaluated."
  return f"Accuracy on the {formatting.markdown(split)} split: {formatting.percent(accuracy)}."


def _limits(record: Mapping[str, Any]) -> str:
  weights = record["pretrained_weights"]
  start = (
    f"Training started from public weights: {formatting.markdown(weights)}."
    if weights
    else "The head was solved for, from no weights."
    if sentences.is_solver(record)
    else "Training started from random weights."
  )
  items = "\n".join(f"- {formatting.markdown(item)}" for item in record["not_covered"])
  return (
    f"{start} Noise and clipping cost accuracy, and can cost rare groups more than others: check "
    f"the groups that matter before use. The guarantee does not cover:\n\n{items}"
  )
