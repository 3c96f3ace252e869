"""A solver in place of the training loop: what it releases, and its one step."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from dp_jax.data.pipeline import in_order
from dp_jax.data.units import UnitLoader
from dp_jax.gradients.noise import check_stddev
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.choice import choose
from dp_jax.solvers.data import FeatureData, Shard
from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.head import Preprocessing, PublicStatistics
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.noised import Releases
from dp_jax.solvers.solve import Method, plan
from dp_jax.training.config import Config
from dp_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Solving:
  """What a run solves.

  Attributes:
    method: the solver.
    mechanisms: what it releases, by purpose.
  """

  method: Method
  mechanisms: Mapping[str, Mechanism]


def make_solving(
  config: Config, spec: PrivacySpec, num_units: int, public: PublicStatistics | None = None
) -> Solving:
  """The solver of a configuration, with its releases calibrated to the target.

  Args:
    config: the configuration.
    spec: the target.
    num_units: N.
    public: of solver.public_features.

  Raises:
    ValueError: if the shares leave nothing for a release, or the target cannot be met.
  """
  secret = spec.adjacency == "add_or_remove_one"
  declared = config.privacy.expected_batch_size
  if secret and declared is None:
    raise ValueError(
      "adjacency add_or_remove_one keeps the number of units secret: declare"
      " privacy.expected_batch_size, the number to divide by, or use zero_out."
    )
  if not secret and declared is not None:
    raise ValueError(
      f"privacy.expected_batch_size={declared} has no meaning here: the number of units is public"
      f" under {spec.adjacency}."
    )
  method = _method(config, spec, declared or num_units, public)
  mechanisms = plan(method, spec, declared)
  for mechanism in mechanisms.values():
    check_stddev(mechanism.stddev)
  return Solving(method, mechanisms)


def model_sizes(config: Config) -> dict[str, object]:
  """The sizes of the feature_head that the configured solver fits."""
  solver = config.solver
  public = solver.public_features is not None
  transformed = (
    solver.method in ("auto", "feature_covariance")
    and solver.whiten > 0
    and (public or solver.moment_share > 0)
  )
  centred = public or solver.centre_share > 0
  return {"power": solver.power, "centred": centred, "transformed": transformed}


def solve_state(
  solving: Solving, loader: UnitLoader, num_units: float, num_classes: int, size: int,
  state: TrainState, key: MasterKey,
) -> TrainState:  # fmt: skip
  """The state after the solver's one step; the same bits for the same key.

  Args:
    solving: what to solve.
    loader: of the training units.
    num_units: the public divisor.
    num_classes: C.
    size: units that are on the device at a time.
    state: before the step.
    key: the master key for this software and hardware.
  """

  def shards() -> Iterator[Shard]:
    for _, units, mask in in_order(loader, size):
      yield units, mask

  num_features = state.params["head.kernel"].shape[0]
  data = FeatureData(shards, num_features, num_classes, num_units, declared=True)
  head = solving.method.solve(data, Releases(solving.mechanisms, key))
  arrays = head.arrays()
  return TrainState(state.step + 1, arrays, state.opt_state, jax.tree.map(jnp.array, arrays))


def _method(
  config: Config, spec: PrivacySpec, num_units: float, public: PublicStatistics | None
) -> Method:
  solver, train = config.solver, config.train
  name = choose(spec.epsilon, num_units) if solver.method == "auto" else solver.method
  before = Preprocessing(solver.power, solver.centre_share, public)
  if name == "least_squares":
    return LeastSquares(before, solver.moment_share, solver.eigenvalue_share, solver.ridge)
  steps = train.steps or 1
  if name == "newton":
    return Newton(before, steps, solver.moment_share, config.privacy.clip_norm, solver.ridge)
  descent = Descent(
    steps, config.privacy.clip_norm, train.learning_rate, train.optimizer, train.momentum,
    train.schedule, train.weight_decay, solver.bias, solver.average,
  )  # fmt: skip
  return FeatureCovariance(
    before, descent, solver.moment_share, solver.whiten, solver.precondition, solver.ridge,
    solver.damping,
  )  # fmt: skip
