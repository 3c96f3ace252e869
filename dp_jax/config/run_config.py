"""The configuration of a run: one frozen dataclass a section, and an unknown key is an error."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dp_jax.config.data_config import DataConfig, data_checks
from dp_jax.config.facts import FactsConfig
from dp_jax.config.sections import LEFT_OUT, from_mapping, plain
from dp_jax.config.solver_config import SolverConfig, solver_checks
from dp_jax.errors import UserError
from dp_jax.files.code import Arguments
from dp_jax.gradients.clipping import MEMORY_BUDGET
from dp_jax.models.build import MODELS
from dp_jax.privacy.sampling.schemes import names as scheme_names
from dp_jax.privacy.spec import AccountantName, Adjacency

# K where units are people and the configuration does not say.
DEFAULT_RECORDS_PER_UNIT = 8


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The model.

  Attributes:
    name: a model of dp_jax.models.build, or "package.module:function" of your own, which gets the
      kwargs, and of rngs, dtype and the facts of the task (num_classes, input_shape) those that its
      signature names; it returns an `nnx.Module`.
    kwargs: its sizes: keyword arguments of its constructor; left out, its own defaults. One that
      it does not have is refused.
    weights: a safetensors file of public weights to start from.
    trainable: a regular expression on parameter names; what it does not match is frozen.
    head_init_std: standard deviation of the head's initial kernel (0 allowed; bias zero); None
      keeps the loaded weights, or the usual initialisation.
  """

  name: str = "convnet"
  kwargs: Mapping[str, Any] = dataclasses.field(
    default_factory=Arguments, metadata={LEFT_OUT: True}
  )
  weights: str | None = None
  trainable: str = ".*"
  head_init_std: float | None = None


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """What a model is trained for.

  Attributes:
    name: a key of dp_jax.tasks.opening.TASKS (one class a record, or several labels of yes or no),
      auto (by the labels of the source), or "package.module:Class" of your own
      (`dp_jax.tasks.task.Task`).
    kwargs: its settings. Of those in TASKS: link, softmax or sigmoid (the sum of a binary loss for
      each class), and label_smoothing, the share of a label that is spread evenly over all classes.
  """

  name: str = "auto"
  kwargs: Mapping[str, Any] = dataclasses.field(
    default_factory=Arguments, metadata={LEFT_OUT: True}
  )


