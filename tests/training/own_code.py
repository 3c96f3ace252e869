"""A model, a task and a source of one's own, as a user has them outside the repository."""

SOURCE = '''"""Ages of people from two numbers: a model, a task and data of one's own."""

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np

from dp_jax.data.records import Numbers, RecordSpec
from dp_jax.tasks.task import BaseTask

SCALE = {scale}


class Model(nnx.Module):
  def __init__(self, *, hidden: int = 4, rngs: nnx.Rngs):
    self.inner = nnx.Linear(2, hidden, rngs=rngs)
    self.head = nnx.Linear(hidden, 1, rngs=rngs)

  def __call__(self, x):
    return SCALE * self.head(nnx.tanh(self.inner(x)))[:, 0]


class Regression(BaseTask):
  """The mean squared error of a unit's records."""

  def __init__(self, weight: float = 1.0):
    self.weight = weight
    self.record = RecordSpec((("inputs", Numbers((2,))), ("target", Numbers((), "float32"))))

  def loss(self, model, unit, key):
    x = jnp.where(unit["record_mask"][:, None], unit["inputs"], 0.0)
    error = jnp.where(unit["record_mask"], model(x) - unit["target"], 0.0)
    return self.weight * jnp.sum(error**2) / jnp.maximum(unit["record_mask"].sum(), 1)

  def predict(self, model, inputs):
    return model(inputs)

  def made_up_units(self, count, max_records_per_unit):
    rng, shape = np.random.default_rng(0), (count, max_records_per_unit)
    return {{
      "inputs": rng.normal(size=(*shape, 2)).astype(np.float32),
      "target": rng.normal(size=shape).astype(np.float32),
      "record_mask": np.ones(shape, bool),
    }}

  def rows(self, outputs, fields):
    return {{"error": np.abs(outputs - fields["target"])}}

  @property
  def metrics(self):
    return ("mean_absolute_error",)

  def scalars(self, table):
    error = table.columns["error"]
    return {{"mean_absolute_error": float(error.mean()) if len(error) else None}}


class People:
  """Records by index; two belong to each person."""

  def __init__(self, *, split: str, path: str | None, seed: int, count: int = 120):
    rng = np.random.default_rng([seed, split == "train"])
    self.x = rng.normal(size=(count, 2)).astype(np.float32)

  def __len__(self):
    return len(self.x)

  def __getitem__(self, index):
    x = self.x[index]
    return {{"inputs": x, "target": np.float32(x.sum()), "person": f"p{{index // 2}}"}}
'''

CONFIG = """from dp_jax.config.files import base_config


def get_config():
  config = base_config()
  config.data.source = "own:People"
  config.data.declared = "public"
  config.data.value_range = (-8.0, 8.0)
  config.data.max_records_per_unit = 2
  config.model.name = "own:Model"
  config.model.kwargs.hidden = 3
  config.task.name = "own:Regression"
  config.privacy.epsilon = 4.0
  config.privacy.delta = 1e-3
  config.privacy.unit = "person"
  config.privacy.sampling_rate = 0.3
  config.train.steps = 12
  config.train.learning_rate = 0.1
  config.train.microbatch_size = 32
  config.checkpoint.every = 2
  config.mesh = "data:1"
  return config
"""


def write(folder, scale=1.0):
  """The module own.py and its configuration own_config.py, in a folder."""
  (folder / "own.py").write_text(SOURCE.format(scale=scale))
  (folder / "own_config.py").write_text(CONFIG)
