"""Refusal of models for which a per-example gradient does not exist, before anything is trained."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen, nnx

from dp_jax.errors import UserError
from dp_jax.gradients.per_unit import unbound_axis
from dp_jax.models.functional import Arrays, changed_state


def check_model(model: Any, arrays: Arrays, forward: Callable[[Any], Any]) -> None:
  """Refuses operations across examples and forward passes that change the model's state.

  Args:
    model: the structure.
    arrays: all arrays of the model, by name.
    forward: calls the module on one example; it is traced, not run.

  Raises:
    ValueError: naming the module, if it is a BatchNorm in training mode, or if the forward pass
      writes to variables that are not parameters (running statistics, spectral normalisation); or
      naming the axis of a collective.
  """
  key = jax.random.key(0) if model.random else None
  if isinstance(whole := model.bind(arrays, key), nnx.Module):
    check_modules(whole)
  changed: list[str] = []

  def trace(values: Arrays) -> None:
    bound = model.bind(values, key)
    forward(bound)
    if isinstance(bound, nnx.Module):
      changed.extend(changed_state(bound, values))

  try:
    with refused_batch_norm():
      jax.eval_shape(trace, arrays)
  except NameError as error:
    raise UserError(unbound_axis(error)) from error
  if changed:
    raise UserError(
      f"the forward pass changes the state {', '.join(changed)} (running statistics or spectral"
      " normalisation): such updates see the data without clipping or noise. Freeze them or use a"
      " layer without state."
    )


def check_modules(module: nnx.Module) -> None:
  """Refuses a module that has a BatchNorm in training mode among its parts.

  Raises:
    ValueError: naming it.
  """
  for path, part in nnx.iter_modules(module):
    if isinstance(part, nnx.BatchNorm) and not part.use_running_average:
      raise UserError(mixes_examples(".".join(map(str, path)) or type(part).__name__))


def mixes_examples(name: str) -> str:
  """What to say of a BatchNorm in training mode."""
  return (
    f"module {name!r} is a BatchNorm in training mode: it mixes the examples of a batch, so a"
    " per-example gradient does not exist. Use GroupNorm or LayerNorm, or frozen statistics"
    " (use_running_average=True)."
  )


@contextlib.contextmanager
def refused_batch_norm() -> Iterator[None]:
  """Within it, calling a BatchNorm in training mode is an error, wherever it was made."""
  original = nnx.BatchNorm.__call__

  @functools.wraps(original)
  def refused(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    frozen = given.get("use_running_average")
    if not (self.use_running_average if frozen is None else frozen):
      raise UserError(mixes_examples(f"{type(self).__name__} of {self.num_features} features"))
    return original(self, *args, **kwargs)

  def linen_method(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    part = context.module
    if isinstance(part, linen.BatchNorm) and context.method_name == "__call__":
      given = inspect.signature(type(part).__call__).bind(part, *args, **kwargs).arguments
      frozen = given.get("use_running_average")
      if not (part.use_running_average if frozen is None else frozen):
        raise UserError(mixes_examples(".".join(part.path) or type(part).__name__))
    return call(*args, **kwargs)

  nnx.BatchNorm.__call__ = refused  # type: ignore[method-assign]
  try:
    # Another precision than that of the user, so that what has been traced before is traced anew.
    with linen.intercept_methods(linen_method), jax.default_matmul_precision("tensorfloat32"):
      yield
  finally:
    nnx.BatchNorm.__call__ = original  # type: ignore[method-assign]
