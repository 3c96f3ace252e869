"""The command that trains at several epsilons and seeds: sweep."""

import json
from pathlib import Path

from absl import flags

from dp_jax.commands.base import (
  Command,
  config_of,
  define_config,
  define_ledger,
  ledger_budget,
)
from dp_jax.errors import UserError


def _define(values: flags.FlagValues) -> None:
  define_config(values)
  flags.DEFINE_string("workdir", None, "folder of the sweep", flag_values=values)
  flags.DEFINE_list("epsilons", None, "targets, for example 0.5,1,2,4,8", flag_values=values)
  flags.DEFINE_integer("seeds", 3, "runs of each target", flag_values=values)
  flags.DEFINE_list(
    "groups", [], "columns of data.groups, or class; all of data.groups if left out",
    flag_values=values,
  )  # fmt: skip
  define_ledger(values)
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _sweep(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.report.sweep_page import sweep_markdown
  from dp_jax.runs.sweep import sweep

  if arguments or not values["workdir"].value:
    raise UserError(f"give --workdir=DIR and no arguments (got {arguments}).")
  seeds, groups = values["seeds"].value, values["groups"].value or []
  config = config_of(values)
  outcome = sweep(
    config,
    Path(values["workdir"].value),
    _epsilons(values["epsilons"].value),
    1 if seeds is None else int(seeds),
    [name for name in groups if name],
    ledger_file=Path(values["ledger"].value) if values["ledger"].value else None,
    ledger_budget=ledger_budget(values, config),
  )
  shown = {"written_to": str(outcome.path)}
  if values["json"].value:
    print(json.dumps(shown if outcome.private else {**outcome.table.to_dict(), **shown}))
    return 0
  if not outcome.private:
    print(sweep_markdown(outcome.table))
  print(outcome.path)
  return 0


def _epsilons(texts: list[str] | None) -> list[float]:
  try:
    return [float(text) for text in texts or []]
  except ValueError as error:
    raise UserError(f"--epsilons={','.join(texts or [])} must be numbers.") from error


COMMANDS = {
  "sweep": Command(
    "Train at several epsilons and seeds, and without privacy; accuracy and gaps against epsilon.",
    "--config=FILE --epsilons=0.5,1,2,4,8 --seeds=3 --workdir=DIR", _define, _sweep,
  ),
}  # fmt: skip
