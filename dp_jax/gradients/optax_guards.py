"""What may stand around a transform that adds noise, and what it may be given.

optax gives a transform no way to see what is around it, so the Python stack is asked. It holds
while `init` and `update` run or are traced, whatever is compiled.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import optax

from dp_jax.errors import UserError

PyTree = Any
Shapes = tuple[tuple[int, ...], ...]

# They hand on the sums of all parameters, once, and use what comes back alone.
_ALLOWED = frozenset({
  "chain", "named_chain", "with_extra_args_support", "inject_hyperparams",
  "inject_stateful_hyperparams", "lookahead", "schedule_free", "tree_map_params",
})  # fmt: skip
_ON_SUMS = frozenset({"MultiSteps", "flatten"})


def check_wrappers(start: str, *, sums: bool = True) -> None:
  """Refuses what would see the updates before the noise, or give them to it wrongly.

  Called by `init` and `update` of a transform; `start` is the text of the transform that chains
  should start with.

  Args:
    start: for the message.
    sums: whether the transform takes sums over units; those of several microbatches may be added,
      and their parameters joined. Per-example gradients may not.

  Raises:
    ValueError: naming the wrapper and the chain to make instead.
  """
  allowed = _ALLOWED | _ON_SUMS if sums else _ALLOWED
  for frame in _optax_frames():
    name = frame.f_code.co_qualname.split(".")[0]
    if name not in allowed:
      raise UserError(
        f"optax.{name} around a transform that adds noise sees the updates before the noise: it can"
        " hand them on, keep them, or decide by them. Put the noise first and wrap what follows:"
        f" optax.chain({start}, optax.{name}(...))."
      )
    if name == "MultiSteps":
      _check_multi_steps(frame.f_locals.get("self"))
    if name in ("chain", "named_chain") and frame.f_locals.get("new_state"):
      raise UserError(
        "the transform that adds noise must be the first of its chain: what comes before it would"
        f" change how far one unit moves the sum. Use optax.chain({start}, ...)."
      )
    if name == "lookahead" and _in_init_of_update(frame):
      raise UserError(
        "optax.lookahead with reset_state=True calls init again, which would repeat the noise:"
        " leave reset_state False."
      )


def check_injected() -> None:
  """Refuses hyperparameters that optax would keep in the state, as arrays that may change.

  Called where a transform is made.

  Raises:
    ValueError: naming the argument that keeps them out.
  """
  fixed = ("stddev", "key", "expected_batch_size", "l2_norm_clip", "noise_multiplier")
  for frame in _optax_frames():
    injected = frame.f_locals.get("hparams", ())
    if found := [name for name in fixed if name in injected]:
      raise UserError(
        f"{' and '.join(found)} must be fixed before the first step, and a key must not be kept"
        " twice: name all but what may change in optax.inject_hyperparams(..., static_args="
        "('stddev', 'key', 'expected_batch_size'))."
      )


def _in_init_of_update(frame: FrameType) -> bool:
  """Whether optax's frame is an update although `init` called `check_wrappers`."""
  caller = sys._getframe(2)
  return caller.f_code.co_name == "init" and frame.f_code.co_name.startswith("update")


def _optax_frames() -> Iterator[FrameType]:
  frame: FrameType | None = sys._getframe(1)
  while frame is not None:
    if frame.f_globals.get("__name__", "").split(".")[0] == "optax":
      yield frame
    frame = frame.f_back


def _check_multi_steps(wrapper: Any) -> None:
  """Sums are added up, all of them: a mean of k has 1 / k of the signal under the full noise."""
  if getattr(wrapper, "_use_grad_mean", True):
    raise UserError(
      "optax.MultiSteps takes the mean of the sums by default, and the noise does not shrink with"
      " it: use optax.MultiSteps(..., use_grad_mean=False)."
    )
  skip = getattr(wrapper, "_should_skip_update_fn", None)
  if not getattr(skip, "__qualname__", "").startswith("MultiSteps."):
    raise UserError(
      "should_skip_update_fn of optax.MultiSteps decides by sums that have no noise yet: leave it"
      " out. Units that are not finite count as zero already."
    )


def check_whole(tree: PyTree) -> None:
  """Refuses a tree of which optax has taken leaves out (masked, partition, multi_transform).

  Raises:
    ValueError: naming the chain to make instead.
  """
  nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
  if any(isinstance(x, optax.MaskedNode) for x in nodes):
    raise UserError(
      "some parameters are masked (optax.masked, partition, multi_transform, selective_transform):"
      " their gradients would pass without noise, or be clipped apart from the others. Clip and"
      " noise all of them first, and divide what follows: optax.chain(dp_jax.gaussian_noise(stddev,"
      " key), optax.scale(1 / expected_batch_size), optax.partition({...}, labels))."
    )


class ShapesSeen:
  """The shapes of the parameters that `init` was called with, for updates that come without them.

  Kept beside the state and not in it: all states of one transform are of the same model, and a
  state that was restored is checked against the parameters.
  """

  def __init__(self) -> None:
    self._seen: set[Shapes] = set()
    self._anything = False

  def remember(self, params: PyTree) -> None:
    if params is None:
      self._anything = True
    else:
      self._seen.add(shapes_of(params))

  def expected(self, params: PyTree) -> set[Shapes] | None:
    """The shapes that a sum may have; None if `init` was told that there are no parameters."""
    if params is not None:
      return {shapes_of(params)}
    return None if self._anything else self._seen


def shapes_of(tree: PyTree) -> Shapes:
  """The shape of each leaf."""
  return tuple(tuple(getattr(x, "shape", ())) for x in jax.tree.leaves(tree))
