"""SIGTERM, which a scheduler sends before it takes the machine away."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
  """The run stopped because it was asked to; its checkpoint is on disk."""


class StopSignal:
  """Whether the run has been asked to stop."""

  def __init__(self) -> None:
    self.received = False

  def asked_at(self, step: int) -> bool:
    """Whether to stop after so many steps; to be asked after each.

    Of several hosts, jax's own service listens, and makes all of them stop after the same step.
    """
    if _is_alone():
      return self.received
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

  def receive(self, number: int, frame: FrameType | None) -> None:
    """The signal handler."""
    del number, frame
    self.received = True


def _is_alone() -> bool:
  import jax  # not above: commands that need no JAX import this file

  return jax.process_count() == 1


@contextlib.contextmanager
def listening() -> Iterator[StopSignal]:
  """Notes SIGTERM in place of dying of it, so that a step is finished and saved first.

  Outside the main thread, where Python handles no signals, nothing is noted; where there are
  several hosts, each leaves it to jax.
  """
  stop = StopSignal()
  if not _is_alone() or threading.current_thread() is not threading.main_thread():
    yield stop
    return
  previous = signal.signal(signal.SIGTERM, stop.receive)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, previous)
