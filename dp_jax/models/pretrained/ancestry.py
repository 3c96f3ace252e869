"""What arrays came from: the weights files behind a weights file, as their headers describe them.

A run copies the whole chain of the weights that it starts from into the header of what it writes.
So data that are declared public clean nothing: weights that saw private records without protection
are known as such through every run that went on from them.

All of it is taken on trust: whoever writes a header writes what they like, and arrays that were
saved again by other code have no header. Of those it is said that nothing is known.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.spec import ADJACENCIES

# No honest chain is as long; a header is read before anything is known of who wrote it.
MOST = 100
# Of a name in messages and headers.
_LETTERS = 60
# What is known of the guarantee of a release.
GUARANTEE = ("epsilon", "delta", "unit", "adjacency")
# The weights that come in packages; they are public.
IMAGENET = "imagenet"


@dataclasses.dataclass(frozen=True)
class Ancestor:
  """One weights file, as its header describes it.

  Attributes:
    name: of the file, without its folder; for people alone.
    sha256: of the file, 64 hexadecimal digits; None where that is not known.
    protected: whether a guarantee covers its arrays; None if the file does not say, as one that
      this project did not write.
    declared: what the data behind it were declared to be, "public" or "private"; None if it does
      not say.
    test_key: whether its noise came from a key file given for a test, so that it protects nobody.
    traced: whether the file says what its arrays came from.
    epsilon, delta, unit, adjacency: of its statement, if a guarantee covers it; None if it does not
      say.
  """

  name: str
  sha256: str | None
  protected: bool | None
  declared: str | None
  test_key: bool = False
  traced: bool = True
  epsilon: float | None = None
  delta: float | None = None
  unit: str | None = None
  adjacency: str | None = None

  def __post_init__(self) -> None:
    """Shortens the names, and refuses what contradicts itself; ValueError says what."""
    object.__setattr__(self, "name", _short("name", self.name))
    if self.sha256 is not None and not (
      isinstance(self.sha256, str) and re.fullmatch("[0-9a-f]{64}", self.sha256)
    ):
      raise UserError("sha256 is not 64 hexadecimal digits")
    for field, known in (("test_key", (True, False)), ("traced", (True, False)),
                         ("protected", (True, False, None))):  # fmt: skip
      value = getattr(self, field)
      if not any(value is each for each in known):
        raise UserError(f"{field} is {_shown(value)}, not one of {', '.join(map(str, known))}")
    if self.declared not in ("public", "private", None):
      raise UserError(f"declared is {_shown(self.declared)}, neither 'public' nor 'private'")
    if (self.protected is None) != (self.declared is None):
      raise UserError("only one of protected and declared is known")
    if self.test_key and not self.protected:
      raise UserError("test_key is true of what no noise was added to")
    self._check_guarantee()

  def _check_guarantee(self) -> None:
    given = (self.epsilon, self.delta, self.unit, self.adjacency)
    if all(each is None for each in given):
      return
    if not self.protected or any(each is None for each in given):
      raise UserError("epsilon, delta, unit and adjacency go together, with protected")
    object.__setattr__(self, "epsilon", checks.non_negative("epsilon", self.epsilon))
    object.__setattr__(self, "delta", checks.open_unit("delta", self.delta))
    object.__setattr__(self, "unit", _short("unit", self.unit))
    if self.adjacency not in ADJACENCIES:
      raise UserError(f"adjacency is {_shown(self.adjacency)}, not one of {', '.join(ADJACENCIES)}")

  @property
  def is_release(self) -> bool:
    """Whether its arrays are a release under a guarantee."""
    return self.protected is True and not self.test_key

  @property
  def is_exposed(self) -> bool:
    """Whether it holds private records that nothing protects."""
    return self.declared == "private" and not self.is_release

  def to_dict(self) -> dict[str, Any]:
    """The fields as JSON values."""
    return dataclasses.asdict(self)


# A file and all that is behind it, newest first.
Lineage = tuple[Ancestor, ...]


def lineage_of(about: Mapping[str, Any], sha256: str, name: str) -> Lineage:
  """A weights file and what is behind it.

  Args:
    about: what its header says; empty for a file of other origin.
    sha256: of the file, in hexadecimal.
    name: of the file.

  Raises:
    ValueError: if the header contradicts itself or is not what this project writes.
  """
  said = ("protected", "declared", "test_key", "guarantee", "ancestry")
  if not any(field in about for field in said):
    return (Ancestor(name, sha256, None, None, traced=False),)
  try:
    if not isinstance(about.get("protected"), bool):
      raise UserError(f"protected is {_shown(about.get('protected'))}, not True or False")
    guarantee = about.get("guarantee", {})
    if not isinstance(guarantee, dict) or set(guarantee) not in (set(), set(GUARANTEE)):
      raise UserError(f"guarantee is no object of {', '.join(GUARANTEE)}")
    own = Ancestor(
      name, sha256, about["protected"], about.get("declared", "private"),
      test_key=about.get("test_key", False), traced="ancestry" in about, **guarantee,
    )  # fmt: skip
    return merged((own,), from_list(about.get("ancestry", [])))
  except ValueError as error:
    raise UserError(
      f"the header of the weights {_short('name', name)!r} does not say what this project writes of"
      f" where they came from: {error}."
    ) from error


def from_list(entries: Any) -> Lineage:
  """What `to_list` wrote, checked: it comes from a file.

  Raises:
    ValueError: naming what is wrong with which entry.
  """
  if not isinstance(entries, list) or len(entries) > MOST:
    raise UserError(f"the ancestry is no list of at most {MOST} entries")
  names = tuple(field.name for field in dataclasses.fields(Ancestor))
  found = []
  for index, entry in enumerate(entries):
    try:
      if not isinstance(entry, dict) or set(entry) != set(names):
        raise UserError(f"it does not have the fields {', '.join(names)}")
      found.append(Ancestor(**entry))
    except ValueError as error:
      raise UserError(f"entry {index} of the ancestry: {error}") from error
  return tuple(found)


def to_list(lineage: Sequence[Ancestor]) -> list[dict[str, Any]]:
  """JSON values of which `from_list` makes the same."""
  return [each.to_dict() for each in lineage]


def of_features(origin: Mapping[str, Any]) -> Lineage:
  """The model that made features, and what is behind it; () if they are not known to be features.

  Args:
    origin: what the features say of where they come from (`SourceInfo.origin`).

  Raises:
    ValueError: if that is not what this project writes.
  """
  digest = origin.get("weights_sha256")
  if "weights_ancestry" in origin:
    try:
      found = from_list(origin["weights_ancestry"])
      if not found or found[0].sha256 != digest:
        raise UserError("the ancestry does not begin with weights_sha256")
    except ValueError as error:
      raise UserError(f"the manifest of the features is malformed: {error}.") from error
    return found
  if not digest:
    return ()
  known = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
  sha256 = digest if known else None
  name = str(origin.get("weights", "")).rpartition("/")[2]
  if name == IMAGENET:
    return (Ancestor(name, sha256, False, "public"),)
  return (Ancestor(name, sha256, None, None, traced=False),)


def merged(*lineages: Iterable[Ancestor]) -> Lineage:
  """Several of them as one, each file once.

  Raises:
    ValueError: if that is too long to be written.
  """
  found = tuple(dict.fromkeys(each for lineage in lineages for each in lineage))
  if len(found) > MOST:
    raise UserError(
      f"there are {len(found)} weights files behind these, and at most {MOST} are kept track of:"
      " start from weights with fewer runs behind them"
    )
  return found


def warnings_of(lineage: Sequence[Ancestor]) -> tuple[str, ...]:
  """What the statement of a private run that starts from the first of them must add.

  Raises:
    ValueError: if one of them holds private records that nothing protects: through it they would be
      in the release, whatever was trained in between and on what.
  """
  for steps, each in enumerate(lineage):
    if each.is_exposed:
      raise UserError(_exposed(lineage[0], each, steps))
  said = [text for steps, each in enumerate(lineage) for text in warnings_about(each, steps)]
  return tuple(dict.fromkeys(said))


def _exposed(first: Ancestor, found: Ancestor, steps: int) -> str:
  how = "with the noise of a test key" if found.test_key else "without privacy"
  behind = f", {steps} back in the ancestry of {_called(first)}," if steps else ""
  return (
    f"{_called(found)}{behind} was trained {how} on data declared private; starting from"
    f" {_called(first) if steps else 'it'} would carry those records into the release. Use public"
    " weights, or a private release."
  )


def warnings_about(each: Ancestor, steps: int) -> Iterator[str]:
  """What the statement says of the first of them (steps 0), or of one that is that many back."""
  behind = f" (those of {_called(each)}, which are behind them)" if steps else ""
  if each.protected is None:
    yield f"that the starting weights{behind} are public is taken from the configuration"
    return
  if each.is_release:
    yield (
      f"the starting weights{behind} are a private release themselves{_guarantee(each)}: if a"
      " person is in the data of both, the guarantees add up"
    )
  if not each.traced:
    yield (
      f"the starting weights{behind} were made by an earlier version, which did not record what"
      " they started from: that nothing private is behind them is taken from the configuration"
    )


def _guarantee(each: Ancestor) -> str:
  if each.epsilon is None:
    return ""
  # Rounded up: what is rounded to the nearest may claim more than was proved.
  up = Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(each.epsilon))
  return f", ({up:f}, {each.delta!r}) for each {each.unit} under {each.adjacency}"


def _called(each: Ancestor) -> str:
  digest = "of unknown sha256" if each.sha256 is None else f"sha256 {each.sha256[:12]}"
  return f"{each.name!r}, {digest}"


def _short(field: str, text: Any) -> str:
  """A name as one short line of what can be printed: it may be anybody's."""
  if not isinstance(text, str):
    raise UserError(f"{field} is {_shown(text)}, not a text")
  line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
  return line if len(line) <= _LETTERS else f"{line[: _LETTERS - 3]}..."


def _shown(value: Any) -> str:
  return repr(value)[:_LETTERS]
