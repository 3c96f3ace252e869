"""Event files for TensorBoard, an optional extra."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError


class Board:
  """Plots of one run. A process that goes on with a run writes a file of its own.

  Args:
    path: the folder of the event files. Training losses are not covered by a guarantee: on private
      data, a folder under `private/`.
    done: steps that an earlier process did and that stand; later ones in its files are dropped
      when they are read.

  Raises:
    ValueError: if the package is missing.
  """

  def __init__(self, path: Path, done: int):
    check_available()
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = EventFileWriter(str(path))
    if done:
      restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._writer.add_event(self._event(wall_time=time.time(), step=done + 1, session_log=restart))

  def scalars(self, step: int, group: str, values: Mapping[str, Any]) -> None:
    """Plots the numbers among the values under group/name."""
    plotted = [
      self._summary.Value(tag=f"{group}/{name}", simple_value=value)
      for name, value in values.items()
      if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    ]
    event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=plotted))
    self._writer.add_event(event)

  def close(self) -> None:
    """Writes what is pending."""
    self._writer.close()


def check_available() -> None:
  """Refuses to start a run that could not be plotted.

  Raises:
    ValueError: if the package is missing.
  """
  try:
    import tensorboard.summary.writer.event_file_writer  # noqa: F401
  except ImportError as error:
    raise UserError(
      "train.tensorboard=True needs the package tensorboard: pip install 'dp_jax[tensorboard]', or"
      " leave it out."
    ) from error
