"""One run of several processes on this machine, supervised.

  python -m experiments.launch.local --processes=2 -- --config=configs/digits.py --workdir=runs/two

Arguments after `--` are those of `dp-jax train`. The first process prints; the last lines of the
others are kept. When one of them fails, the rest are ended, and the message says which failed
first, how, and what it said last. SIGTERM and Ctrl-C are passed on as SIGTERM, upon which the run
saves, and goes on when the same command is given again.
"""

import argparse
import collections
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.launch.commands import split_at_dashes

ROOT = Path(__file__).parents[2]
_TAIL_LINES = 20
_POLL_SECONDS = 0.1
# How long the others may take to say for themselves that one is gone.
_GRACE_SECONDS = 5.0


def command(rank: int, options: argparse.Namespace, train: Sequence[str]) -> list[str]:
  """What one process runs."""
  return [
    sys.executable, "-m", "dp_jax", "train", *train,
    f"--coordinator=127.0.0.1:{options.port}", f"--num_processes={options.processes}",
    f"--process_id={rank}", f"--heartbeat_seconds={options.heartbeat_seconds}",
  ]  # fmt: skip


def environment(rank: int, options: argparse.Namespace) -> dict[str, str]:
  """What one process gets beside the environment of this one."""
  if options.gpus_per_process:
    first = rank * options.gpus_per_process
    devices = range(first, first + options.gpus_per_process)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
  if options.cpu_devices:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.cpu_devices)}
  return {}


class Rank:
  """One process, and the last lines that it wrote to standard error."""

  def __init__(self, rank: int, options: argparse.Namespace, train: Sequence[str]):
    self.rank = rank
    self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    # A session of its own, so that workers which it starts can be ended with it.
    self._process = subprocess.Popen(
      command(rank, options, train), cwd=ROOT, env={**os.environ, **environment(rank, options)},
      stdout=None if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
      start_new_session=True,
    )  # fmt: skip
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    for line in self._process.stderr or ():
      self.tail.append(line)
      if self.rank == 0:
        sys.stderr.write(line)
        sys.stderr.flush()

  def code(self) -> int | None:
    """The exit code, negative for a signal; None while it runs."""
    return self._process.poll()

  def send(self, number: signal.Signals) -> None:
    """Sends a signal to the process, and with SIGKILL to all that it started."""
    if self.code() is None and number != signal.SIGKILL:
      self._process.send_signal(number)
    elif number == signal.SIGKILL:
      try:
        os.killpg(self._process.pid, number)
      except ProcessLookupError:
        return

  def finish(self) -> None:
    """Waits until it has ended and everything it wrote is read."""
    self._process.wait()
    self._reader.join(timeout=1)


def how(code: int) -> str:
  """An exit code in words."""
  return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def supervise(ranks: Sequence[Rank]) -> int:
  """Waits for all; ends all if one fails.

  Returns:
    0, or the exit code of the first that failed (1 if it was a signal).
  """
  asked = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: (asked.set(), [r.send(signal.SIGTERM) for r in ranks]))
  failed = None
  try:
    while failed is None and any(rank.code() is None for rank in ranks):
      time.sleep(_POLL_SECONDS)
      failed = next((rank for rank in ranks if rank.code()), None)
    if failed is None:
      failed = next((rank for rank in ranks if rank.code()), None)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(rank.code() is None for rank in ranks) and time.monotonic() < deadline:
      time.sleep(_POLL_SECONDS)
  finally:
    others = [rank.rank for rank in ranks if rank.code() is None]
    for rank in ranks:
      rank.send(signal.SIGKILL)
      rank.finish()
  if failed is None:
    return 0
  code = failed.code() or 1
  print(
    f"\nerror: rank {failed.rank} of {len(ranks)} {how(code)}"
    f"{f'; ended rank {others}' if others else ''}. Its last lines:\n"
    f"{''.join(failed.tail) or '  (none)'}",
    file=sys.stderr,
  )
  return code if code > 0 else 1


def free_port() -> int:
  """A port that nobody listens on."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Options of the launcher, and the arguments of `dp-jax train`."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--processes", type=int, required=True)
  parser.add_argument("--gpus_per_process", type=int, default=0)
  parser.add_argument("--cpu_devices", type=int, default=0, help="virtual devices a process")
  parser.add_argument("--heartbeat_seconds", type=int, default=20)
  parser.add_argument("--port", type=int, default=0, help="of process 0; 0 takes a free one")
  parser.add_argument("--dry_run", action="store_true", help="print the commands only")
  own, train = split_at_dashes(argv)
  options = parser.parse_args(own)
  if options.processes < 1:
    parser.error("--processes must be at least 1")
  if not train:
    parser.error("give the arguments of `dp-jax train` after --")
  return options, train


def main(argv: Sequence[str]) -> int:
  """Runs all processes; returns the exit code."""
  options, train = parse(argv)
  if not options.port:
    options.port = 12345 if options.dry_run else free_port()
  if options.dry_run:
    for rank in range(options.processes):
      added = [f"{name}={value}" for name, value in environment(rank, options).items()]
      print(shlex.join([*added, *command(rank, options, train)]))
    return 0
  return supervise([Rank(rank, options, train) for rank in range(options.processes)])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
