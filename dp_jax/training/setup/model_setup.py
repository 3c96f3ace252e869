"""From a configuration to the model of a run: its description, structure and initial arrays."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from dp_jax.config.run_config import Config
from dp_jax.data.records import RecordSpec
from dp_jax.data.sources.source import Source
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, partition, split
from dp_jax.models.pretrained import weights
from dp_jax.tasks.build import build_task
from dp_jax.tasks.classification import Classification
from dp_jax.training.setup.reading import reading_of
from dp_jax.training.solving import Solving


def model_spec(
  config: Config, record: RecordSpec, source: Source, solving: Solving | None
) -> ModelSpec:
  """What rebuilds the model of a run, and how its inputs are read."""
  sizes = config.model.sizes() if solving is None else solving.model_sizes()
  return ModelSpec(
    config.model.name, sizes, record.input_shape, record.num_classes, record.value_range,
    tuple(source.info.class_names), record.multilabel, reading_of(config, source),
  )  # fmt: skip


def build_model(
  config: Config, spec: ModelSpec
) -> tuple[Classification, Arrays, Arrays, str | None]:
  """The task, trained and frozen arrays, and the digest of the weights they come from.

  Raises:
    ValueError: if the model cannot be built, or the weights are not its own.
  """
  model = config.model
  functional, arrays = split(spec.build(config.seed))
  digest = None
  if model.weights is not None:
    arrays, digest = weights.initialise_from(arrays, Path(model.weights))
  if model.head_init_std is not None:
    arrays = _initialise_head(arrays, model.head_init_std, config.seed)
  task = build_task(functional, spec, config.train.label_smoothing, config.train.loss)
  task.check(arrays)
  params, frozen = partition(functional, arrays, model.trainable)
  return task, params, frozen, digest


def in_compute_dtype(task: Classification, config: Config) -> Classification:
  """The same task with a model that computes as train.compute_dtype says."""
  dtype = config.train.compute_dtype
  if dtype == "float32":
    return task
  model, _ = split(task.spec.build(config.seed, dtype))
  return dataclasses.replace(task, model=model)


def _initialise_head(arrays: Arrays, std: float, seed: int) -> Arrays:
  """A new head: kernel of standard deviation `std`, bias zero. Initial values are not secret."""
  kernel = arrays["head.kernel"]
  key = jax.random.key(seed, impl="threefry2x32")
  values = std * jax.random.normal(key, kernel.shape, kernel.dtype)
  return {**arrays, "head.kernel": values, "head.bias": jnp.zeros_like(arrays["head.bias"])}
