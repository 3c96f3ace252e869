"""What a weights file says of where its arrays came from, through any number of runs."""

import json

import numpy as np
import pytest
from safetensors.numpy import save
from support import classifier

from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import (
  MOST,
  Ancestor,
  from_list,
  merged,
  of_features,
  to_list,
)

SPEC = classifier("linear", {}, (3,), 2, (0.0, 1.0))
ARRAYS = {"head.kernel": np.zeros((3, 2), np.float32), "head.bias": np.zeros(2, np.float32)}
GUARANTEE = {"epsilon": 3.21004, "delta": 1e-5, "unit": "patient", "adjacency": "zero_out"}
PLAIN, OPEN = {"declared": "private"}, {"declared": "public"}
RELEASE = {"declared": "private", "protected": True, "guarantee": GUARANTEE}
TEST_KEY = {**RELEASE, "test_key": True}
FOREIGN = None


def _chain(folder, *links, traced=True):
  """A file for each link, oldest first, each from the one before; the newest is returned."""
  behind, path = (), None
  for index, link in enumerate(links):
    path = folder / f"{index}.safetensors"
    if link is FOREIGN:
      path.write_bytes(save(ARRAYS))
    else:
      ancestry = {"ancestry": behind} if traced else {}
      path.write_bytes(weights.to_bytes(ARRAYS, SPEC, **link, **ancestry))
    behind = weights.lineage(path)
  return path


@pytest.mark.parametrize(("links", "named"), [
  ((PLAIN,), "'0.safetensors', sha256 .* was trained without privacy"),
  ((PLAIN, OPEN), "'0.safetensors', .*, 1 back in .*'1.safetensors', .* without privacy"),
  ((PLAIN, OPEN, RELEASE, OPEN), "'0.safetensors', .*, 3 back in .*'3.safetensors'"),
  ((RELEASE, PLAIN, OPEN, OPEN), "'1.safetensors', .*, 2 back in"),
  ((FOREIGN, PLAIN, OPEN), "'1.safetensors', .*, 1 back in"),
  ((TEST_KEY,), "was trained with the noise of a test key on data declared private"),
  ((TEST_KEY, OPEN, RELEASE), "2 back .* with the noise of a test key on data declared private"),
])  # fmt: skip
def test_private_records_are_refused_however_far_back(tmp_path, links, named):
  """Whatever was trained in between, and on what."""
  with pytest.raises(ValueError, match=named):
    weights.starting_warnings(_chain(tmp_path, *links))


@pytest.mark.parametrize(("links", "said"), [
  ((OPEN, OPEN), []),
  (({**TEST_KEY, "declared": "public"}, OPEN), []),
  ((RELEASE,), ["(3.211, 1e-05) for each patient under zero_out", "the guarantees add up"]),
  ((RELEASE, OPEN), ["those of '0.safetensors'", "(3.211, 1e-05) for each patient", "add up"]),
  ((RELEASE, OPEN, OPEN, OPEN), ["those of '0.safetensors'", "(3.211, 1e-05) for each", "add up"]),
  (({"protected": True}, OPEN), ["those of '0.safetensors'", "the guarantees add up"]),
  ((FOREIGN,), ["that the starting weights are public is taken from the configuration"]),
  ((FOREIGN, OPEN, OPEN), ["those of '0.safetensors'", "is taken from the configuration"]),
])  # fmt: skip
def test_what_is_said_is_said_however_far_back(tmp_path, links, said):
  found = weights.starting_warnings(_chain(tmp_path, *links))
  assert len(found) == bool(said)
  for part in said:
    assert part in found[0]


def test_of_several_releases_each_is_said(tmp_path):
  other = {**RELEASE, "guarantee": {**GUARANTEE, "epsilon": 1.0}}
  found = weights.starting_warnings(_chain(tmp_path, RELEASE, OPEN, other))
  assert ["(1.0, 1e-05)" in each for each in found] == [True, False]
  assert "(3.211, 1e-05)" in found[1] and all("add up" in each for each in found)
  assert all(len(each) <= 400 for each in found)  # the statement cuts there


@pytest.mark.parametrize("link", [OPEN, RELEASE])
def test_a_file_that_does_not_say_what_it_came_from_is_told_apart(tmp_path, link):
  """Of an earlier version, or saved by other code: also where it is further back."""
  for links in ([link], [link, link]):
    path = _chain(tmp_path, *links, traced=False)
    assert "which did not record what they started from" in weights.starting_warnings(path)[-1]
  newest = tmp_path / "new.safetensors"
  newest.write_bytes(weights.to_bytes(ARRAYS, SPEC, **OPEN, ancestry=weights.lineage(path)))
  said = weights.starting_warnings(newest)[-1]
  assert "those of '1.safetensors'" in said and "did not record what they started from" in said


