"""The command line: `python -m dp_jax COMMAND`, or `dp-jax COMMAND`.

Exit codes: 0 done, 1 a release that does not verify, 2 bad input (one line on standard error).
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from absl import flags

_TRACEBACK = "DP_JAX_TRACEBACK"


class Command(NamedTuple):
  """A command: what it does, its arguments, its flags, and the function that runs it."""

  summary: str
  usage: str
  define: Callable[[flags.FlagValues], None]
  execute: Callable[[flags.FlagValues, list[str]], int]


def run() -> NoReturn:
  """Entry point of the console script."""
  sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns the exit code."""
  logging.basicConfig(format="%(message)s", stream=sys.stderr)
  logging.getLogger("dp_jax").setLevel(logging.INFO)
  if not argv or argv[0] in ("--help", "-h", "help"):
    print(_overview())
    return 0 if argv else 2
  name, *rest = argv
  if name not in COMMANDS:
    print(f"error: unknown command {name!r}; one of {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2
  try:
    return _run(name, rest)
  except ValueError as error:
    if os.environ.get(_TRACEBACK):
      traceback.print_exc()
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _run(name: str, argv: list[str]) -> int:
  command = COMMANDS[name]
  values = flags.FlagValues()
  flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=values)
  command.define(values)
  arguments = _parse(values, name, argv)
  if values["help"].value:
    print(f"dp-jax {name} {command.usage}\n\n{command.summary}\n{values.get_help()}")
    return 0
  return command.execute(values, arguments)


def _parse(values: flags.FlagValues, name: str, argv: list[str]) -> list[str]:
  """Positional arguments; an error in a flag becomes a ValueError of one line."""
  program, sys.argv = sys.argv, [name, *argv]  # ml_collections reads overrides from sys.argv
  try:
    return values([name, *argv])[1:]
  except KeyError as error:
    raise ValueError(f"the configuration has no key {error}.") from error
  except (flags.Error, AttributeError, TypeError, ImportError, OSError) as error:
    raise ValueError(f"{error} (see dp-jax {name} --help)") from error
  finally:
    sys.argv = program


def _overview() -> str:
  lines = [f"  {name:<10} {command.summary.splitlines()[0]}" for name, command in COMMANDS.items()]
  return "\n".join(
    ["usage: dp-jax COMMAND [flags]", "", *lines, "", "dp-jax COMMAND --help lists its flags."]
  )


def _one_argument(arguments: list[str], what: str) -> Path:
  if len(arguments) != 1:
    raise ValueError(f"give one {what}, got {len(arguments)}: {arguments}.")
  return Path(arguments[0])


def _define_config(values: flags.FlagValues) -> None:
  from ml_collections import config_flags

  config_flags.DEFINE_config_file(
    "config", None, "config file; --config.a.b=value overrides a key", flag_values=values
  )


def _config(values: flags.FlagValues) -> Any:
  from dp_jax.training.config import Config

  if values["config"].value is None:
    raise ValueError("give --config=FILE, for example --config=configs/digits.py.")
  try:
    content = values["config"].value.to_dict()
  except OSError as error:  # ml_collections keeps the failure to load until the first use
    raise ValueError(f"cannot load the config file: {str(error).splitlines()[-1]}") from error
  return Config.from_dict(content)


