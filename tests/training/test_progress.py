"""Progress in a log file: plain lines, public numbers, no control characters."""

import io

from dp_jax.training.progress import Progress


def test_lines_name_step_epsilon_rate_and_time_left(monkeypatch):
  now = [0.0]
  monkeypatch.setattr("time.monotonic", lambda: now[0])
  stream = io.StringIO()
  progress = Progress(5, 1, 100.0, "train", stream=stream)
  for seconds in (60.0, 2.0, 4.0, 4.0):  # the first step compiles
    now[0] += seconds
    progress.update(0.25)
  progress.close()
  lines = stream.getvalue().splitlines()
  assert lines[0] == "train: step 2/5, epsilon 0.250"
  # Steps of 2 and 4 seconds since the first: 100 units / 3 seconds, one step left.
  assert lines[1] == "train: step 4/5, epsilon 0.250, 33 units/s, 3 s left"
  assert lines[2].startswith("train: step 5/5") and lines[2].endswith("0 s left")
  assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_without_privacy_there_is_no_epsilon_and_silence_is_silent():
  stream = io.StringIO()
  Progress(1, 0, 10.0, "train", stream=stream).update(None)
  assert "epsilon" not in stream.getvalue()
  quiet = io.StringIO()
  Progress(1, 0, 10.0, "train", enabled=False, stream=quiet).update(None)
  assert quiet.getvalue() == ""


def test_a_terminal_gets_a_bar_with_every_step():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  stream = Terminal()
  progress = Progress(3, 0, 10.0, "train", stream=stream)
  for _ in range(3):
    progress.update(0.5)
  progress.close()
  assert "3/3" in stream.getvalue() and "epsilon 0.500" in stream.getvalue()
