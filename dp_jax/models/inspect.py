"""Refusal of models for which a per-example gradient does not exist, before anything is trained."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from dp_jax.errors import UserError
from dp_jax.gradients.per_unit import unbound_axis
from dp_jax.models.functional import Arrays, FunctionalModel, changed_state


def check_model(
  model: FunctionalModel, arrays: Arrays, forward: Callable[[nnx.Module], Any]
) -> None:
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
  check_modules(model.bind(arrays, key))
  changed: list[str] = []

  def trace(values: Arrays) -> None:
    bound = model.bind(values, key)
    forward(bound)
    changed.extend(changed_state(bound, values))

  try:
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