def _define_train(values: flags.FlagValues) -> None:
  _define_config(values)
  flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
  flags.DEFINE_string(
    "test_key_file", None, "secret key of 64 hex digits, mode 0600; the run is then not private",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool("json", False, "last line: one JSON object", flag_values=values)


def _train(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.training.run import train

  if arguments or not values["workdir"].value:
    raise ValueError(f"give --workdir=DIR and no arguments (got {arguments}).")
  key_file = values["test_key_file"].value
  config = _config(values)
  result = train(config, Path(values["workdir"].value), test_key_file=key_file and Path(key_file))
  print(result.summary())
  if values["json"].value:
    print(json.dumps(result.to_dict()))
  return 0


def _define_mechanism(values: flags.FlagValues) -> None:
  flags.DEFINE_float("delta", None, "delta", flag_values=values)
  flags.DEFINE_enum(
    "sampling", "poisson",
    ["poisson", "full_batch", "truncated_poisson", "fixed_size", "stream"],
    "how units are sampled", flag_values=values,
  )  # fmt: skip
  flags.DEFINE_float("sampling_rate", None, "of poisson and truncated_poisson", flag_values=values)
  flags.DEFINE_integer("steps", None, "number of steps", flag_values=values)
  flags.DEFINE_integer("cap", None, "most units of a batch, truncated_poisson", flag_values=values)
  flags.DEFINE_integer("num_units", None, "N, where the scheme needs it", flag_values=values)
  flags.DEFINE_integer("expected_batch_size", None, "of fixed_size and stream", flag_values=values)
  flags.DEFINE_enum(
    "accountant", "auto", ["auto", "pld", "rdp", "analytic_gaussian"], "", flag_values=values
  )
  flags.DEFINE_enum(
    "adjacency", "zero_out", ["zero_out", "add_or_remove_one", "replace_one"],
    "which data sets are neighbours", flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _define_calibrate(values: flags.FlagValues) -> None:
  flags.DEFINE_float("epsilon", None, "target epsilon", flag_values=values)
  _define_mechanism(values)


def _define_epsilon(values: flags.FlagValues) -> None:
  flags.DEFINE_float("noise_multiplier", None, "stddev / clip_norm", flag_values=values)
  _define_mechanism(values)


def _calibrate(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.privacy.calibration import calibrate
  from dp_jax.privacy.spec import PrivacySpec

  given = _given(values, arguments, "epsilon")
  spec = PrivacySpec(
    given["epsilon"], given["delta"], adjacency=given["adjacency"], accountant=given["accountant"]
  )
  mechanism = calibrate(spec, _sampling(values), given["steps"])
  return _print_mechanism(values, mechanism, given["delta"])


def _epsilon(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.privacy.mechanism import Mechanism

  given = _given(values, arguments, "noise_multiplier")
  mechanism = Mechanism(
    _sampling(values), given["noise_multiplier"], given["steps"],
    adjacency=given["adjacency"], accountant=given["accountant"],
  )  # fmt: skip
  return _print_mechanism(values, mechanism, given["delta"])


def _given(values: flags.FlagValues, arguments: list[str], *needed: str) -> dict[str, Any]:
  if arguments:
    raise ValueError(f"unexpected arguments {arguments}.")
  given = {name: values[name].value for name in dir(values)}
  missing = [f"--{name}" for name in (*needed, "delta", "steps") if given[name] is None]
  if missing:
    raise ValueError(f"give {', '.join(missing)}.")
  return given


# The flags of each scheme, and the field that each one sets.
_SCHEME_FLAGS = {
  "poisson": {"sampling_rate": "rate"},
  "full_batch": {},
  "truncated_poisson": {"sampling_rate": "rate", "cap": "cap", "num_units": "num_units"},
  "fixed_size": {"expected_batch_size": "expected_batch_size", "num_units": "num_units"},
  "stream": {"expected_batch_size": "expected_batch_size", "num_units": "num_units"},
}


def _sampling(values: flags.FlagValues) -> Any:
  from dp_jax.privacy.sampling import sampling_from_dict

  name = str(values["sampling"].value)
  wanted = _SCHEME_FLAGS[name]
  everything = sorted({flag for scheme in _SCHEME_FLAGS.values() for flag in scheme})
  given = {flag: values[flag].value for flag in everything if values[flag].value is not None}
  missing = [f"--{flag}" for flag in wanted if flag not in given]
  if missing:
    raise ValueError(f"--sampling={name} needs {' and '.join(missing)}.")
  extra = [f"--{flag}" for flag in given if flag not in wanted]
  if extra:
    raise ValueError(f"--sampling={name} does not use {' and '.join(extra)}; leave it out.")
  return sampling_from_dict({"name": name, **{wanted[flag]: given[flag] for flag in wanted}})


def _print_mechanism(values: flags.FlagValues, mechanism: Any, delta: float) -> int:
  accounted = mechanism.account(delta)
  result = {
    "noise_multiplier": mechanism.noise_multiplier,
    "epsilon": accounted.epsilon,
    "delta": delta,
    "sampling": mechanism.sampling.name,
    "sampling_rate": mechanism.sampling.sampling_rate,
    "steps": mechanism.steps,
    "accountant": accounted.accountant,
    "adjacency": mechanism.adjacency,
  }
  if values["json"].value:
    print(json.dumps(result))
  else:
    width = max(map(len, result))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in result.items()))
    print(f"{'reason':<{width}}  {accounted.reason}")
  return 0


def _no_flags(values: flags.FlagValues) -> None:
  del values


def _verify(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.report.verify import verify_release

  del values
  outcome = verify_release(_one_argument(arguments, "release folder"))
  print(outcome)
  return 1 if outcome.problems else 0


def _define_report(values: flags.FlagValues) -> None:
  flags.DEFINE_multi_string(
    "compare", [], "LABEL=DIR of another run on the same public data", flag_values=values
  )


def _report(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.report.html import render_report

  compare = {}
  for item in values["compare"].value or []:
    label, separator, folder = item.partition("=")
    if not separator or not label or not folder:
      raise ValueError(f"--compare={item!r} is not LABEL=DIR.")
    compare[label] = Path(folder)
  print(render_report(_one_argument(arguments, "work directory"), compare))
  return 0


def _define_evaluate(values: flags.FlagValues) -> None:
  _define_config(values)
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _evaluate(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.training.release import evaluate_release

  metrics = evaluate_release(_one_argument(arguments, "release folder"), _config(values))
  if values["json"].value:
    print(json.dumps(metrics))
  else:
    print("\n".join(f"{name}: {value}" for name, value in metrics.items()))
  return 0


def _define_predict(values: flags.FlagValues) -> None:
  _define_config(values)
  flags.DEFINE_string("out", None, "CSV file to write", flag_values=values)


def _predict(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.training.release import predict_release

  if not values["out"].value:
    raise ValueError("give --out=FILE.csv.")
  out = Path(values["out"].value)
  predict_release(_one_argument(arguments, "release folder"), _config(values), out)
  print(out)
  return 0


COMMANDS = {
  "train": Command(
    "Train or fine-tune with differential privacy; goes on where a killed run stopped.",
    "--config=FILE --workdir=DIR [--config.a.b=value ...]", _define_train, _train,
  ),
  "calibrate": Command(
    "Find the noise multiplier that meets a target epsilon.",
    "--epsilon=E --delta=D --sampling_rate=Q --steps=T", _define_calibrate, _calibrate,
  ),
  "epsilon": Command(
    "Compute the epsilon of a noise multiplier.",
    "--noise_multiplier=Z --delta=D --sampling_rate=Q --steps=T", _define_epsilon, _epsilon,
  ),
  "verify": Command(
    "Re-derive every number of a release's privacy statement.", "DIR/release", _no_flags, _verify,
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
