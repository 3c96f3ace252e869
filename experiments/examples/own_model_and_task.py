"""A model and a task of one's own, named in a configuration.

  python -m dp_jax train --config=experiments/examples/own_model_and_task.py --workdir=runs/parity

Seconds on 2 CPU cores. The task: is a digit odd? With a hinge loss. To evaluate the release, which
runs this file: python -m dp_jax evaluate runs/parity/release --config=... --trust_code
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from dp_jax.config.files import base_config
from dp_jax.tasks.classification import Classification


class TwoLayers(nnx.Module):
  """What the trainer gives is taken by name: facts of the task, and rngs."""

  def __init__(self, *, input_shape: tuple[int, ...], width: int = 32, rngs: nnx.Rngs):
    self.hidden = nnx.Linear(input_shape[0] * input_shape[1], width, rngs=rngs)
    self.head = nnx.Linear(width, 2, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


class Odd(Classification):
  """Two classes, even and odd, of a record whose label is a digit."""

  def __init__(self, margin: float = 1.0):
    super().__init__((8, 8, 1), 10, (0.0, 16.0), tuple("0123456789"))
    object.__setattr__(self, "margin", margin)

  def record_losses(self, logits, unit):
    """Losses float32[K] of records, and bool[K], which of them count."""
    sign = jnp.where(unit["label"] % 2 == 1, 1.0, -1.0)
    gap = logits[:, 1] - logits[:, 0]
    return jnp.maximum(0.0, self.margin - sign * gap), unit["record_mask"]

  def rows(self, outputs, fields):
    """The columns of a table of predictions, [n] each."""
    return {"right": outputs[:, :2].argmax(axis=1) == fields["label"] % 2}

  def scalars(self, table):
    """Metrics by name."""
    right = table.columns["right"]
    return {"accuracy": float(right.mean()) if len(right) else None}

  def details(self, table):
    """The same: nothing here is drawn."""
    return self.scalars(table)


def get_config():
  config = base_config()
  config.data.source, config.data.declared = "digits", "public"
  config.model.name = "experiments.examples.own_model_and_task:TwoLayers"
  config.task.name = "experiments.examples.own_model_and_task:Odd"
  config.privacy.epsilon, config.privacy.delta, config.privacy.sampling_rate = 3.0, 1e-4, 0.2
  config.train.steps, config.train.learning_rate, config.mesh = 60, 0.5, "data:1"
  return config
