"""Several hosts as one run: they start together, agree before step 0, and stop together.

The engine is JAX's own: one process a host, joined by `jax.distributed`. Process 0 draws the
secret key and tells the others, and only it writes the work directory, but for checkpoints, which
all write. With one host, every function here does the plain thing.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dp_jax.errors import UserError
from dp_jax.files import crash
from dp_jax.parallel.stopping import Stopped
from dp_jax.privacy.master_key import MasterKey

T = TypeVar("T")

HEARTBEAT_SECONDS = 30
_PACKAGE = Path(__file__).parents[1]
# What ends one host's work before step 0, and must then end that of all.
_REFUSALS = (UserError, OSError)

_log = logging.getLogger(__name__)


class SharedError(UserError):
  """An error that every host raises at the same point, so that none is left waiting."""


class Hosts(NamedTuple):
  """How the processes of a run find each other.

  Attributes:
    coordinator: "HOST:PORT" of process 0; None asks the environment (SLURM, Cloud TPU, GKE TPU).
    num_processes: how many there are.
    process_id: which one this is, from 0.
    heartbeat_seconds: a host that is silent for so long is taken for dead, and all stop.
  """

  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  heartbeat_seconds: int = HEARTBEAT_SECONDS


def join(hosts: Hosts) -> None:
  """Joins the other processes; to be called before anything is computed.

  Raises:
    ValueError: if the flags are incomplete, the environment names no cluster, or the others do not
      come.
  """
  given = (hosts.coordinator, hosts.num_processes, hosts.process_id)
  if any(x is None for x in given) and any(x is not None for x in given):
    raise UserError("--coordinator, --num_processes and --process_id go together.")
  if hosts.num_processes is not None and not 0 <= (hosts.process_id or 0) < hosts.num_processes:
    raise UserError(
      f"--process_id={hosts.process_id} must be from 0 to {hosts.num_processes - 1}, one less than"
      " --num_processes."
    )
  if hosts.heartbeat_seconds < 1:
    raise UserError(f"--heartbeat_seconds={hosts.heartbeat_seconds} must be at least 1.")
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(*given, heartbeat_timeout_seconds=hosts.heartbeat_seconds)
  except (ValueError, RuntimeError) as error:
    raise UserError(
      f"cannot join the other processes: {error} Give --coordinator, --num_processes and"
      " --process_id, or start under SLURM or on a Cloud TPU with --distributed."
    ) from error
  if not is_process_0():
    logging.getLogger("dp_jax").setLevel(logging.ERROR)  # process 0 tells it once


def is_process_0() -> bool:
  """Whether this is the host that writes."""
  return jax.process_index() == 0


def gather(text: str) -> list[str]:
  """What each host says, in their order; a call of all hosts together."""
  if jax.process_count() == 1:
    return [text]
  content = np.frombuffer(text.encode(), np.uint8)
  lengths = np.asarray(multihost_utils.process_allgather(np.int32(content.size)))
  padded = np.zeros(int(lengths.max()), np.uint8)
  padded[: content.size] = content
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(lengths.size, -1)
  return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast(value: Any) -> Any:
  """The JSON value of process 0, on every host; a call of all hosts together."""
  return value if jax.process_count() == 1 else json.loads(gather(json.dumps(value))[0])


def on_all_hosts(action: Callable[[], T]) -> T:
  """Does something on every host, and goes on only if all of them could.

  Raises:
    SharedError: on every host, naming those that could not and why.
  """
  if jax.process_count() == 1:
    return action()
  result, problem, fault = None, "", None
  try:
    result = action()
  except _REFUSALS as error:
    problem = str(error) or type(error).__name__
  except Exception as error:  # whose message may say what a record holds
    problem, fault = f"{type(error).__name__}, a fault of dp_jax: see what that host says", error
  problems = gather(problem)
  if fault is not None:
    raise fault
  if any(problems):
    named = [f"host {i}: {text}" for i, text in enumerate(problems) if text]
    raise SharedError(
      problems[0] if len(set(problems)) == 1 else f"{' '.join(named)} All hosts stop."
    )
  return result  # type: ignore[return-value]


def on_process_0(action: Callable[[], T]) -> T | None:
  """Does something on process 0 only; None on the others, which wait for it.

  Raises:
    SharedError: on every host, if process 0 could not.
  """
  return on_all_hosts(lambda: action() if is_process_0() else None)


def share_key(draw: Callable[[], MasterKey]) -> MasterKey:
  """The key that process 0 draws, on every host; it is shown nowhere."""
  if jax.process_count() == 1:
    return draw()
  content = np.zeros(33, np.uint8)
  if is_process_0():
    key = draw()
    content = np.frombuffer(key.secret + bytes([key.is_test]), np.uint8)
  told = np.asarray(multihost_utils.broadcast_one_to_all(content)).astype(np.uint8).tobytes()
  return MasterKey(told[:32], bool(told[32]))


def agree(shown: Mapping[str, Any], hidden: Mapping[str, Any]) -> None:
  """Stops every host before step 0 if one differs from the first.

  Args:
    shown: public facts, nested; a difference is named with both values.
    hidden: facts that are secret or tell of private records; they are compared by their hashes, and
      a difference is named without the values.

  Raises:
    SharedError: on every host, naming each host that differs and in what.
  """
  if jax.process_count() == 1:
    return
  facts = {
    "shown": dict(_flat(shown)),
    "hidden": {name: hashlib.sha256(repr(x).encode()).hexdigest() for name, x in hidden.items()},
  }
  first, *others = [json.loads(text) for text in gather(json.dumps(facts, sort_keys=True))]
  problems = [
    f"host {number} differs from host 0: {'; '.join(found)}"
    for number, other in enumerate(others, 1)
    if (found := _differences(first, other))
  ]
  if problems:
    raise SharedError(f"{'. '.join(problems)}. All hosts stop before step 0.")


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
  found = []
  here, there = first["shown"], other["shown"]
  for name in sorted({*here, *there}):
    if here.get(name) != there.get(name):
      found.append(f"{name} is {there.get(name)}, not {here.get(name)}")
  here, there = first["hidden"], other["hidden"]
  return found + [name for name in sorted(here) if here[name] != there.get(name)]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
  """Nested dictionaries as dotted names and the text of values."""
  for key, value in content.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", json.dumps(value, default=str)


@functools.cache  # a tree that is edited during a run does not change what runs
def code_version() -> str:
  """The package's version, and a hash of its source."""
  digest = hashlib.sha256()
  for path in sorted(_PACKAGE.rglob("*.py")):
    digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
    digest.update(hashlib.sha256(path.read_bytes()).digest())
  return f"dp_jax {version('dp_jax')}, source {digest.hexdigest()[:16]}"


@contextlib.contextmanager
def stopping_all(*, private: bool, folder: Path | None = None) -> Iterator[None]:
  """Ends the process at once if it fails where the others do not, so that they notice.

  An ordinary exit would wait for the others to finish, while they wait for this one.

  Args:
    private: whether the data are private, of which no message may be shown.
    folder: the work directory.
  """
  try:
    yield
  except (SharedError, Stopped):
    raise  # as every host does
  except Exception as error:
    if jax.process_count() == 1:
      raise
    if isinstance(error, jax.errors.JaxRuntimeError):
      first = str(error).strip().splitlines()[0]
      print(
        f"error: host {jax.process_index()} stops: {first}\n"
        "If that is about a connection, another host is gone, and its own message says why.",
        file=sys.stderr,
      )
    elif isinstance(error, _REFUSALS):
      text = " ".join(str(error).split())
      print(f"error: host {jax.process_index()}: {text}", file=sys.stderr)
    else:
      crash.tell(error, private=private, folder=folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, _REFUSALS) else 3)
