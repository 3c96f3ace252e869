"""Commands on runs and releases: train, evaluate, predict, report, verify."""

import json
from pathlib import Path
from typing import Any

from absl import flags

from dp_jax.commands.base import (
  Command,
  config_of,
  define_config,
  define_hosts,
  define_ledger,
  join_hosts,
  ledger_budget,
  one_argument,
)
from dp_jax.errors import UserError


def _define_train(values: flags.FlagValues) -> None:
  define_config(values)
  flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
  flags.DEFINE_string(
    "test_key_file", None, "secret key of 64 hex digits, mode 0600; the run is then not private",
    flag_values=values,
  )  # fmt: skip
  define_ledger(values)
  flags.DEFINE_bool("json", False, "last line: one JSON object", flag_values=values)
  define_hosts(values)


def _train(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.parallel.hosts import is_process_0, on_all_hosts
  from dp_jax.training.run import train

  if arguments or not values["workdir"].value:
    raise UserError(f"give --workdir=DIR and no arguments (got {arguments}).")
  join_hosts(values)
  config = on_all_hosts(lambda: config_of(values))
  result = train(
    config,
    Path(values["workdir"].value),
    test_key_file=_path(values, "test_key_file"),
    ledger_file=_path(values, "ledger"),
    ledger_budget=ledger_budget(values, config),
  )
  if is_process_0():
    print(result.summary())
    if values["json"].value:
      print(json.dumps(result.to_dict()))
  return 0


def _path(values: flags.FlagValues, name: str) -> Path | None:
  value = values[name].value
  return None if value is None else Path(str(value))


def _define_verify(values: flags.FlagValues) -> None:
  flags.DEFINE_bool(
    "allow_test_key", False, "exit with 0 for a release of a fixed test key, which is not private",
    flag_values=values,
  )  # fmt: skip


def _verify(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.statement.verify import verify_release

  outcome = verify_release(one_argument(arguments, "release folder"))
  print(outcome)
  asked = bool(values["allow_test_key"].value)
  return 1 if outcome.problems or (outcome.test_key and not asked) else 0


def _define_report(values: flags.FlagValues) -> None:
  flags.DEFINE_multi_string(
    "compare", [], "LABEL=DIR of another run on the same data", flag_values=values
  )
  flags.DEFINE_bool(
    "include_private", False, "show training diagnostics, which no guarantee covers",
    flag_values=values,
  )  # fmt: skip


def _report(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.report.html import private_path, render_report

  compare = {}
  for item in values["compare"].value or []:
    label, separator, folder = item.partition("=")
    if not separator or not label or not folder:
      raise UserError(f"--compare={item!r} is not LABEL=DIR.")
    compare[label] = Path(folder)
  workdir, asked = one_argument(arguments, "work directory"), bool(values["include_private"].value)
  print(render_report(workdir, compare, include_private=asked))
  if private_path(workdir).exists():
    print(private_path(workdir))
  return 0


def _define_evaluate(values: flags.FlagValues) -> None:
  define_config(values)
  flags.DEFINE_bool(
    "release_metrics", False, "release the accuracy on private data, with noise", flag_values=values
  )
  flags.DEFINE_float("release_epsilon", None, "of --release_metrics", flag_values=values)
  flags.DEFINE_float("release_delta", None, "of --release_metrics", flag_values=values)
  flags.DEFINE_string(
    "ledger", None, "file that keeps what was released of the held-out data", flag_values=values
  )
  _define_trust(values)
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _define_trust(values: flags.FlagValues) -> None:
  flags.DEFINE_bool(
    "trust_code", False, "run the model and task of your own that the release names",
    flag_values=values,
  )  # fmt: skip


def _evaluate(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.runs.using import evaluate_release

  path, config = one_argument(arguments, "release folder"), config_of(values)
  trust_code = bool(values["trust_code"].value)
  given: list[Any] = [values[name].value for name in ("release_epsilon", "release_delta", "ledger")]
  if values["release_metrics"].value:
    from dp_jax.runs.release_metrics import release_accuracy

    if None in given:
      raise UserError(
        "--release_metrics needs --release_epsilon, --release_delta and --ledger=FILE."
      )
    metrics = release_accuracy(
      path, config, given[0], given[1], Path(given[2]), trust_code=trust_code
    )
  elif any(value is not None for value in given):
    raise UserError("--release_epsilon, --release_delta and --ledger go with --release_metrics.")
  else:
    metrics = evaluate_release(path, config, trust_code=trust_code)
  if values["json"].value:
    print(json.dumps(metrics))
  else:
    print("\n".join(f"{name}: {value}" for name, value in metrics.items()))
  return 0


def _define_predict(values: flags.FlagValues) -> None:
  define_config(values)
  _define_trust(values)
  flags.DEFINE_string("out", None, "CSV file to write", flag_values=values)


def _predict(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.runs.using import predict_release

  if not values["out"].value:
    raise UserError("give --out=FILE.csv.")
  out = Path(values["out"].value)
  path, config = one_argument(arguments, "release folder"), config_of(values)
  predict_release(path, config, out, trust_code=bool(values["trust_code"].value))
  print(out)
  return 0


COMMANDS = {
  "train": Command(
    "Train or fine-tune with differential privacy; goes on where a killed run stopped.",
    "--config=FILE --workdir=DIR [--config.a.b=value ...]", _define_train, _train,
  ),
  "verify": Command(
    "Re-derive every number of a release's privacy statement.",
    "DIR/release [--allow_test_key]", _define_verify, _verify, False,
  ),
  "evaluate": Command(
    "Evaluate a release on data.eval_split.", "RELEASE --config=FILE", _define_evaluate, _evaluate,
  ),
  "predict": Command(
    "Write a release's predictions for data.eval_split.", "RELEASE --config=FILE --out=FILE.csv",
    _define_predict, _predict,
  ),
  "report": Command(
    "Rebuild report.html of a run.", "DIR [--compare=LABEL=DIR ...]", _define_report, _report,
  ),
}  # fmt: skip
