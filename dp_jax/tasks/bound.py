"""A task and the structure of a model as functions of arrays: what is trained and released."""

import dataclasses
from typing import Any

import jax

from dp_jax.errors import UserError
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays
from dp_jax.models.inspect import check_model
from dp_jax.models.opening import Structure
from dp_jax.tasks.task import Task, Unit


@dataclasses.dataclass(frozen=True)
class BoundTask:
  """A task on a model.

  Attributes:
    model: the structure.
    task: what it is trained for.
    spec: what rebuilds and feeds it.
  """

  model: Structure
  task: Task
  spec: ModelSpec

  def loss(self, frozen: Arrays, params: Arrays, unit: Unit, key: Any) -> jax.Array:
    """The loss of one unit: float32[]. A unit without real records has loss and gradient zero."""
    return self.task.loss(self.model.bind({**params, **frozen}, key), unit, key)

  def losses(self, frozen: Arrays, params: Arrays, units: Unit, keys: Any) -> jax.Array:
    """Losses of a batch of units, float32[B]: the vmap of `loss`, by definition."""
    in_axes = (None, None, 0, None if keys is None else 0)
    return jax.vmap(self.loss, in_axes)(frozen, params, units, keys)

  def predict(self, arrays: Arrays, inputs: jax.Array) -> jax.Array:
    """Rows of predictions of raw inputs [n, ...]."""
    return self.task.predict(self.model.bind(arrays), inputs)

  def evaluated(self, arrays: Arrays, inputs: jax.Array) -> jax.Array:
    """What an evaluation takes, of raw inputs [n, ...]."""
    return self.task.evaluated(self.model.bind(arrays), inputs)

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units that hold nothing of the data: [count, K, ...]."""
    return self.task.made_up_units(count, max_records_per_unit)

  def check(self, arrays: Arrays) -> None:
    """Refuses a model for which the loss of one unit is not defined by that unit alone."""
    unit = jax.tree.map(lambda x: x[0], self.made_up_units(1, 1))
    check_model(self.model, arrays, lambda module: self.task.loss(module, unit, None))

  def check_inputs(self, inputs: Any) -> None:
    """Refuses inputs that are not of the shape that the task declares.

    Raises:
      ValueError: naming both shapes.
    """
    field = dict(self.task.record.fields)["inputs"]
    if tuple(inputs.shape[1:]) != field.shape:
      raise UserError(f"inputs must be [N, *{field.shape}], got {inputs.shape}.")
