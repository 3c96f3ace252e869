"""The epsilon of several mechanisms on the same data.

Releases that share an accountant compose there. Where they do not (fixed-size batches
and selection have RDP only, truncated batches PLD only), the epsilons and deltas of
two groups add, which is looser, and the reason says so. The parameters of each
mechanism count as chosen without looking at the outputs of the others.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import dp_accounting
from dp_accounting.privacy_accountant import NeighboringRelation

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy import tuning
from dp_jax.privacy.accounting import accountants as accounting
from dp_jax.privacy.accounting import tails
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.tuning import Selection

# How delta may be divided between two groups; fixed, so that the choice is not data.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class PlannedRelease:
  """One thing that is released.

  Attributes:
    mechanism: what released it.
    steps: how many of its steps count; None for all that were planned.
    selection: set if it is the best of a random number of runs of the mechanism.
  """

  mechanism: Mechanism
  steps: int | None = None
  selection: Selection | None = None


def account_releases(releases: Sequence[PlannedRelease], delta: float) -> accounting.Accounted:
  """Returns the epsilon of all releases together.

  Args:
    releases: any number, all under one adjacency.
    delta: in (0, 1), for all of them.

  Raises:
    ValueError: if adjacencies differ, or a selection cannot be accounted.
    tails.SamplerTailError: if noise is too small for the sampler at this delta.
  """
  delta = checks.open_unit("delta", delta)
  releases = [each for each in releases if each.steps != 0]
  if not releases:
    return accounting.nothing_released(delta)
  adjacencies = sorted({each.mechanism.adjacency for each in releases})
  if len(adjacencies) > 1:
    raise UserError(
      f"releases under {' and '.join(adjacencies)} have no common guarantee; use one adjacency"
    )
  if len(releases) == 1 and releases[0].selection is None:
    return releases[0].mechanism.account(delta, releases[0].steps)
  residual = min(1.0, sum(_tail_delta(each) for each in releases))
  least = min(each.mechanism.noise_multiplier for each in releases)
  usable = delta if least == 0 else tails.usable_delta(delta, residual, least)
  found = _account(releases, usable)
  return dataclasses.replace(found, delta=delta, tail_delta=residual)


def _tail_delta(release: PlannedRelease) -> float:
  if release.selection is not None:
    return tuning.tail_delta(release.mechanism, release.selection)
  return release.mechanism.tail_delta(release.steps)


def _account(releases: Sequence[PlannedRelease], delta: float) -> accounting.Accounted:
  if all(_has(each, "analytic_gaussian") for each in releases):
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    gaussian = ("analytic_gaussian", "pld", "rdp")
    return accounting.account_parts(_parts(releases), relation, gaussian, "auto", delta)
  if all(_has(each, "pld") for each in releases):
    shared = all(_has(each, "rdp") for each in releases)
    return _by_pld(releases, ("pld", "rdp") if shared else ("pld",), delta)
  if all(_has(each, "rdp") for each in releases):
    return _by_rdp(releases, delta)
  tight = [each for each in releases if _has(each, "pld")]
  rest = [each for each in releases if not _has(each, "pld")]
  found = [_added(tight, rest, delta, share) for share in _SHARES]
  return min(found, key=lambda each: each.epsilon)


def _added(
  tight: Sequence[PlannedRelease], rest: Sequence[PlannedRelease], delta: float, share: float
) -> accounting.Accounted:
  first = _by_pld(tight, ("pld",), share * delta)
  second = _by_rdp(rest, (1 - share) * delta)
  return dataclasses.replace(
    first,
    epsilon=first.epsilon + second.epsilon,
    accountant=f"{first.accountant}+{second.accountant}",
    reason=(
      f"no accountant has all of these releases: epsilons add, {share:g} of delta goes to PLD;"
      f" {first.reason}; {second.reason}"
    ),
  )


def _has(release: PlannedRelease, accountant: str) -> bool:
  if release.selection is not None:
    return accountant == "rdp"
  return accountant in release.mechanism.row.accountants


def _by_pld(
  releases: Sequence[PlannedRelease], accountants: tuple[str, ...], delta: float
) -> accounting.Accounted:
  relations = {each.mechanism.row.relation for each in releases}
  parts = _parts(releases)
  for relation in (NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL):
    if relation in relations:
      break
  else:
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
  if relation == NeighboringRelation.REPLACE_ONE:
    # Here PLD doubles the sensitivity itself, so Gaussians are handed over unhalved.
    parts = tuple((_unhalved(event), count) for event, count in parts)
  return accounting.account_parts(parts, relation, accountants, "auto", delta)


def _unhalved(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
  if isinstance(event, dp_accounting.GaussianDpEvent):
    return dp_accounting.GaussianDpEvent(2 * event.noise_multiplier)
  return event


def _by_rdp(releases: Sequence[PlannedRelease], delta: float) -> accounting.Accounted:
  replaced = releases[0].mechanism.adjacency == "replace_one"
  relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
  return accounting.account_parts(_parts(releases), relation, ("rdp",), "auto", delta)


def _parts(releases: Sequence[PlannedRelease]) -> accounting.Parts:
  counts: Counter[dp_accounting.DpEvent] = Counter()
  for each in releases:
    if each.selection is not None:
      tuning.check(each.mechanism)
      counts[each.selection.event(each.mechanism)] += 1
    else:
      for event, count in each.mechanism.parts(each.steps):
        counts[event] += count
  return tuple(counts.items())
