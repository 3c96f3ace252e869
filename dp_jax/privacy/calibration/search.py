"""A bracketed search for where a falling epsilon meets its target, from the safe side."""

import dataclasses
import math
from collections.abc import Callable

# log(epsilon / target) of a fine answer must lie in [-_TOLERANCE, 0].
_TOLERANCE = 2e-5
_ROUGH_TOLERANCE = 2e-3
_LAST_RESORT = 1e-3
_LONGEST_STEP = math.log(8.0)
_MAX_CALLS = 80
# Where the value jumps over the target, points this close together are close enough.
_NARROWEST = 1e-7


@dataclasses.dataclass(frozen=True)
class Point:
  """An evaluated point: `value` = log(epsilon / target), infinite at either end."""

  at: float
  value: float


class SearchError(Exception):
  """The target is out of reach between the limits, or the value jumps over it.

  Attributes:
    nearest: the closest point; where the value jumps, the last on the safe side.
    jump: whether it jumps.
  """

  def __init__(self, nearest: Point, jump: bool = False):
    super().__init__(f"no point meets the target; nearest {nearest}")
    self.nearest = nearest
    self.jump = jump


Between = Callable[[float, float, float], float | None]


def between(low: float, high: float, at: float) -> float | None:
  """Returns `at`, or the middle if `at` is not strictly inside, or None if nothing is."""
  if math.isfinite(high - low) and high - low <= _NARROWEST * max(1.0, abs(high)):
    return None
  return at if low < at < high else (low + high) / 2


def meet(
  rough: Callable[[float], float],
  fine: Callable[[float], float],
  start: float,
  limits: tuple[float, float],
  inside: Between = between,
) -> float:
  """Returns a point where `fine` is at most 0, and within 2e-5 of it where it can be.

  Args:
    rough: at -> log(epsilon / target), falling in `at`; a cheap approximation.
    fine: the same, exactly; it alone decides.
    start: where to begin.
    limits: the range of `at`.
    inside: (low, high, at) -> a point strictly between low and high, near `at`, or
      None if there is none: where only some points exist, such as whole steps.

  Raises:
    SearchError: if the target is not met at the upper limit, or already met by more than
      1e-3 at the lower one; with every point allowed, also if the value jumps from more than
      1e-3 below the target to above it.
  """
  bracket = _Bracket(limits, inside, slope=-1.5)
  near = bracket.clip(start)
  for _ in range(_MAX_CALLS):
    bracket.add(Point(near, rough(near)))
    candidate = bracket.next(aim=0.0)
    if abs(bracket.last.value) <= _ROUGH_TOLERANCE or candidate is None:
      break
    if bracket.width <= _ROUGH_TOLERANCE:
      break
    near = candidate
  found = _settle(fine, near, _Bracket(limits, inside, bracket.slope))
  if inside is between and found.value < -_LAST_RESORT:
    raise SearchError(found, jump=True)
  return found.at


def _settle(fine: Callable[[float], float], near: float, bracket: "_Bracket") -> Point:
  at = near
  for _ in range(_MAX_CALLS):
    bracket.add(Point(at, fine(at)))
    good = bracket.good
    candidate = bracket.next(aim=-_TOLERANCE / 4)
    if candidate is None or (good is not None and good.value >= -_TOLERANCE):
      break
    at = candidate
  good = bracket.good
  if good is None:
    raise SearchError(bracket.last)
  if bracket.bad is None and good.value < -_LAST_RESORT:
    raise SearchError(good)
  return good


class _Bracket:
  """The tightest known points on either side of the target, and where to look next."""

  def __init__(self, limits: tuple[float, float], inside: Between, slope: float):
    self._limits = limits
    self._inside = inside
    self.slope = slope
    self.good: Point | None = None  # value <= 0: meets the target
    self.bad: Point | None = None  # value > 0
    self.last = Point(math.nan, math.nan)
    self._same_side = 0
    self._widths: list[float] = []

  @property
  def width(self) -> float:
    """How far apart the two sides are; infinite until both are known."""
    return math.inf if self.good is None or self.bad is None else self.good.at - self.bad.at

  def clip(self, at: float) -> float:
    return min(max(at, self._limits[0]), self._limits[1])

  def add(self, point: Point) -> None:
    before, self.last = self.last, point
    if point.at != before.at:
      slope = (point.value - before.value) / (point.at - before.at)
      if math.isfinite(slope) and slope < 0:
        self.slope = slope
    meets = point.value <= 0
    self._same_side = self._same_side + 1 if meets == (before.value <= 0) else 0
    if meets and (self.good is None or point.at < self.good.at):
      self.good = point
    elif not meets and (self.bad is None or point.at > self.bad.at):
      self.bad = point

  def next(self, aim: float) -> float | None:
    """Returns the next point, where the value should be about `aim`, or None if none is left."""
    if math.isfinite(self.last.value):
      move = min(max((aim - self.last.value) / self.slope, -_LONGEST_STEP), _LONGEST_STEP)
    else:
      move = math.copysign(_LONGEST_STEP, self.last.value)
    at = self.clip(self.last.at + move)
    if self.good is not None and self.bad is not None:
      # Where the line keeps landing on one side, or just inside either end, halve instead.
      self._widths.append(self.width)
      slow = len(self._widths) > 2 and self.width > self._widths[-3] / 2
      if self._same_side >= 3 or slow:
        at = (self.good.at + self.bad.at) / 2
      return self._inside(self.bad.at, self.good.at, at)
    beyond = (-math.inf, self.good.at) if self.good is not None else (self.last.at, math.inf)
    # Outwards to a limit, which is itself still to be tried.
    return self._inside(beyond[0], beyond[1], at) if at != self.last.at else None
