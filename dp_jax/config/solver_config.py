"""The section of a configuration that says how a head on features is solved for."""

import dataclasses
from typing import Any, Literal

from dp_jax.privacy.sampling import FullBatch
from dp_jax.solvers.choice import CANDIDATES

Check = tuple[bool, str, Any, str]


@dataclasses.dataclass(frozen=True)
class SolverConfig:
  """A head on frozen features from a few noised statistics, in place of the training loop.

  The model is feature_head, sampling full_batch. The steps of feature_covariance and newton, their
  clip norm, and the optimizer of feature_covariance are those of `train` and `privacy`. What is
  None takes the method's own default, that of `dp_jax.solvers`. What is set and of no use to the
  method is refused; under auto, what is of use to none that it may take.

  Attributes:
    method: none trains by the ordinary loop, whatever else stands here; auto takes what
      dp_jax.solvers.choice says.
    power: features are raised to it, with their sign, before they are scaled to norm 1.
    blocks: (columns, factor) of each block of columns, one after the other, such as the layers that
      `dp-jax features` puts side by side: its columns are multiplied by the factor, before rows are
      scaled to norm 1. () multiplies none.
    centre_share: of the budget, for a noised mean of the features; 0 releases none.
    moment_share: of the budget, for their noised second moment (newton: its Hessian); 0 makes
      feature_covariance plain gradient descent.
    eigenvalue_share: of the budget, for the smallest eigenvalue that least_squares needs.
    public_features: in place of noised statistics, an .npz file or a folder of .npy shards with
      features of public records, made by the same model. Their mean is the centre, unless
      centre_share has a noised one, and their second moment is that of feature_covariance; they
      cost nothing, and nothing protects them.
    public_split: which of its splits.
    whiten, precondition, damping: of feature_covariance.
    ridge: in units of the largest eigenvalue of the noise; of a public moment, of its mean
      eigenvalue.
    bias: whether the head of feature_covariance has one.
    average: the share of the steps of feature_covariance, the last ones, whose heads are averaged;
      0 takes the last head.
  """

  method: Literal["none", "auto", "least_squares", "feature_covariance", "newton"] = "none"
  power: float = 1.0
  blocks: tuple[tuple[float, ...], ...] = ()
  centre_share: float = 0.0
  moment_share: float | None = None
  eigenvalue_share: float | None = None
  public_features: str | None = None
  public_split: str = "train"
  whiten: float | None = None
  precondition: float | None = None
  ridge: float | None = None
  damping: float | None = None
  bias: bool | None = None
  average: float | None = None


# What some methods use, or none. A key that is not here is used by all, or changes no result.
_DESCENT = ("feature_covariance",)
USED_BY: dict[str, tuple[str, ...]] = {
  "solver.eigenvalue_share": ("least_squares",),
  **dict.fromkeys(
    ("solver.whiten", "solver.precondition", "solver.damping", "solver.bias", "solver.average",
     "train.learning_rate", "train.optimizer", "train.momentum", "train.schedule",
     "train.weight_decay"),
    _DESCENT,
  ),
  "privacy.clip_norm": ("feature_covariance", "newton"),
  **dict.fromkeys(
    ("train.warmup_steps", "train.ema", "train.engine",
     "train.memory_budget", "train.compute_dtype", "task.kwargs", "data.augment", "data.views",
     "model.head_init_std"),
    (),
  ),
}  # fmt: skip


def solver_checks(solver: SolverConfig, config: Any) -> list[Check]:
  """What a solver needs of its own section and of others: (holds, key, value, what it must be)."""
  public = solver.public_features is not None
  settings = [
    (not public or solver.method != "none", "solver.public_features", solver.public_features,
     "is for a solver: set solver.method"),
    (not solver.blocks or solver.method != "none", "solver.blocks", solver.blocks,
     "is for a solver: set solver.method"),
    (public or solver.public_split == SolverConfig.public_split, "solver.public_split",
     solver.public_split, "is a split of solver.public_features, which is not set"),
  ]  # fmt: skip
  if solver.method == "none":
    return settings
  return [
    *settings,
    *_section_checks(solver),
    *_run_checks(solver, config),
    *_use_checks(solver, config),
  ]


def _section_checks(solver: SolverConfig) -> list[Check]:
  free = 1 - solver.centre_share
  public = solver.public_features is not None
  needs_moment = solver.method in ("auto", "feature_covariance")
  checks: list[tuple[str, bool, str]] = [
    ("power", solver.power > 0, "must be positive"),
    ("centre_share", 0 <= solver.centre_share < 1, "must be in [0, 1)"),
    ("moment_share", 0 <= (solver.moment_share or 0) < free, "must leave some of the budget"),
    ("ridge", solver.ridge is None or solver.ridge > 0, "must be positive"),
    ("damping", solver.damping is None or solver.damping > 0, "must be positive"),
    ("centre_share", not public or needs_moment or solver.centre_share == 0,
     f"must be 0: solver.public_features gives the centre, and {solver.method} takes nothing else"
     " of them"),
    ("moment_share", not public or not needs_moment or not solver.moment_share,
     "must be 0: solver.public_features gives the moment, at no cost"),
    *((name, 0 <= (getattr(solver, name) or 0) <= 1, "must be from 0 to 1")
      for name in ("whiten", "precondition", "average", "eigenvalue_share")),
  ]  # fmt: skip
  return [(holds, f"solver.{name}", getattr(solver, name), what) for name, holds, what in checks]


def _run_checks(solver: SolverConfig, config: Any) -> list[Check]:
  privacy, train, model, best = (
    config.privacy, config.train, config.model, config.checkpoint.best_metric
  )  # fmt: skip
  steps = train.steps or 0
  return [
    (privacy.enabled or None not in (privacy.epsilon, privacy.delta), "privacy.epsilon",
     privacy.epsilon, "and privacy.delta must be set for a solver without privacy too: its other"
     " settings are in units of the noise that they would need"),
    (privacy.sampling == FullBatch.name, "privacy.sampling", privacy.sampling,
     "must be full_batch: a solver's statistics are over all units"),
    (privacy.clipping == "flat", "privacy.clipping", privacy.clipping, "must be flat for a solver"),
    (model.name == "feature_head" and not model.kwargs, "model.name", model.name,
     "must be feature_head, without sizes: that is what a solver fits"),
    (model.weights is None and model.trainable == ".*", "model.weights", model.weights,
     "and model.trainable have no place in a solver's run"),
    (best is None, "checkpoint.best_metric", best, "has no place here: a solver has one step"),
    (steps >= 1, "train.steps", train.steps, "must be set: a solver counts no epochs"),
    (solver.method != "least_squares" or steps == 1, "train.steps", train.steps,
     "must be 1: least_squares releases each of its statistics once"),
  ]  # fmt: skip


def _use_checks(solver: SolverConfig, config: Any) -> list[Check]:
  """Refuses what is set, other than its default, and would be ignored."""
  methods = CANDIDATES if solver.method == "auto" else (solver.method,)
  checks = []
  for key, users in USED_BY.items():
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    default = getattr(type(getattr(config, section))(), name)
    only = f"of use to {' and '.join(users)} alone" if users else "of use to no solver"
    holds = value == default or any(method in users for method in methods)
    checks.append((holds, key, value, f"is not used by solver.method={solver.method}: leave it"
                   f" out; {only}"))  # fmt: skip
  return checks
