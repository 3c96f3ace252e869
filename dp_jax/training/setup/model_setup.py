"""From a configuration to the model of a run: its description, structure and initial arrays."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.config.run_config import Config
from dp_jax.data.sources.source import Source
from dp_jax.errors import UserError
from dp_jax.files.code import described
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, partition, split
from dp_jax.models.opening import CODE, GIVEN, ModelObject, from_object, load_model
from dp_jax.models.pretrained import weights
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.task import Task
from dp_jax.training.setup.reading import reading_of
from dp_jax.training.solving import Solving


def model_spec(
  config: Config, facts: Mapping[str, Any], source: Source, solving: Solving | None, given: bool
) -> ModelSpec:
  """What rebuilds the model of a run, unless it was given, and how its inputs are read."""
  if given:
    return ModelSpec(GIVEN, {}, facts, reading_of(config, source))
  kwargs = config.model.kwargs if solving is None else solving.model_sizes()
  name = config.model.name
  if ":" in name:
    facts = {**facts, CODE: described(name, {})["sha256"]}
  return ModelSpec(name, kwargs, facts, reading_of(config, source))


def build_model(
  config: Config, task: Task, spec: ModelSpec, given: ModelObject | None = None
) -> tuple[BoundTask, Arrays, Arrays, str | None]:
  """The bound task, trained and frozen arrays, and the digest of the weights they come from.

  Raises:
    ValueError: if the model cannot be built, or the weights are not its own.
  """
  model = config.model
  if given is None:
    functional, arrays = load_model(spec, trust_code=True, seed=config.seed)
  else:
    functional, arrays = from_object(given, config.seed)
  digest = None
  if model.weights is not None:
    arrays, digest = weights.initialise_from(arrays, Path(model.weights))
  if model.head_init_std is not None:
    arrays = _initialise_head(arrays, model.head_init_std, config.seed)
  bound = BoundTask(functional, task, spec)
  bound.check(arrays)
  params, frozen = partition(functional, arrays, model.trainable)
  return bound, params, frozen, digest


def in_compute_dtype(task: BoundTask, config: Config) -> BoundTask:
  """The same task with a model that computes as train.compute_dtype says."""
  dtype = config.train.compute_dtype
  if dtype == "float32":
    return task
  if task.spec.name == GIVEN:
    raise UserError(
      f"train.compute_dtype={dtype!r} is for models that are built here: give one that computes so."
    )
  model, _ = split(task.spec.build(config.seed, dtype))
  return dataclasses.replace(task, model=model)


def _initialise_head(arrays: Arrays, std: float, seed: int) -> Arrays:
  """A new head: kernel of standard deviation `std`, bias zero. Initial values are not secret."""
  if "head.kernel" not in arrays:
    raise UserError(
      f"model.head_init_std={std} is for a model with a head.kernel; this one has"
      f" {', '.join(arrays)}: leave it out."
    )
  kernel = arrays["head.kernel"]
  key = jax.random.key(seed, impl="threefry2x32")
  values = std * jax.random.normal(key, kernel.shape, kernel.dtype)
  bias = {name: jnp.zeros_like(x) for name, x in arrays.items() if name == "head.bias"}
  return {**arrays, "head.kernel": values, **bias}
