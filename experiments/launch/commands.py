"""What the launch scripts share: commands that are printed or run, one after the other."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Runner:
  """Runs commands, or prints them.

  Attributes:
    dry_run: print what would be run, and run nothing.
  """

  dry_run: bool

  def __call__(self, command: Sequence[str], *, stdin: str | None = None) -> None:
    """Runs one command to its end.

    Raises:
      subprocess.CalledProcessError: if it fails.
    """
    if self.try_run(command, stdin=stdin):
      raise subprocess.CalledProcessError(1, command)

  def try_run(self, command: Sequence[str], *, stdin: str | None = None) -> int:
    """Runs one command and returns its exit code; 0 of a dry run."""
    self.show(command)
    if self.dry_run:
      return 0
    return subprocess.run(command, input=stdin, text=True, check=False).returncode

  def ask(self, command: Sequence[str]) -> str:
    """What a command prints; nothing of a dry run, or if it fails."""
    if self.dry_run:
      return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip()

  def show(self, command: Sequence[str]) -> None:
    """Prints a command as it could be pasted into a shell."""
    print(shlex.join(command), file=sys.stdout if self.dry_run else sys.stderr, flush=True)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Options before `--`, and the arguments of `dp-jax train` after it."""
  own = list(argv)
  if "--" not in own:
    return own, []
  cut = own.index("--")
  return own[:cut], own[cut + 1 :]
