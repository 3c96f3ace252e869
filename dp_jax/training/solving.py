"""A solver in place of the training loop: what it releases, and its one step."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dp_jax.config.run_config import Config
from dp_jax.data.pipeline import in_order
from dp_jax.data.records import RecordSpec
from dp_jax.data.units import UnitLoader
from dp_jax.errors import UserError
from dp_jax.gradients.noise.add_noise import check_stddev
from dp_jax.models.feature_head import Blocks, check_blocks
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.choice import choose
from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.feature_units import FeatureData, Shard
from dp_jax.solvers.head import Preprocessing, PublicStatistics
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.noised import Releases
from dp_jax.solvers.solve import Method, plan
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.task import Task
from dp_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Solving:
  """What a run solves.

  Attributes:
    method: the solver.
    mechanisms: what it releases, by purpose.
    num_classes: C.
    noised: whether there is noise on it; without, there is no guarantee.
  """

  method: Method
  mechanisms: Mapping[str, Mechanism]
  num_classes: int
  noised: bool = True

  def model_sizes(self) -> dict[str, object]:
    """The sizes of the feature_head that the method fits."""
    method, before = self.method, self.method.preprocessing
    public = before.public is not None
    transformed = (
      isinstance(method, FeatureCovariance)
      and method.whiten > 0
      and (public or method.moment_share > 0)
    )
    centred = public or before.centre_share > 0
    blocks = {"blocks": before.blocks} if before.blocks else {}
    return {"power": before.power, "centred": centred, "transformed": transformed, **blocks}


class Features(NamedTuple):
  """What a solver has to know of records: one class each, and a vector of features."""

  num_features: int
  num_classes: int
  record: RecordSpec


def check_features(task: Task) -> Features:
  """Refuses a task that is not one class a record, of features as they are."""
  if type(task) is not Classification:
    raise UserError(
      "a solver fits one class a record, but these records have several labels, or a task of"
      " another kind."
    )
  if tuple(task.value_range) != (-1, 1):
    raise UserError(
      f"a solver takes features as they are, not of the range {task.value_range}: set"
      " data.value_range to (-1, 1)."
    )
  shape = dict(task.record.fields)["inputs"].shape
  if len(shape) != 1:
    raise UserError(f"a solver takes vectors, not inputs of shape {shape}.")
  return Features(shape[0], task.num_classes, task.record)


def make_solving(
  config: Config, spec: PrivacySpec, num_units: int, features: Features,
  public: PublicStatistics | None = None,
) -> Solving:  # fmt: skip
  """The solver of a configuration, with its releases calibrated to the target.

  Args:
    config: of the run.
    spec: the target.
    num_units: N.
    features: how many, and how many classes.
    public: of solver.public_features.

  Raises:
    ValueError: if the shares leave nothing for a release, or the target cannot be met.
  """
  secret = spec.adjacency == "add_or_remove_one"
  declared = config.privacy.expected_batch_size
  if secret and declared is None:
    raise UserError(
      "adjacency add_or_remove_one keeps the number of units secret: declare"
      " privacy.expected_batch_size, the number to divide by, or use zero_out."
    )
  if not secret and declared is not None:
    raise UserError(
      f"privacy.expected_batch_size={declared} has no meaning here: the number of units is public"
      f" under {spec.adjacency}."
    )
  name = config.solver.method
  if name == "auto":
    name = choose(spec.epsilon, declared or num_units, features.num_features, features.num_classes)
  method = _method(config, name, public, check_blocks(config.solver.blocks, features.num_features))
  mechanisms = plan(method, spec, declared)
  for mechanism in mechanisms.values():
    check_stddev(mechanism.stddev)
  return Solving(method, mechanisms, features.num_classes, config.privacy.enabled)


def solve_state(
  solving: Solving, loader: UnitLoader, num_units: float, size: int,
  state: TrainState, key: MasterKey,
) -> TrainState:  # fmt: skip
  """The state after the solver's one step; the same bits for the same key.

  Args:
    solving: what to solve.
    loader: of the training units.
    num_units: the public divisor.
    size: units that are on the device at a time.
    state: before the step.
    key: the master key for this software and hardware.
  """

  def shards() -> Iterator[Shard]:
    for _, units, mask in in_order(loader, size):
      yield units, mask

  num_features = state.params["head.kernel"].shape[0]
  data = FeatureData(shards, num_features, solving.num_classes, num_units, declared=True)
  head = solving.method.solve(data, Releases(solving.mechanisms, key, solving.noised))
  arrays = head.arrays()
  return TrainState(state.step + 1, arrays, state.opt_state, jax.tree.map(jnp.array, arrays))


def _method(config: Config, name: str, public: PublicStatistics | None, blocks: Blocks) -> Method:
  solver, train, clip_norm = config.solver, config.train, config.privacy.clip_norm
  before = Preprocessing(solver.power, solver.centre_share, public, blocks)
  moment = {"moment_share": solver.moment_share, "ridge": solver.ridge}
  if name == "least_squares":
    return LeastSquares(before, **_set(eigenvalue_share=solver.eigenvalue_share, **moment))
  steps = train.steps or 1
  if name == "newton":
    hessian = _set(hessian_share=solver.moment_share, ridge=solver.ridge)
    return Newton(before, steps, clip_norm=clip_norm, **hessian)
  descent = Descent(
    steps, clip_norm, train.learning_rate, train.optimizer, train.momentum, train.schedule,
    train.weight_decay, **_set(bias=solver.bias, average=solver.average),
  )  # fmt: skip
  if public is not None:
    moment["moment_share"] = 0.0  # the public one takes its place
  shape = {"whiten": solver.whiten, "precondition": solver.precondition, "damping": solver.damping}
  return FeatureCovariance(before, descent, **_set(**moment, **shape))


def _set(**settings: Any) -> dict[str, Any]:
  """Those that are given; the others are left to the defaults of the method."""
  return {name: value for name, value in settings.items() if value is not None}
