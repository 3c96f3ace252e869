"""The command that compares two runs: compare."""

import json
from pathlib import Path

from absl import flags

from dp_jax.commands.base import Command
from dp_jax.errors import UserError


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_list(
    "groups", None, "columns of data.groups, or class; each and in combination", flag_values=values
  )
  flags.DEFINE_list(
    "metrics", [],
    "of accuracy, auroc, true_positive_rate, false_positive_rate, loss; by default those that fit",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _compare(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.runs.compare import compare_runs

  if len(arguments) != 2:
    raise UserError(f"give RUN_PRIVATE and RUN_PLAIN, got {len(arguments)}: {arguments}.")
  groups = [name for name in values["groups"].value or [] if name]
  if not groups:
    raise UserError("give --groups=COLUMN[,COLUMN ...], for example --groups=sex,age.")
  first, second = map(Path, arguments)
  outcome = compare_runs(first, second, groups, values["metrics"].value or ())
  shown = {"written_to": str(outcome.path)}
  if values["json"].value:
    print(json.dumps(shown if outcome.private else {**outcome.content, **shown}))
    return 0
  if not outcome.private:
    print("\n".join(outcome.sentences))
  print(outcome.path)
  return 0


COMMANDS = {
  "compare": Command(
    "Compare two runs group by group: which gaps widened, which narrowed.",
    "RUN_PRIVATE RUN_PLAIN --groups=COLUMN[,COLUMN ...]", _define, _compare,
  ),
}  # fmt: skip
