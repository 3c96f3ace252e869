"""SIGTERM, which a scheduler sends before it takes the machine away."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
  """The run stopped because it was asked to; its checkpoint is on disk."""


class StopSignal:
  """Whether the process has been asked to stop."""

  def __init__(self) -> None:
    self.received = False

  def receive(self, number: int, frame: FrameType | None) -> None:
    """The signal handler."""
    del number, frame
    self.received = True


@contextlib.contextmanager
def listening() -> Iterator[StopSignal]:
  """Notes SIGTERM in place of dying of it, so that a step is finished and saved first.

  Outside the main thread, where Python handles no signals, nothing is noted.
  """
  stop = StopSignal()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  previous = signal.signal(signal.SIGTERM, stop.receive)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, previous)