def test_the_chain_is_whole_and_newest_first(tmp_path):
  path = _chain(tmp_path, FOREIGN, RELEASE, OPEN)
  found = weights.lineage(path)
  assert [each.name for each in found] == [f"{i}.safetensors" for i in (2, 1, 0)]
  assert [each.protected for each in found] == [False, True, None]
  assert found[1].epsilon == GUARANTEE["epsilon"] and from_list(to_list(found)) == found
  again = tmp_path / "again.safetensors"
  again.write_bytes(weights.to_bytes(ARRAYS, SPEC, ancestry=found))
  assert again.read_bytes() == weights.to_bytes(ARRAYS, SPEC, ancestry=found)
  with pytest.raises(ValueError, match=f"at most {MOST}"):
    merged(found, [Ancestor(f"{i}", None, None, None) for i in range(MOST)])


GOOD = Ancestor("a", "ab" * 32, protected=True, declared="private", **GUARANTEE).to_dict()


@pytest.mark.parametrize("entry", [
  7, {}, {**GOOD, "more": 1}, {**GOOD, "sha256": "ab"}, {**GOOD, "sha256": 7}, {**GOOD, "name": []},
  {**GOOD, "protected": "yes"}, {**GOOD, "protected": 1}, {**GOOD, "protected": None},
  {**GOOD, "declared": "Public"}, {**GOOD, "declared": None}, {**GOOD, "declared": ["public"]},
  {**GOOD, "test_key": 0}, {**GOOD, "traced": "no"}, {**GOOD, "epsilon": -1.0},
  {**GOOD, "epsilon": float("nan")}, {**GOOD, "epsilon": None}, {**GOOD, "delta": 2},
  {**GOOD, "unit": 3}, {**GOOD, "adjacency": "none"}, {**GOOD, "protected": False},
])  # fmt: skip
def test_a_forged_ancestry_is_one_clear_error(tmp_path, entry):
  about = {"model": SPEC.to_json(), "protected": False, "declared": "public", "ancestry": [entry]}
  _refused(tmp_path, about, "entry 0 of the ancestry")


@pytest.mark.parametrize(("change", "named"), [
  ({"ancestry": {}}, "no list of at most"), ({"ancestry": None}, "no list of at most"),
  ({"ancestry": [GOOD] * (MOST + 1)}, "no list of at most"),
  ({"protected": None}, "protected is None"), ({"protected": "true"}, "protected is 'true'"),
  ({"declared": "open"}, "declared is 'open'"), ({"test_key": True}, "test_key is true of what no"),
  ({"test_key": "no"}, "test_key is 'no'"), ({"guarantee": {"epsilon": 1}}, "guarantee is no"),
  ({"guarantee": GUARANTEE}, "go together, with protected"),
])  # fmt: skip
def test_a_forged_header_is_one_clear_error(tmp_path, change, named):
  about = {"model": SPEC.to_json(), "protected": False, "declared": "public", "ancestry": []}
  _refused(tmp_path, {**about, **change}, named)


@pytest.mark.parametrize("header", ["[", "[]", "7", "[" * 100_000])
def test_a_header_that_is_no_object_is_one_clear_error(tmp_path, header):
  _refused(tmp_path, header, "the header of .*(is not JSON|holds no JSON object)")


def test_arrays_of_a_dtype_that_cannot_be_read_are_one_clear_error(tmp_path):
  path = tmp_path / "narrow.safetensors"
  about = {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}
  head = json.dumps({"x": about}).encode()
  path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
  with pytest.raises(ValueError, match="holds arrays that cannot be read"):
    weights.lineage(path)


def _refused(folder, about, named):
  path = folder / "forged.safetensors"
  text = about if isinstance(about, str) else json.dumps(about)
  path.write_bytes(save(ARRAYS, {"dp_jax": text}))
  with pytest.raises(ValueError, match=named):
    weights.starting_warnings(path)


def test_names_are_short_lines_of_what_can_be_printed():
  found = Ancestor("a\n\x1b[31m<b>\u202e" + "x" * 500, None, None, None).name
  assert found.isprintable() and len(found) <= 60


def test_missing_words_are_read_as_the_worst():
  """What no one says is public was declared private."""
  path_about = {"model": SPEC.to_json(), "protected": False}
  found = weights.lineage_of(path_about, "ab" * 32, "a")
  assert found[0].is_exposed


def test_features_say_what_made_them():
  made = [{**GOOD, "sha256": "cd" * 32}, GOOD]
  origin = {"weights_sha256": "cd" * 32, "weights_ancestry": made}
  assert to_list(of_features(origin)) == made and of_features({}) == ()
  earlier = of_features({"weights_sha256": "cd" * 32, "weights": "runs/b.safetensors"})
  assert [(each.name, each.protected, each.traced) for each in earlier] == [
    ("b.safetensors", None, False)
  ]
  (known,) = of_features({"weights_sha256": "cd" * 32, "weights": "imagenet"})
  assert known.declared == "public" and known.traced
  for forged in ([], made[1:], "all", [{}]):
    with pytest.raises(ValueError, match="the manifest of the features is malformed"):
      of_features({**origin, "weights_ancestry": forged})
