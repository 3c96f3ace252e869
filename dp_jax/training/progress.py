"""Progress of a run: a bar on a terminal, plain lines in a log file. Public numbers only."""

import sys
import time
from typing import TextIO

from tqdm import tqdm

_LINE_SECONDS = 5.0


class Progress:
  """Shows step, expected units per second, time left, and epsilon spent.

  The rate is expected_batch_size x steps / time: the realised batch sizes are not public.

  Args:
    steps: of the whole run.
    done: steps that an earlier process did.
    expected_batch_size: the public one.
    label: shown before the bar.
    peak: units per second that would keep the devices at their peak; None leaves it out.
    enabled: False shows nothing.
    stream: where to write; a bar if it is a terminal, lines otherwise.
  """

  def __init__(
    self,
    steps: int,
    done: int,
    expected_batch_size: float,
    label: str,
    *,
    peak: float | None = None,
    enabled: bool = True,
    stream: TextIO | None = None,
  ):
    self._steps, self._done = steps, done
    self._first: int | None = None  # the step that timing counts from
    self._size, self._label = expected_batch_size, label
    self._peak = peak
    self._stream = stream or sys.stderr
    self.enabled = enabled
    self._start = self._last_line = time.monotonic()
    self._bar = None
    if enabled and self._stream.isatty():
      self._bar = tqdm(
        total=steps, initial=done, desc=label, unit="step", file=self._stream, dynamic_ncols=True
      )

  def update(self, epsilon: float | None) -> None:
    """One more step is done; `epsilon` is what has been spent so far, None without privacy."""
    self._done += 1
    if self._first is None:
      # The first step compiles: its time says nothing about the others.
      self._first, self._start = self._done, time.monotonic()
    if not self.enabled:
      return
    if self._bar is not None:
      self._bar.set_postfix_str(self._facts(epsilon), refresh=False)
      self._bar.update()
    elif self._done == self._steps or time.monotonic() - self._last_line >= _LINE_SECONDS:
      self._last_line = time.monotonic()
      print(
        f"{self._label}: step {self._done}/{self._steps}, {self._facts(epsilon)}",
        file=self._stream,
        flush=True,
      )

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()

  def speed(self) -> dict[str, float]:
    """Expected `units_per_second`, and `utilisation` of the devices' peak where it is known.

    Empty until two steps are done.
    """
    seconds = self._seconds_per_step()
    if seconds is None:
      return {}
    rate = self._size / max(seconds, 1e-9)
    return {"units_per_second": rate} | (
      {} if self._peak is None else {"utilisation": rate / self._peak}
    )

  def _seconds_per_step(self) -> float | None:
    if self._first is None or self._done == self._first:
      return None
    return (time.monotonic() - self._start) / (self._done - self._first)

  def _facts(self, epsilon: float | None) -> str:
    facts = [] if epsilon is None else [f"epsilon {epsilon:.3f}"]
    speed, seconds = self.speed(), self._seconds_per_step()
    if "units_per_second" in speed:
      facts.append(f"{speed['units_per_second']:.0f} units/s")
    if "utilisation" in speed:
      facts.append(f"{speed['utilisation']:.1%} of peak")
    if seconds is not None and self._bar is None:  # a bar shows its own time left
      facts.append(f"{(self._steps - self._done) * seconds:.0f} s left")
    return ", ".join(facts)
