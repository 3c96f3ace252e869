"""`sweep`: the same training at several epsilons and seeds, each run in a folder of its own."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dp_jax.config.run_config import Config
from dp_jax.errors import UserError
from dp_jax.evaluation.fairness import fairness, measure
from dp_jax.evaluation.predictions import load_predictions
from dp_jax.evaluation.seeds import over_seeds
from dp_jax.evaluation.subgroups import CLASS
from dp_jax.files.atomic import write_bytes, write_text
from dp_jax.privacy import tuning
from dp_jax.privacy.accounting.composition import PlannedRelease, account_releases
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.report.sweep_page import Row, SweepTable, panels, sweep_markdown, sweep_page
from dp_jax.report.sweep_plot import image
from dp_jax.runs.compare import data_name
from dp_jax.statement import formatting
from dp_jax.training.checkpoints.workdir import WorkDir, compare
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.setup.target import make_mechanism

_log = logging.getLogger(__name__)

_PLAIN = "plain"
# Of all runs of a sweep, in its folder.
LEDGER = "ledger.jsonl"
# Point estimates alone are taken from a run; what varies here is the seed.
_RESAMPLES = 2


@dataclasses.dataclass(frozen=True)
class Sweep:
  """The outcome of a sweep.

  Attributes:
    private: whether the data were declared private: then only `path` may be shown.
    path: the page that was written.
    table: what was found.
  """

  private: bool
  path: Path
  table: SweepTable


@dataclasses.dataclass(frozen=True)
class _Planned:
  """A run of the sweep: its target (None without privacy), seed, configuration and folder."""

  epsilon: float | None
  seed: int
  config: Config
  folder: WorkDir

  @property
  def label(self) -> str:
    name = "no privacy" if self.epsilon is None else f"epsilon {formatting.plain(self.epsilon)}"
    return f"{name}, seed {self.seed}"


def sweep(
  config: Config,
  workdir: Path,
  epsilons: Sequence[float],
  seeds: int,
  groups: Sequence[str] = (),
  *,
  ledger_file: Path | None = None,
  ledger_budget: PrivacySpec | None = None,
  progress: bool = True,
) -> Sweep:
  """Trains every (epsilon, seed) and, for each seed, the same without privacy.

  A run that is complete is kept; one that was stopped goes on. The seed changes the initial model;
  sampling and noise are fresh in every run. All runs are entered in one ledger, so that each
  statement counts the runs before it.

  Args:
    config: of all runs; its epsilon and seed are replaced, seeds count up from its own.
    workdir: gets a folder for each run, and what was found: `sweep.html`, `.md`, `.json`, `.svg`
      and `.png`, under `private/` if the data are declared private.
    epsilons: the targets, positive and distinct.
    seeds: how many of each target.
    groups: columns whose gaps to show; by default data.groups, or the classes.
    ledger_file: a ledger that this sweep shares with other runs on the same data; None keeps
      `ledger.jsonl` in the folder of the sweep.
    ledger_budget: what all runs of that ledger may spend together; given when it is new.
    progress: whether to show progress on standard error.

  Raises:
    ValueError: for anything that cannot be run, before any training; or if the budget of the ledger
      does not allow the next run.
    Stopped: on SIGTERM; the same call goes on.
  """
  columns = tuple(groups) or config.data.groups or (CLASS,)
  planned = _plan(config, workdir, epsilons, seeds, columns)
  mechanisms = _check(planned)
  for i, each in enumerate(planned):
    if _is_complete(each):
      _log.info("%s: complete, kept (%d of %d)", each.label, i + 1, len(planned))
    else:
      label = f"{each.label} ({i + 1} of {len(planned)})"
      own = each.folder.ledger.exists()  # begun by a version that kept one for each run
      train(
        each.config, each.folder.path, progress=progress, label=label,
        ledger_file=None if own else ledger_file or workdir / LEDGER,
        ledger_budget=None if own else ledger_budget,
      )  # fmt: skip
  table = _collect(config, workdir, planned, mechanisms, columns, ledger_file or workdir / LEDGER)
  return Sweep(table.private, _write(workdir, table), table)


def _plan(
  config: Config, workdir: Path, epsilons: Sequence[float], seeds: int, columns: Sequence[str]
) -> list[_Planned]:
  """All runs, one seed after the other, so that a sweep cut short has whole curves."""
  if not epsilons:
    raise UserError("give at least one epsilon, for example --epsilons=0.5,1,2,4,8.")
  for epsilon in epsilons:
    if not (math.isfinite(epsilon) and epsilon > 0):
      raise UserError(f"epsilon {epsilon!r} must be positive and finite.")
  if len(set(epsilons)) < len(epsilons):
    raise UserError(f"epsilons {', '.join(f'{e:g}' for e in epsilons)} name one twice.")
  if seeds < 1:
    raise UserError(f"seeds={seeds} must be at least 1.")
  if (workdir / "config.json").exists():
    raise UserError(f"{str(workdir)!r} is the work directory of a run; choose a new folder.")
  known = (CLASS, *(config.data.groups or ()))
  missing = [name for name in columns if name not in known]
  if missing:
    raise UserError(
      f"there is no group column {missing[0]!r}; one of {', '.join(known)}."
      " Columns of the data are kept if data.groups names them."
    )
  planned = []
  for seed in range(config.seed, config.seed + seeds):
    targets: list[float | None] = [*sorted(epsilons), None]
    for target in targets:
      name = _PLAIN if target is None else f"epsilon_{formatting.plain(target)}"
      folder = WorkDir(workdir / name / f"seed_{seed}")
      planned.append(_Planned(target, seed, _config(config, target, seed), folder))
  return planned


def _config(config: Config, epsilon: float | None, seed: int) -> Config:
  values = config.to_dict()
  values["seed"] = seed
  values["privacy"]["enabled"] = epsilon is not None
  if epsilon is not None or config.solver.method == "none":  # a solver plans by it all the same
    values["privacy"]["epsilon"] = epsilon
  return Config.from_dict(values)


def _check(planned: Sequence[_Planned]) -> dict[float, Mechanism]:
  """Refuses what cannot run, whichever run it is of; the mechanism of each epsilon."""
  for each in planned:
    if each.folder.config.exists():
      there = json.loads(each.folder.config.read_text())["config"]
      differences = compare(there, each.config.to_dict())
      if differences:
        raise UserError(
          f"{str(each.folder.path)!r} belongs to another run: {'; '.join(differences)}. Choose a"
          " new folder for this sweep."
        )
  first = planned[0]
  run = prepare(first.config)
  mechanisms = {}
  for each in planned:
    if each.seed == first.seed and each.epsilon is not None:
      _, mechanisms[each.epsilon] = make_mechanism(each.config, run.loader.num_units)
  return mechanisms


def _is_complete(each: _Planned) -> bool:
  return each.folder.result.exists()


def _collect(
  config: Config,
  workdir: Path,
  planned: Sequence[_Planned],
  mechanisms: dict[float, Mechanism],
  columns: Sequence[str],
  ledger: Path,
) -> SweepTable:
  declared, delta = config.data.declared, config.privacy.delta
  assert delta is not None  # else no mechanism could have been made
  private = declared != "public"
  releases = _releases(workdir, ledger)
  total, accountant = _total(releases, delta)
  rows = []
  targets: list[float | None] = [*sorted(mechanisms), None]
  for epsilon in targets:
    found = [_figures(each, columns, private) for each in planned if each.epsilon == epsilon]
    accuracies = tuple(accuracy for accuracy, _ in found)
    rows.append(Row(
      epsilon, accuracies, over_seeds(accuracies),
      {name: over_seeds([gaps[name] for _, gaps in found]) for name in columns},
      None if epsilon is None else _selection(mechanisms[epsilon], len(releases), delta),
    ))  # fmt: skip
  seeds = len({each.seed for each in planned})
  return SweepTable(
    data_name(config.to_dict()["data"]), config.data.eval_split, private, config.privacy.unit,
    delta, seeds, rows, columns, len(releases), total, accountant,
  )  # fmt: skip


def _figures(each: _Planned, columns: Sequence[str], private: bool) -> tuple[float, dict[str, Any]]:
  """Accuracy of a completed run, and the largest gap of each column, NaN where there is none."""
  table = load_predictions(each.folder.predictions(each.config.data.declared))
  names = table.about.get("class_names", ())
  accuracy, gaps = float("nan"), dict.fromkeys(columns, float("nan"))
  for column in columns:
    (measured,) = measure(
      [table], [column], "accuracy", private=private, class_names=names, resamples=_RESAMPLES
    )
    accuracy = float(measured.values[0])
    for spread in fairness(measured).columns:
      gaps[column] = spread.largest_gap.value
  return accuracy, gaps


def _releases(workdir: Path, shared: Path) -> list[PlannedRelease]:
  """Whatever private runs the folder holds, those of earlier sweeps and unfinished ones too."""
  own = [Ledger(path) for path in sorted(workdir.glob("*/seed_*/ledger.jsonl"))]
  notes = workdir.glob("*/seed_*/private/ledger_identity.json")
  runs = {str(json.loads(path.read_text())["run"]) for path in notes}
  return [
    *(release for ledger in own for release in ledger.releases),
    *(Ledger(shared).of_runs(runs) if shared.exists() else ()),
  ]


def _total(releases: Sequence[PlannedRelease], delta: float) -> tuple[float | None, str]:
  """Epsilon of all releases together and its accountant; None, and why, where there is none."""
  try:
    found = account_releases(releases, delta)
  except (ValueError, ArithmeticError) as error:
    return None, str(error)
  return found.epsilon, found.accountant


def _selection(mechanism: Mechanism, runs: int, delta: float) -> float | None:
  """Epsilon of the best of so many runs on average; None where that cannot be accounted."""
  try:
    return tuning.account_selection(mechanism, tuning.Selection(float(runs)), delta).epsilon
  except (ValueError, ArithmeticError):
    return None


def _write(workdir: Path, table: SweepTable) -> Path:
  folder = workdir / "private" if table.private else workdir
  try:
    folder.mkdir(mode=0o700 if table.private else 0o777, parents=True, exist_ok=True)
    for name, text in (
      ("sweep.html", sweep_page(table)),
      ("sweep.md", sweep_markdown(table)),
      ("sweep.json", json.dumps(table.to_dict(), indent=2) + "\n"),
    ):
      if table.private:
        write_bytes(folder / name, text.encode())
      else:
        write_text(folder / name, text)
    for kind in ("svg", "png"):
      write_bytes(folder / f"sweep.{kind}", image(panels(table), kind))
      if not table.private:
        (folder / f"sweep.{kind}").chmod(0o644)
  except OSError as error:
    raise UserError(f"cannot write to {str(folder)!r}: {error.strerror}.") from error
  return folder / "sweep.html"
