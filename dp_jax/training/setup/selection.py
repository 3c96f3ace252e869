"""Releasing the best evaluated checkpoint in place of the last: when that is allowed."""

from dp_jax.config.run_config import Config
from dp_jax.errors import UserError
from dp_jax.tasks.task import Task


def check_selection(config: Config, task: Task) -> None:
  """Refuses a choice that the guarantee would not cover, or that cannot be made.

  On public data the choice is a function of what the guarantee covers already. On private data the
  metric is a function of records that nothing protects, and which step it picks tells of them.

  Raises:
    ValueError: if the data is private, no step but the last is evaluated, or the metric is unknown.
  """
  metric = config.checkpoint.best_metric
  if metric is None:
    return
  name = f"checkpoint.best_metric={metric!r}"
  if config.data.declared != "public":
    raise UserError(
      f"{name} on private data: choosing a checkpoint by a private metric is a release of its own,"
      " which this run does not pay for. Leave it out (the last parameters are released)."
    )
  if not config.eval.every:
    raise UserError(f"{name} needs eval.every: else only the last step is evaluated.")
  known = sorted(task.metrics)
  if metric not in known:
    raise UserError(f"{name} is not one of {', '.join(known)}.")


def selection_warnings(config: Config, step: int) -> tuple[str, ...]:
  """What the statement must say of the choice of a step."""
  metric = config.checkpoint.best_metric
  if metric is None:
    return ()
  return (
    f"of the evaluated steps, the one with the best {metric} on the public split"
    f" {config.data.eval_split!r}, step {step}, is released, so that the figures reported for that"
    " split are optimistic; the guarantee is that of all planned steps",
  )