@dataclasses.dataclass(frozen=True)
class PrivacyConfig:
  """The guarantee, and the mechanism that gives it.

  Attributes:
    enabled: False trains the same thing without clipping, noise or guarantee.
    epsilon, delta: the target.
    unit: what one guarantee protects: "record", or all records that have the same value in the
      column of this name ("patient_id").
    adjacency: zero_out, replace_one or add_or_remove_one.
    accountant: auto, pld, rdp or analytic_gaussian.
    sampling: the name of a scheme of dp_jax.privacy.sampling: poisson, full_batch, fixed_size, ...
    sampling_rate, expected_batch_size: one of them for poisson; add_or_remove_one needs both, as
      neither may then be derived from the data.
    cap: the most units of a batch under truncated_poisson.
    clipping: flat, or automatic, which normalises every unit's gradient to about clip_norm.
    clip_norm: the bound C on a unit's gradient.
    hyperparameter_selection: how they were chosen, in a sentence without a full stop, for the
      statement; None says that it is not recorded.
  """

  enabled: bool = True
  epsilon: float | None = None
  delta: float | None = None
  unit: str = "record"
  adjacency: Adjacency = "zero_out"
  accountant: AccountantName = "auto"
  sampling: str = "poisson"
  sampling_rate: float | None = None
  expected_batch_size: float | None = None
  cap: int | None = None
  clipping: Literal["flat", "automatic"] = "flat"
  clip_norm: float = 1.0
  hyperparameter_selection: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The optimisation.

  Attributes:
    steps, epochs: one of them; an epoch is 1 / sampling_rate steps.
    optimizer: sgd (Nesterov momentum), adam or lamb.
    learning_rate: the peak rate.
    momentum: of sgd.
    schedule: constant or cosine (to zero), after a linear warm-up.
    warmup_steps: length of the warm-up.
    weight_decay: decoupled, applied after the noise, outside the clipped loss.
    ema: decay of the exponential moving average of parameters that is released; 0 releases the
      last ones.
    engine: passed to `clipped_grad`.
    microbatch_size: units per device call; changes memory and speed, not the result.
    tensorboard: write event files for TensorBoard, under private/ unless the data is public.
    memory_budget: bytes of per-unit gradients that the ghost engine may keep at a time.
    compute_dtype: of activations and their gradients, float32 or bfloat16. Parameters, norms, sums
      and what is released are float32 under both.
  """

  steps: int | None = None
  epochs: float | None = None
  optimizer: Literal["sgd", "adam", "lamb"] = "sgd"
  learning_rate: float = 0.1
  momentum: float = 0.9
  schedule: Literal["constant", "cosine"] = "constant"
  warmup_steps: int = 0
  weight_decay: float = 0.0
  ema: float = 0.0
  engine: Literal["auto", "vmap", "ghost", "loop"] = "auto"
  microbatch_size: int = 128
  tensorboard: bool = False
  memory_budget: int = MEMORY_BUDGET
  compute_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on data.eval_split.

  Attributes:
    every: evaluate each so many steps; 0 means at the end only.
    microbatch_size: records per device call.
  """

  every: int = 0
  microbatch_size: int = 512


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Checkpoints, from which the same command goes on after a crash.

  Attributes:
    every: save each so many steps.
    keep: how many to keep.
    best_metric: release the parameters of the evaluation (each eval.every steps, and the last) that
      was best by this metric, in place of the last ones. For public data only: elsewhere the choice
      tells of the evaluation data. The statement is of all planned steps under both.
  """

  every: int = 50
  keep: int = 2
  best_metric: str | None = None


@dataclasses.dataclass(frozen=True)
class Config:
  """A run.

  Attributes:
    facts: what is true of one data set, and not of others that this configuration is used for.
    mesh: how the devices share the work, "data:4,fsdp:2": units are spread over all of them, and
      parameters cut along fsdp. -1 stands for the devices that are left. It changes no result but
      by rounding.
    seed: initialises the model only; it has no part in sampling or noise.
  """

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
  privacy: PrivacyConfig = dataclasses.field(default_factory=PrivacyConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  solver: SolverConfig = dataclasses.field(default_factory=SolverConfig)
  eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  facts: FactsConfig = dataclasses.field(default_factory=FactsConfig)
  mesh: str = "data:-1"
  seed: int = 0

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "Config":
    """Builds and checks a configuration from nested dictionaries.

    Raises:
      ValueError: for an unknown key, a value of the wrong type or out of range; names the key.
    """
    config = _with_facts(from_mapping(cls, values, "config"), values)
    config.data.refuse_others(values.get("data", {}))
    _check(config)
    return config

  def to_dict(self) -> dict[str, Any]:
    """Nested dictionaries, with lists for tuples, as they are read back from JSON.

    Facts are left out: where they hold, they stand in the sections that they are about.
    """
    content = plain(dataclasses.asdict(self) | {"data": self.data.to_dict()})
    del content["facts"]
    return content

  @property
  def max_records_per_unit(self) -> int:
    """K: what data.max_records_per_unit says, or its default for the kind of unit."""
    default = 1 if self.privacy.unit == "record" else DEFAULT_RECORDS_PER_UNIT
    declared = self.data.max_records_per_unit
    return default if declared is None else declared


def _with_facts(config: Config, given: Mapping[str, Any]) -> Config:
  """The facts of the configuration in their places, where nothing else was given for these."""
  facts, data, privacy = config.facts, config.data, config.privacy
  if given.get("data", {}).get("declared") is None:
    data = dataclasses.replace(data, declared=facts.declared_of(data))
  chosen = privacy.hyperparameter_selection
  if chosen is None and facts.hyperparameter_selection is not None and facts.hold(data):
    chosen = facts.hyperparameter_selection
  privacy = dataclasses.replace(privacy, hyperparameter_selection=chosen)
  return dataclasses.replace(config, data=data, privacy=privacy, facts=FactsConfig())


def _at_least_one(value: Any) -> bool:
  """Of numbers that are sizes."""
  values = value if isinstance(value, tuple) else (value,)
  return all(isinstance(each, bool | str) or each >= 1 for each in values)


def _within_float32(values: tuple[float, ...] | None) -> bool:
  return all(abs(value) <= 1e30 for value in values or ())


def _check(config: Config) -> None:
  """Ranges that the types do not say. What privacy must satisfy is checked by dp_jax.privacy."""
  train, positive = config.train, "must be at least 1"
  if (train.steps is None) == (train.epochs is None):
    raise UserError(
      f"train.steps={train.steps} and train.epochs={train.epochs}: set exactly one of them; what a"
      " file sets is unset by --config.train.steps=none."
    )
  schemes = scheme_names()
  checks = [
    (config.privacy.sampling in schemes, "privacy.sampling", config.privacy.sampling,
     f"is not one of {', '.join(schemes)}"),
    (train.steps is None or train.steps >= 1, "train.steps", train.steps, positive),
    (train.epochs is None or train.epochs > 0, "train.epochs", train.epochs, "must be positive"),
    (train.learning_rate > 0, "train.learning_rate", train.learning_rate, "must be positive"),
    (0 <= train.momentum < 1, "train.momentum", train.momentum, "must be in [0, 1)"),
    (train.momentum == TrainConfig.momentum or train.optimizer == "sgd", "train.momentum",
     train.momentum, f"is of sgd, and train.optimizer={train.optimizer!r} does not use it: leave it"
     " out"),
    (0 <= train.ema < 1, "train.ema", train.ema, "must be in [0, 1)"),
    (train.weight_decay >= 0, "train.weight_decay", train.weight_decay, "must not be negative"),
    (train.warmup_steps >= 0, "train.warmup_steps", train.warmup_steps, "must not be negative"),
    (train.microbatch_size >= 1, "train.microbatch_size", train.microbatch_size, positive),
    (train.memory_budget >= 0, "train.memory_budget", train.memory_budget,
     "must not be negative"),
    (config.eval.every >= 0, "eval.every", config.eval.every, "must not be negative"),
    (config.eval.microbatch_size >= 1, "eval.microbatch_size", config.eval.microbatch_size,
     positive),
    (config.checkpoint.every >= 1, "checkpoint.every", config.checkpoint.every, positive),
    (config.checkpoint.keep >= 1, "checkpoint.keep", config.checkpoint.keep, positive),
    (0 <= config.seed < 2**31, "seed", config.seed, "must be in [0, 2^31)"),
    (0 <= config.data.seed < 2**31, "data.seed", config.data.seed, "must be in [0, 2^31)"),
    *((_at_least_one(value), f"model.kwargs.{name}", value, positive)
      for name, value in config.model.kwargs.items() if config.model.name in MODELS),
    (_within_float32(config.data.value_range), "data.value_range", config.data.value_range,
     "must lie between -1e30 and 1e30"),
    (_within_float32((train.learning_rate, config.model.head_init_std or 0)), "train.learning_rate",
     train.learning_rate, "and model.head_init_std must be below 1e30"),
    (1e-12 <= config.privacy.clip_norm <= 1e12, "privacy.clip_norm", config.privacy.clip_norm,
     "must be from 1e-12 to 1e12"),
    ((config.privacy.expected_batch_size or 1) >= 1e-9, "privacy.expected_batch_size",
     config.privacy.expected_batch_size, "must be at least 1e-9"),
    ((config.model.head_init_std or 0) >= 0, "model.head_init_std", config.model.head_init_std,
     "must not be negative"),
  ]  # fmt: skip
  for holds, name, value, what in [
    *checks,
    *data_checks(config.data, config.privacy.unit, config.max_records_per_unit),
    *solver_checks(config.solver, config),
  ]:
    if not holds:
      raise UserError(f"{name}={value!r} {what}.")
