"""The section of a configuration that says how a head on features is solved for."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class SolverConfig:
  """A head on frozen features from a few noised statistics, in place of the training loop.

  The model is feature_head, sampling full_batch. The steps of feature_covariance and newton, their
  clip norm, and the optimizer of feature_covariance are those of `train` and `privacy`.

  Attributes:
    method: none trains by the ordinary loop; auto takes what dp_jax.solvers.choice says.
    power: features are raised to it, with their sign, before they are scaled to norm 1.
    centre_share: of the budget, for a noised mean of the features; 0 releases none.
    moment_share: of the budget, for their noised second moment (newton: its Hessian); 0 makes
      feature_covariance plain gradient descent.
    eigenvalue_share: of the budget, for the smallest eigenvalue that least_squares needs.
    public_features: in place of noised statistics, an .npz file or a folder of .npy shards with
      features of public records, made by the same model. Their mean is the centre, and their second
      moment is that of feature_covariance; they cost nothing, and nothing protects them.
    public_split: which of its splits.
    whiten, precondition, damping: of feature_covariance.
    ridge: in units of the largest eigenvalue of the noise.
    bias: whether the head of feature_covariance has one.
    average: the share of the steps of feature_covariance, the last ones, whose heads are averaged;
      0 takes the last head.
  """

  method: Literal["none", "auto", "least_squares", "feature_covariance", "newton"] = "none"
  power: float = 1.0
  centre_share: float = 0.0
  moment_share: float = 0.1
  eigenvalue_share: float = 0.05
  public_features: str | None = None
  public_split: str = "train"
  whiten: float = 0.25
  precondition: float = 0.3
  ridge: float = 0.5
  damping: float = 2.0
  bias: bool = False
  average: float = 0.0


def solver_checks(solver: SolverConfig, config: Any) -> list[tuple[bool, str, Any, str]]:
  """What a solver needs of its own section and of others: (holds, key, value, what it must be)."""
  public = solver.public_features is not None
  settings = [
    (not public or solver.method != "none", "solver.public_features", solver.public_features,
     "is for a solver: set solver.method"),
    (public or solver.public_split == SolverConfig.public_split, "solver.public_split",
     solver.public_split, "is a split of solver.public_features, which is not set"),
  ]  # fmt: skip
  if solver.method == "none":
    return settings
  privacy, train, model, best = (
    config.privacy, config.train, config.model, config.checkpoint.best_metric
  )  # fmt: skip
  free = 1 - solver.centre_share
  steps = train.steps or 0
  needs_moment = solver.method in ("auto", "feature_covariance")
  return [
    *settings,
    (not public or solver.centre_share == 0, "solver.centre_share", solver.centre_share,
     "must be 0: solver.public_features gives the centre, at no cost"),
    (not public or not needs_moment or solver.moment_share == 0, "solver.moment_share",
     solver.moment_share, "must be 0: solver.public_features gives the moment, at no cost"),
    (privacy.enabled, "privacy.enabled", privacy.enabled,
     "has no solver: leave solver.method out, to train feature_head without privacy"),
    (privacy.sampling == "full_batch", "privacy.sampling", privacy.sampling,
     "must be full_batch: a solver's statistics are over all units"),
    (privacy.clipping == "flat", "privacy.clipping", privacy.clipping, "must be flat for a solver"),
    (model.name == "feature_head" and not model.sizes(), "model.name", model.name,
     "must be feature_head, without sizes: that is what a solver fits"),
    (model.weights is None and model.trainable == ".*", "model.weights", model.weights,
     "and model.trainable have no place in a solver's run"),
    (best is None, "checkpoint.best_metric", best, "has no place here: a solver has one step"),
    (steps >= 1, "train.steps", train.steps, "must be set: a solver counts no epochs"),
    (solver.method not in ("least_squares",) or steps == 1, "train.steps", train.steps,
     "must be 1: least_squares releases each of its statistics once"),
    (solver.power > 0, "solver.power", solver.power, "must be positive"),
    (0 <= solver.centre_share < 1, "solver.centre_share", solver.centre_share,
     "must be in [0, 1)"),
    (0 <= solver.moment_share < free, "solver.moment_share", solver.moment_share,
     "must leave some of the budget"),
    (0 <= solver.whiten <= 1 and 0 <= solver.precondition <= 1, "solver.whiten", solver.whiten,
     "and solver.precondition must be from 0 to 1"),
    (0 <= solver.average <= 1, "solver.average", solver.average, "must be from 0 to 1"),
    (solver.ridge > 0, "solver.ridge", solver.ridge, "must be positive"),
    (solver.damping > 0, "solver.damping", solver.damping, "must be positive"),
  ]  # fmt: skip
