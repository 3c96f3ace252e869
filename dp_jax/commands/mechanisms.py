"""Commands on mechanisms: calibrate, epsilon, plan."""

import json
import logging
from pathlib import Path
from typing import Any

from absl import flags

from dp_jax.commands.base import Command
from dp_jax.errors import UserError

_log = logging.getLogger(__name__)


def _define_mechanism(values: flags.FlagValues) -> None:
  from dp_jax.privacy.sampling.schemes import names

  flags.DEFINE_float("delta", None, "delta", flag_values=values)
  flags.DEFINE_enum(
    "sampling", "poisson", list(names()), "how units are sampled", flag_values=values,
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
  from dp_jax.privacy.calibration.calibrate import calibrate
  from dp_jax.privacy.spec import PrivacySpec

  given = _needed(values, arguments, "epsilon", "delta", "steps")
  spec = PrivacySpec(
    given["epsilon"], given["delta"], adjacency=given["adjacency"], accountant=given["accountant"]
  )
  mechanism = calibrate(spec, _sampling(values), given["steps"])
  return _print_mechanism(values, mechanism, given["delta"], mechanism.steps)


def _epsilon(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.privacy.mechanism import Mechanism

  given = _needed(values, arguments, "noise_multiplier", "delta", "steps")
  steps = int(given["steps"])
  mechanism = Mechanism(
    # What has not begun has released nothing, and is a plan of one step for this question.
    _sampling(values), given["noise_multiplier"], 1 if steps == 0 else steps,
    adjacency=given["adjacency"], accountant=given["accountant"],
  )  # fmt: skip
  return _print_mechanism(values, mechanism, given["delta"], steps)


def _needed(values: flags.FlagValues, arguments: list[str], *needed: str) -> dict[str, Any]:
  """All flags by name; ValueError if one of `needed` was not given."""
  if arguments:
    raise UserError(f"unexpected arguments {arguments}.")
  given = {name: values[name].value for name in dir(values)}
  missing = [f"--{name}" for name in needed if given[name] is None]
  if missing:
    raise UserError(f"give {', '.join(missing)}.")
  return given


def _sampling(values: flags.FlagValues) -> Any:
  from dp_jax.privacy.sampling.schemes import SCHEMES, sampling_from_dict, scheme_of

  name = str(values["sampling"].value)
  wanted = scheme_of(name).SETTINGS
  everything = sorted({flag for scheme in SCHEMES for flag in scheme.SETTINGS})
  given = {flag: values[flag].value for flag in everything if values[flag].value is not None}
  missing = [f"--{flag}" for flag in wanted if flag not in given]
  if missing:
    raise UserError(f"--sampling={name} needs {' and '.join(missing)}.")
  extra = [f"--{flag}" for flag in given if flag not in wanted]
  if extra:
    raise UserError(f"--sampling={name} does not use {' and '.join(extra)}; leave it out.")
  return sampling_from_dict({"name": name, **{wanted[flag]: given[flag] for flag in wanted}})


def _print_mechanism(values: flags.FlagValues, mechanism: Any, delta: float, steps: int) -> int:
  accounted = _account(mechanism, delta, steps)
  result = {
    "noise_multiplier": mechanism.noise_multiplier,
    "epsilon": accounted.epsilon,
    "delta": delta,
    "sampling": mechanism.sampling.name,
    "sampling_rate": mechanism.sampling.sampling_rate,
    "steps": steps,
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


def _account(mechanism: Any, delta: float, steps: int) -> Any:
  """Epsilon at delta; of exact Gaussian noise, with a warning, where the sampler's range shows."""
  from dp_jax.privacy.accounting.tails import SamplerTailError

  try:
    return mechanism.account(delta, steps)
  except SamplerTailError as error:
    _log.warning(
      "warning: this figure is for exact Gaussian noise and no run can state it: %s", error
    )
    return mechanism.account(delta, steps, sampler_tails=False)


def _define_plan(values: flags.FlagValues) -> None:
  flags.DEFINE_integer("num_units", None, "N, the number of units", flag_values=values)
  flags.DEFINE_float("epsilon", None, "target epsilon", flag_values=values)
  flags.DEFINE_float("delta", None, "delta", flag_values=values)
  flags.DEFINE_float("epochs", None, "the compute: passes over the data", flag_values=values)
  flags.DEFINE_integer("steps", None, "the compute: steps x batch", flag_values=values)
  flags.DEFINE_integer("batch", None, "of --steps", flag_values=values)
  flags.DEFINE_list("batches", None, "batch sizes to tabulate", flag_values=values)
  flags.DEFINE_string("plot", None, "write a plot: FILE.png, .svg or .pdf", flag_values=values)
  flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def _plan(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.privacy.calibration.planning import plan
  from dp_jax.privacy.spec import PrivacySpec

  given = _needed(values, arguments, "num_units", "epsilon", "delta")
  spec = PrivacySpec(given["epsilon"], given["delta"])
  plot = None if given["plot"] is None else Path(given["plot"])
  if plot is not None:
    from dp_jax.report.plan_plot import check_format, save_plan_plot

    check_format(plot)
  rows = []
  if not given["json"]:
    print(f"{'batch':>12} {'steps':>10} {'noise multiplier':>17} {'noise / batch':>14}  accountant")
  for row in plan(spec, given["num_units"], _budget(given), _batches(given["batches"])):
    rows.append(row)
    if not given["json"]:
      print(
        f"{row.expected_batch_size:>12,.0f} {row.steps:>10,} {row.noise_multiplier:>17.4f}"
        f" {row.noise_per_unit:>14.3g}  {row.accountant}",
        flush=True,
      )
  if given["json"]:
    print(json.dumps({"rows": [row.to_dict() for row in rows]}))
  if plot is not None:
    save_plan_plot(rows, spec, given["num_units"], plot)
  return 0


def _budget(given: dict[str, Any]) -> float:
  """Units processed over the run."""
  if (given["epochs"] is None) == (given["steps"] is None and given["batch"] is None):
    raise UserError("give the compute as --epochs, or as --steps and --batch.")
  if given["epochs"] is not None:
    return given["epochs"] * given["num_units"]
  if given["steps"] is None or given["batch"] is None:
    raise UserError("--steps and --batch go together: the compute is steps x batch.")
  return float(given["steps"] * given["batch"])


def _batches(texts: list[str] | None) -> list[int] | None:
  try:
    return None if texts is None else [int(text) for text in texts]
  except ValueError as error:
    raise UserError(f"--batches={','.join(texts or [])} must be whole numbers.") from error


COMMANDS = {
  "calibrate": Command(
    "Find the noise multiplier that meets a target epsilon.",
    "--epsilon=E --delta=D --sampling_rate=Q --steps=T", _define_calibrate, _calibrate, False,
  ),
  "epsilon": Command(
    "Compute the epsilon of a noise multiplier.",
    "--noise_multiplier=Z --delta=D --sampling_rate=Q --steps=T", _define_epsilon, _epsilon, False,
  ),
  "plan": Command(
    "Tabulate the noise of each batch size at one guarantee and one compute budget.",
    "--num_units=N --epsilon=E --delta=D --epochs=M [--plot=FILE.png]", _define_plan, _plan, False,
  ),
}  # fmt: skip
