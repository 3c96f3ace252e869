"""How far the host is ahead of the devices: what it makes for steps to come, and when it waits.

On an accelerator the host's work is hidden behind that of the devices. A CPU does both, so that
what the host does takes from the step, and here it does less of it.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dp_jax.data.pipeline import Microbatch

# The most steps, of how many bytes in all.
_STEPS = 16
_BYTES = 2**22
# How long the devices may have to do; the host learns that much later of a signal to stop.
_SECONDS = 0.25


def num_bytes(tree: Any) -> int:
  """Bytes of the arrays of a tree."""
  return sum(x.nbytes for x in jax.tree.leaves(tree))


class StepInputs(NamedTuple):
  """What a step needs.

  Attributes:
    indices: int64[n], its units.
    unit_key: of what is random in units, on every device.
    noise_key: of the noise, on every device.
    piece: the one microbatch that holds the step, on the devices; None where it is made later.
  """

  indices: np.ndarray
  unit_key: jax.Array
  noise_key: jax.Array
  piece: Microbatch | None

  def nbytes(self) -> int:
    """Of the arrays that grow with the step."""
    return num_bytes((self.indices, self.piece))


class Ahead:
  """Keeps what was made for the steps to come.

  Making it takes a third of the processor time where the code has just run: between two steps of
  a large model everything else has left the caches. Steps that hold much are made one at a time.
  """

  def __init__(self) -> None:
    self._made: dict[int, StepInputs] = {}

  def take(self, step: int, last: int, make: Callable[[int], StepInputs]) -> StepInputs:
    """What a step needs; makes it, with that of the next steps, unless it is there.

    Args:
      step: which one.
      last: the steps of the run.
      make: a function of the step alone.
    """
    if step not in self._made:
      self._made.clear()
      size = 0
      for each in range(step, max(step + 1, min(step + _STEPS, last))):
        self._made[each] = make(each)
        size += self._made[each].nbytes()
        if size > _BYTES:
          break
    return self._made.pop(step)


class DispatchThrottle:
  """Waits for the devices, so that steps that are begun do not pile up.

  At most one step is begun before the one under way is done, or several short ones of few bytes:
  being woken at each takes time from the cores that compute.
  """

  def __init__(self) -> None:
    self._begun: list[jax.Array] = []
    self._bytes = 0.0
    self._seconds = math.inf  # of a step
    self._since = time.monotonic()

  def begun(self, result: jax.Array, nbytes: int | None) -> None:
    """Notes a step that was handed to the devices, and waits if it is time.

    Args:
      result: of the step.
      nbytes: what it holds on the devices until it is done; None if that is much.
    """
    size = math.inf if nbytes is None else nbytes
    self._begun.append(result)
    self._bytes += size
    count = len(self._begun)
    fits = count < _STEPS and self._bytes <= _BYTES and count * self._seconds < _SECONDS
    if count == 1 or fits:
      return
    self._begun[-2].block_until_ready()  # one array: each that is waited for costs the host
    now = time.monotonic()
    self._seconds, self._since = (now - self._since) / (count - 1), now
    self._begun, self._bytes = self._begun[-1:], size
