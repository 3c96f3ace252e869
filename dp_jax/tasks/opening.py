"""The tasks by name, those of other people among them."""

from collections.abc import Mapping
from typing import Any

from dp_jax.data.sources.source import SourceInfo
from dp_jax.errors import UserError
from dp_jax.files.code import check_arguments, described, load_callable, signature_of
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import FunctionalModel
from dp_jax.models.opening import GIVEN
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.multilabel import MultiLabel
from dp_jax.tasks.task import Task

TASKS: dict[str, type[Classification]] = {
  "classification": Classification,
  "multilabel": MultiLabel,
}
# What a task takes of the data section, or else of the source.
SHAPES = ("input_shape", "num_classes", "value_range")
# The fact that describes a task of other people.
CODE = "task"
_PARTS = tuple(name for name in dir(Task) if not name.startswith("_"))


def open_task(
  name: str | Task, kwargs: Mapping[str, Any], info: SourceInfo, declared: Mapping[str, Any]
) -> tuple[Task, dict[str, Any], list[str]]:
  """The task of a run, its facts, and which of SHAPES were left to the source.

  Args:
    name: "auto" (by the labels of the source), a key of TASKS, "package.module:Class", or a task.
    kwargs: its settings.
    info: of the training split.
    declared: SHAPES as the configuration has them; None leaves one to the source.

  Raises:
    ValueError: if there is no such task, an argument does not fit, or the source does not say what
      was left to it.
  """
  if not isinstance(name, str):
    check_task(type(name).__name__, name)
    return name, {**name.facts(), CODE: {"name": GIVEN, "kwargs": {}}}, []
  if ":" in name:
    function = load_callable(name)
    names = signature_of(function).parameters
    given = {"info": info} if "info" in names else {}
    check_arguments(name, function, {**kwargs, **given})
    task = function(**given, **kwargs)
    check_task(name, task)
    return task, {**task.facts(), CODE: described(name, kwargs)}, []
  if name == "auto":
    name = "multilabel" if info.label_shape else "classification"
  if name not in TASKS:
    raise UserError(
      f"task.name={name!r} is not one of auto, {', '.join(TASKS)}, nor of the form"
      " package.module:Class."
    )
  values, assumed = dict[str, Any](), list[str]()
  for shape in SHAPES:
    values[shape] = declared.get(shape)
    if values[shape] is None:
      values[shape] = getattr(info, shape)
      assumed.append(shape)
    if values[shape] is None:
      raise UserError(f"{info.name} does not say its {shape}: declare data.{shape}.")
  if len(values["value_range"]) != 2:
    raise UserError(f"data.value_range={tuple(values['value_range'])} must be (low, high).")
  task = _built_in(TASKS[name], values, tuple(info.class_names), kwargs)
  return task, dict(task.facts()), assumed


def _built_in(
  kind: type[Classification], facts: Mapping[str, Any], names: tuple[str, ...],
  kwargs: Mapping[str, Any],
) -> Classification:  # fmt: skip
  settings = ("link", "label_smoothing")
  unknown = [each for each in kwargs if each not in settings]
  if unknown:
    raise UserError(f"task.kwargs has no {unknown[0]!r}; it takes {', '.join(settings)}.")
  low, high = facts["value_range"]
  return kind(tuple(facts["input_shape"]), facts["num_classes"], (low, high), names, **kwargs)


def check_task(name: str, task: Any) -> None:
  """Refuses what lacks a part of a task.

  Raises:
    ValueError: naming what is missing.
  """
  missing = [each for each in _PARTS if not hasattr(task, each)]
  if missing:
    raise UserError(
      f"the task {name!r} has no {', '.join(missing)}: see dp_jax.tasks.task.Task; a subclass of"
      " BaseTask inherits some."
    )


def load_task(spec: ModelSpec, given: Task | None = None, trust_code: bool = False) -> Task:
  """The task that a model was trained for, as the header of its weights describes it.

  Args:
    spec: of the model.
    given: the task itself, where it is none of dp_jax.
    trust_code: import what the description names, which runs its code.

  Raises:
    ValueError: if the header describes none, or one of other people that is neither given nor
      trusted.
  """
  if given is not None:
    return given
  code = spec.task.get(CODE)
  if code is None:
    return task_of(spec)
  if not trust_code or ":" not in code["name"]:
    trusted = ", or trust that code (trust_code=True, or --trust_code), which runs it"
    raise UserError(
      f"the task of this release is {code['name']!r}: give it (task=)"
      f"{trusted if ':' in code['name'] else ''}."
    )
  function = load_callable(code["name"])
  if described(code["name"], code["kwargs"]) != code:
    raise UserError(f"the task {code['name']!r} is not the code that the release was made with.")
  return function(**code["kwargs"])  # type: ignore[no-any-return]


def task_of(spec: ModelSpec) -> Task:
  """The built-in task that a model was trained for, as the header of its weights describes it.

  Raises:
    ValueError: if the header describes none.
  """
  try:
    return _of_facts(spec.task, {})
  except (KeyError, TypeError, ValueError) as error:
    raise UserError(f"the weights do not describe their task: {error!r}.") from error


def build_task(model: FunctionalModel, spec: ModelSpec, **kwargs: Any) -> BoundTask:
  """The built-in task of a model's header, with other settings, bound to its structure."""
  return BoundTask(model, _of_facts(spec.task, kwargs), spec)


def _of_facts(facts: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Classification:
  kind = MultiLabel if facts["multilabel"] else Classification
  return _built_in(kind, facts, tuple(facts["class_names"]), kwargs)
