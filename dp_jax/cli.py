"""The command line: `python -m dp_jax COMMAND`, or `dp-jax COMMAND`.

Exit codes: 0 done, or stopped by SIGTERM with a checkpoint to go on from; 1 a release that does not
verify; 2 bad input, or a file that cannot be read or written (one line on standard error); 3 a
fault of dp_jax, with its traceback (of private data, in a file that is named).
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags
from absl import logging as absl_logging

from dp_jax.commands import compare, features, mechanisms, overrides, runs, sweep
from dp_jax.commands.base import Command, config_of
from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.run_config import Config
from dp_jax.config.shipped import located
from dp_jax.errors import UserError
from dp_jax.files import crash
from dp_jax.parallel.stopping import Stopped

_TRACEBACK = "DP_JAX_TRACEBACK"

COMMANDS = {
  **runs.COMMANDS, **compare.COMMANDS, **features.COMMANDS, **sweep.COMMANDS,
  **mechanisms.COMMANDS,
}  # fmt: skip


def run() -> NoReturn:
  """Entry point of the console script."""
  sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns the exit code."""
  logging.basicConfig(format="%(message)s", stream=sys.stderr)
  logging.getLogger("dp_jax").setLevel(logging.INFO)
  # A write that fails is told there as a traceback of a thread; what is raised is told here.
  absl_logging.set_verbosity(absl_logging.FATAL)
  if not argv or argv[0] in ("--help", "-h", "help"):
    print(_overview())
    return 0 if argv else 2
  name, *rest = argv
  if name not in COMMANDS:
    print(f"error: unknown command {name!r}; one of {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2
  try:
    return _run(name, rest)
  except Stopped as stopped:
    print(stopped, file=sys.stderr)
    return 0
  except (UserError, OSError) as error:
    if os.environ.get(_TRACEBACK):
      traceback.print_exc()
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  except Fault as fault:
    crash.tell(fault.error, private=fault.private, folder=fault.folder)
    return 3


def _run(name: str, argv: list[str]) -> int:
  command = COMMANDS[name]
  values = flags.FlagValues()
  flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=values)
  command.define(values)
  if "config" in values:
    argv = overrides.rewrite([located(each) for each in argv], (Config, FeaturesConfig))
  arguments = _parse(values, name, argv)
  if values["help"].value:
    print(f"dp-jax {name} {command.usage}\n\n{command.summary}\n{values.get_help()}")
    return 0
  try:
    return command.execute(values, arguments)
  except (Stopped, UserError, OSError):
    raise
  except Exception as error:
    raise Fault(error, *_whose(command, values)) from error


class Fault(Exception):
  """An exception that no user can mend, and whether what it says may be shown.

  Attributes:
    error: what was raised.
    private: whether the command reads data that are not known to be public.
    folder: the work directory, if the command has one.
  """

  def __init__(self, error: Exception, private: bool, folder: Path | None):
    super().__init__(str(error))
    self.error, self.private, self.folder = error, private, folder


def _whose(command: Command, values: flags.FlagValues) -> tuple[bool, Path | None]:
  """Whether a command reads private data, as far as is known, and its work directory."""
  folder = (
    Path(values["workdir"].value) if "workdir" in values and values["workdir"].value else None
  )
  if not command.reads_records:
    return False, folder
  try:
    return config_of(values, command.kind).data.declared != "public", folder
  except Exception:  # the data are private unless a configuration says otherwise
    return True, folder


def _parse(values: flags.FlagValues, name: str, argv: list[str]) -> list[str]:
  """Positional arguments; an error in a flag becomes a ValueError of one line."""
  program, sys.argv = sys.argv, [name, *argv]  # ml_collections reads overrides from sys.argv
  try:
    return values([name, *argv])[1:]
  except KeyError as error:
    raise UserError(f"the configuration has no key {error}.") from error
  except (flags.Error, AttributeError, TypeError, ImportError, OSError) as error:
    raise UserError(f"{error} (see dp-jax {name} --help)") from error
  finally:
    sys.argv = program


def _overview() -> str:
  lines = [f"  {name:<10} {command.summary.splitlines()[0]}" for name, command in COMMANDS.items()]
  return "\n".join(
    ["usage: dp-jax COMMAND [flags]", "", *lines, "", "dp-jax COMMAND --help lists its flags."]
  )
