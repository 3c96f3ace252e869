"""What commands have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from dp_jax.commands.overrides import SET, UNSET, set_arguments, unset
from dp_jax.errors import UserError


class Command(NamedTuple):
  """A command of the command line.

  Attributes:
    summary: what it does; the first line stands in the overview.
    usage: its arguments and main flags.
    define: declares its flags.
    execute: runs it, from parsed flags and arguments; returns the exit code.
    reads_records: whether an error of it can carry something of the data.
    kind: what its --config is; None is a `Config`.
  """

  summary: str
  usage: str
  define: Callable[[flags.FlagValues], None]
  execute: Callable[[flags.FlagValues, list[str]], int]
  reads_records: bool = True
  kind: Any = None


def one_argument(arguments: list[str], what: str) -> Path:
  """The only argument, as a path; ValueError if there is none or more."""
  if len(arguments) != 1:
    raise UserError(f"give one {what}, got {len(arguments)}: {arguments}.")
  return Path(arguments[0])


def define_config(values: flags.FlagValues) -> None:
  """Declares --config."""
  from ml_collections import config_flags

  config_flags.DEFINE_config_file(
    "config",
    None,
    "config file; --config.a.b=value overrides a key, --config.a.b=none unsets it",
    flag_values=values,
  )
  flags.DEFINE_multi_string(
    UNSET, [], "a key, section.name, that is unset: what --config.section.name=none becomes",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_multi_string(
    SET, [], "section.kwargs.name=value: what --config.section.kwargs.name=value becomes",
    flag_values=values,
  )  # fmt: skip


def config_of(values: flags.FlagValues, kind: Any = None) -> Any:
  """The checked configuration of --config and its overrides: a `Config`, or another kind."""
  from ml_collections import config_flags

  from dp_jax.config.facts import set_anew
  from dp_jax.config.run_config import Config

  if values["config"].value is None:
    raise UserError("give --config=FILE, for example --config=configs/digits.py.")
  try:
    content = values["config"].value.to_dict()
  except OSError as error:  # ml_collections keeps the failure to load until the first use
    raise UserError(f"cannot load the config file: {str(error).splitlines()[-1]}") from error
  unset_keys, set_keys = values[UNSET].value or [], values[SET].value or []
  unset(content, unset_keys)
  set_arguments(content, set_keys)
  facts = content.get("facts", {})
  if facts.get("hyperparameter_selection"):
    given = [*config_flags.get_override_values(values["config"]), *unset_keys]
    given += [argument.partition("=")[0] for argument in set_keys]
    facts["hyperparameter_selection"] = set_anew(facts["hyperparameter_selection"], given)
  return (kind or Config).from_dict(content)


def define_ledger(values: flags.FlagValues) -> None:
  """Flags of the ledger of several runs on the same data."""
  flags.DEFINE_string(
    "ledger", None, "file that keeps the budget of several runs on the same data",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_float("ledger_epsilon", None, "budget of a new --ledger", flag_values=values)
  flags.DEFINE_float("ledger_delta", None, "budget of a new --ledger", flag_values=values)


def ledger_budget(values: flags.FlagValues, config: Any) -> Any:
  """The budget of a new ledger, for the unit and adjacency of this run; None if not given."""
  from dp_jax.privacy.spec import PrivacySpec

  epsilon, delta = values["ledger_epsilon"].value, values["ledger_delta"].value
  if epsilon is None and delta is None:
    return None
  if epsilon is None or delta is None:
    raise UserError("--ledger_epsilon and --ledger_delta go together.")
  return PrivacySpec(epsilon, delta, config.privacy.unit, config.privacy.adjacency)


def define_hosts(values: flags.FlagValues) -> None:
  """Flags of a run of several processes, one a host."""
  flags.DEFINE_bool(
    "distributed", False, "join the other hosts of SLURM, Cloud TPU or TPUs on GKE",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
  flags.DEFINE_integer("num_processes", None, "how many there are", flag_values=values)
  flags.DEFINE_integer("process_id", None, "which one this is, from 0", flag_values=values)
  flags.DEFINE_integer(
    "heartbeat_seconds", 30, "how long a host may be silent before all stop", flag_values=values
  )


def join_hosts(values: flags.FlagValues) -> None:
  """Joins the other processes, if there are any."""
  names = ("coordinator", "num_processes", "process_id")
  given = {name: values[name].value for name in names}
  if values["distributed"].value or any(value is not None for value in given.values()):
    from dp_jax.parallel.hosts import Hosts, join

    join(Hosts(**given, heartbeat_seconds=int(values["heartbeat_seconds"].value or 0)))
