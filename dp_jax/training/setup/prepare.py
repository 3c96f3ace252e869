"""From a configuration to a run that is ready to start: all that can be refused is refused here."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dp_jax.config.run_config import Config, TrainConfig
from dp_jax.data.records import check_records
from dp_jax.data.units import UnitLoader
from dp_jax.data.views import Views
from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.engines.dispatch import engine_for
from dp_jax.gradients.noise.jax_keys import GENERATOR
from dp_jax.gradients.noise.transform import NO_NOISE, MakeNoise, Noise, independent
from dp_jax.gradients.optimizers import make_optimizer, make_schedule
from dp_jax.gradients.per_unit import check_loss
from dp_jax.models.functional import Arrays
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import Lineage
from dp_jax.parallel.mesh import build_mesh, one_device
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.shares import joint
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.statement.privacy_json import delta_warnings
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.opening import SHAPES, open_task
from dp_jax.training import tensorboard
from dp_jax.training.setup.first_records import FACT, check_first_records
from dp_jax.training.setup.given import NOTHING, Given, code_of, program_digest
from dp_jax.training.setup.model_setup import build_model, in_compute_dtype, model_spec
from dp_jax.training.setup.open_data import (
  check_held_out,
  data_facts,
  id_warnings,
  is_strict,
  open_split,
  split_warnings,
  training_units,
  units_digest,
)
from dp_jax.training.setup.provenance import ancestry, exposure_warnings, weights_warnings
from dp_jax.training.setup.public_features import PublicFeatures, read_public_features
from dp_jax.training.setup.reading import starting_warnings
from dp_jax.training.setup.selection import check_selection
from dp_jax.training.setup.target import make_mechanism, make_spec
from dp_jax.training.solving import Solving, check_features, make_solving


@dataclasses.dataclass(frozen=True)
class Run:
  """A run before its first step. Everything in it is public, but for what the loaders read.

  Attributes:
    config: the configuration.
    mesh: the devices of the run.
    task: the loss of a unit as it is, computed as train.compute_dtype says.
    views: what a step sees of each record; evaluation sees the record itself.
    released: the predictions of the released model, computed in float32.
    params, frozen: initial trained parameters, and those that stay.
    loader, eval_loader: units of the training and evaluation splits.
    privacy: the target, or None without privacy.
    mechanism: what is run and accounted; its noise is zero without privacy. Of a solver it is the
      one release that all of its releases amount to.
    solving: the solver that takes the place of the training loop, or None.
    public_features: what solver.public_features names, or None.
    noise: what a step adds to its sum, from its stddev. No configuration names another: the
      accountant knows independent noise alone.
    optimizer: of the noised mean gradient.
    expected_batch_size: the public divisor.
    weights_digest: sha256 of the weights that the run starts from, or None.
    weights_warnings: what the statement must say of them.
    ancestry: these weights and all that are behind them, for the header of what the run writes.
    code: what the run uses that is not built in: names and hashes.
    data_digest: of the records; not public.
    units_digest: sha256 of the public list of units, or None.
    public_facts: what is treated as public, for the statement.
    warnings: for statement and report.
  """

  config: Config
  mesh: Mesh
  task: BoundTask
  views: Views
  released: BoundTask
  params: Arrays
  frozen: Arrays
  loader: UnitLoader
  eval_loader: UnitLoader
  privacy: PrivacySpec | None
  mechanism: Mechanism
  optimizer: optax.GradientTransformation
  expected_batch_size: float
  weights_digest: str | None
  weights_warnings: tuple[str, ...]
  data_digest: str
  units_digest: str | None
  public_facts: dict[str, Any]
  warnings: tuple[str, ...]
  ancestry: Lineage
  code: dict[str, Any]
  solving: Solving | None = None
  public_features: PublicFeatures | None = None
  noise: MakeNoise = independent

  @property
  def step_noise(self) -> Noise:
    """What a step adds to its sum."""
    steps = self.privacy is not None and self.solving is None
    return self.noise(self.mechanism.stddev) if steps else NO_NOISE

  @property
  def releases(self) -> Mapping[str, Mechanism]:
    """What is released, by purpose, as the ledger holds it."""
    return {"training": self.mechanism} if self.solving is None else self.solving.mechanisms

  def loss(self, frozen: Arrays, params: Arrays, unit: Any, key: Any) -> jax.Array:
    """The loss of one unit that a step takes the gradient of: the mean over records and views."""
    return self.task.loss(frozen, params, self.views.expand(unit, key), key)

  def fingerprint(self) -> dict[str, Any]:
    """What must be the same when the run goes on after a crash."""
    arrays = {**self.params, **self.frozen}
    spec = dataclasses.replace(self.task.spec, reading={})  # the configuration says it
    content = {
      **self.config.to_dict(),
      "mechanism": self.mechanism.to_dict(),
      "releases": {purpose: each.to_dict() for purpose, each in self.releases.items()},
      "expected_batch_size": self.expected_batch_size,
      "data_digest": self.data_digest,
      "weights_digest": self.weights_digest,
      "units_digest": self.units_digest,
      "public_features_digest": self.public_features and self.public_features.digest,
      # Values too: frozen arrays are made anew by each process, and are not in the checkpoint.
      "model_digest": hashlib.sha256(weights.to_bytes(arrays, spec)).hexdigest(),
      "model_arrays": {name: [str(x.dtype), *x.shape] for name, x in arrays.items()},
      "trained": sorted(self.params),
    }
    if self.code:
      content["code"] = self.code
    if self.noise is not independent:
      noise, key = self.step_noise, jax.random.key(0, impl=GENERATOR)
      args = (pairs.zeros_like(self.params), noise.init(self.params), key)
      content["noise"] = program_digest(noise.update, *args)
    # That of model.weights is in their digest.
    behind_features = self.loader.source.info.origin.get("weights_ancestry")
    if behind_features is not None:
      content["features_ancestry"] = behind_features
    if self.mechanism.adjacency != "add_or_remove_one":  # else the number is secret
      content["num_units"] = self.loader.num_units
    if self.config.checkpoint.best_metric is not None:  # which compares evaluations
      content["held_out_digest"] = self.eval_loader.source.fingerprint()
    return content


def prepare(config: Config, given: Given = NOTHING) -> Run:
  """Opens the data, builds the model and calibrates the mechanism.

  Args:
    config: of the run.
    given: objects in the place of what it names.

  Raises:
    ValueError: for anything about the configuration that cannot be run or guaranteed.
  """
  if config.train.tensorboard:
    tensorboard.check_available()
  if config.solver.method != "none" and jax.process_count() > 1:
    raise UserError(
      f"solver.method={config.solver.method!r} is one pass on one device: start one process."
    )
  mesh = build_mesh(config.mesh) if config.solver.method == "none" else one_device()
  data = config.data
  source = open_split(config, data.train_split, given=given.source)
  eval_source = open_split(
    config, data.eval_split, given=given.eval_source, class_names=source.info.class_names or None
  )
  if data.value_range is None and eval_source.info.value_range != source.info.value_range:
    raise UserError(
      f"the splits have different value ranges, {source.info.value_range} and"
      f" {eval_source.info.value_range}: declare data.value_range."
    )
  declared = {name: getattr(data, name) for name in SHAPES}
  task, facts, assumed = open_task(
    given.task or config.task.name, config.task.kwargs, source.info, declared
  )
  loader = training_units(config, source, task.record)
  eval_loader = UnitLoader(eval_source, task.record, strict=is_strict(data))  # one record each
  check_held_out(config, source, eval_source)
  _check_records(config, loader, eval_loader)
  views = Views(data.augment, data.views, data.min_crop_area)
  views.check(task.record)
  solving, public = None, None
  if config.solver.method != "none":
    features = check_features(task)
    public = read_public_features(config, features, (source, eval_source))
    statistics = None if public is None else public.statistics
    solving = make_solving(config, make_spec(config), loader.num_units, features, statistics)
  spec = model_spec(config, facts, source, solving, given.model is not None)
  check_selection(config, task)
  released, params, frozen, weights_digest = build_model(config, task, spec, given.model)
  bound = in_compute_dtype(released, config)
  code = code_of(config, given, bound, params, frozen, config.max_records_per_unit)
  if solving is None:
    privacy, mechanism = make_mechanism(config, loader.num_units)
  else:
    privacy, mechanism = make_spec(config), joint(tuple(solving.mechanisms.values()))
    if not config.privacy.enabled:
      privacy, mechanism = None, dataclasses.replace(mechanism, noise_multiplier=0.0)
  divisor = mechanism.expected_batch_size(loader.num_units)
  behind = ancestry(config, source, public)
  warnings = (
    *_warnings(privacy, mechanism, divisor), *split_warnings(config, source, eval_source),
    *exposure_warnings(config, behind),
    *id_warnings(config, loader),
    *starting_warnings(config, source),
  )  # fmt: skip
  run = Run(
    config, mesh, bound, views, released, params, frozen, loader, eval_loader, privacy, mechanism,
    _optimizer(config.train, mechanism.steps) if solving is None else optax.identity(), divisor,
    weights_digest, weights_warnings(config, source, public), source.fingerprint(),
    units_digest(data),
    {**spec.task, "taken_from_the_source": assumed, "first_records": FACT,
     **({"code": code} if code else {}),
     **data_facts(config, loader), **_of_public(public)}, warnings,
    behind, code, solving, public,
  )  # fmt: skip
  if solving is None:
    _check_units_apart(run)
  return run


def _check_records(config: Config, loader: UnitLoader, eval_loader: UnitLoader) -> None:
  """Refuses malformed records where that is asked for, and data of which nothing can be used.

  On public data large ones are read in full before the budget is reserved, not here.
  """
  data = config.data
  for key, split_loader in (("train_split", loader), ("eval_split", eval_loader)):
    if is_strict(data) and not split_loader.source_info.read_on_demand:
      shown = data.declared == "public"
      check_records(split_loader.source, split_loader.spec, show=shown)
    split = f"data.{key}={getattr(data, key)!r}"
    check_first_records(split_loader, split, private=data.declared != "public")


def _check_units_apart(run: Run) -> None:
  """Refuses, before anything is written, a loss through which units would see each other."""
  units = run.task.made_up_units(1, run.loader.max_records_per_unit)
  unit = jax.tree.map(lambda x: x[0], units)
  key = jax.random.key(0, impl=GENERATOR)
  no_map = check_loss(functools.partial(run.loss, run.frozen), run.params, unit, key)
  if run.privacy is not None:
    engine_for(run.config.train.engine, no_map)


def _optimizer(train: TrainConfig, steps: int) -> optax.GradientTransformation:
  schedule = make_schedule(train.schedule, train.learning_rate, train.warmup_steps, steps)
  return make_optimizer(
    train.optimizer, schedule, momentum=train.momentum, weight_decay=train.weight_decay
  )


def _warnings(privacy: PrivacySpec | None, mechanism: Mechanism, divisor: float) -> tuple[str, ...]:
  if privacy is None:
    return ()
  # From rate and divisor, which are public under every adjacency; the number of units may not be.
  return tuple(delta_warnings(privacy.delta, round(divisor / mechanism.sampling.sampling_rate)))


def _of_public(features: PublicFeatures | None) -> dict[str, str]:
  return {} if features is None else {"public_features": features.fact}
