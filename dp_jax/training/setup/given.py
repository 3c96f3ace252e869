"""What is not built in: objects given to `train`, code that a configuration names, its record."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from dp_jax.config.run_config import Config, ModelConfig, TaskConfig
from dp_jax.files.code import described
from dp_jax.models.opening import GIVEN, ModelObject
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.task import Task


class Given(NamedTuple):
  """Objects in the place of what a configuration names; None for those that it does name.

  Attributes:
    model: as `dp_jax.models.opening.from_object` takes it.
    task: a `dp_jax.tasks.task.Task`.
    source, eval_source: the records of training and evaluation.
  """

  model: ModelObject | None = None
  task: Task | None = None
  source: Any = None
  eval_source: Any = None


NOTHING = Given()


def code_of(
  config: Config, given: Given, task: BoundTask, params: Mapping[str, Any], frozen: Any, size: int
) -> dict[str, Any]:
  """What a run used that is not built in, as JSON values; empty if nothing was.

  Args:
    config: what names the code.
    given: objects.
    task: of the run.
    params: trained arrays.
    frozen: the others.
    size: K, records of a unit.

  Returns:
    Of model, task and source what `described` says; of the loss of a unit and of what an evaluation
    computes, a hash of the program with its constants, in which every change to the code shows.
  """
  used: dict[str, Any] = {}
  for what, code in (
    ("model", _of_section(config.model)),
    ("task", _of_section(config.task)),
    ("source", config.data.options.code(config.data.source)),
  ):
    if getattr(given, what) is not None:
      used[what] = {"name": GIVEN, "type": _type_name(getattr(given, what))}
    elif code is not None:
      used[what] = code
  if not used:
    return {}
  unit = jax.tree.map(lambda x: x[0], task.made_up_units(1, size))
  key = jax.random.key(0, impl="threefry2x32")
  loss = program_digest(task.loss, frozen, params, unit, key)
  arrays = {**params, **frozen}
  return {
    **used,
    "loss_sha256": loss,
    "predict_sha256": program_digest(task.evaluated, arrays, unit["inputs"]),
  }


def _of_section(section: ModelConfig | TaskConfig) -> dict[str, Any] | None:
  """What is recorded of the code that a section names; None where it names none."""
  return described(section.name, section.kwargs) if ":" in section.name else None


def program_digest(function: Callable[..., Any], *arguments: Any) -> str:
  """SHA-256 of what a function computes: its jaxpr and all constants in it, to the bit."""
  digest = hashlib.sha256()
  closed = jax.make_jaxpr(function)(*arguments)
  # A function that is printed by its place in memory is another one in each process.
  digest.update(re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr)).encode())
  for constant in _constants(closed):
    array = np.asarray(constant)
    digest.update(f"{array.shape}{array.dtype.str}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def _constants(closed: ClosedJaxpr) -> list[Any]:
  """Those of a program and of all programs that it calls, in order."""
  found = [
    jax.random.key_data(c) if jnp.issubdtype(jnp.result_type(c), jax.dtypes.prng_key) else c
    for c in closed.consts
  ]
  return found + _of_parts(closed.jaxpr)


def _of_parts(jaxpr: Jaxpr) -> list[Any]:
  found = []
  for equation in jaxpr.eqns:
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
    ):
      if isinstance(value, ClosedJaxpr):
        found += _constants(value)
      elif isinstance(value, Jaxpr):
        found += _of_parts(value)
  return found


def _type_name(value: Any) -> str:
  values = value if isinstance(value, tuple) else (value,)
  return ", ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in values)
