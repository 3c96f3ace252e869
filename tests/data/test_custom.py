"""Sources of other people: what they are called with, what is filled in, and what is refused."""

import dataclasses
import sys
import threading
import typing

import numpy as np
import pytest
from support import one_label, small_config

from dp_jax.cli import main
from dp_jax.config.run_config import Config
from dp_jax.data import ArraySource, DataError, RecordError, SourceInfo, UnitLoader
from dp_jax.data.sources.custom import Records, as_source
from dp_jax.data.sources.opening import SOURCES, open_source, options_of
from dp_jax.data.sources.options import Context
from dp_jax.errors import UserError

CONTEXT = Context("m:f", value_range=(0.0, 1.0))
RECORDS = [
  {"inputs": [0.25, 0.5 * i], "label": i % 2, "patient": f"p{i // 2}", "age": 40 + i, "text": [i]}
  for i in range(6)
]
OTHERS = '''
"""Twenty made-up people with two records each, who are ill where the first number is large."""
import numpy as np

SEEN = []

class Made:
  def __init__(self, split, path, seed, people=20):
    SEEN.append((split, path, seed, people))
    self._x = np.random.default_rng([seed, split == "train"]).random((2 * people, 3))

  def __len__(self):
    return len(self._x)

  def __getitem__(self, index):
    x = self._x[index]
    return {"inputs": x, "label": int(x[0] > 0.5), "patient": index // 2}

def changing(split, path, seed):
  class Changing(Made):
    def __getitem__(self, index):
      return {**super().__getitem__(index), "inputs": np.random.random(3)}
  return Changing(split, path, seed)

def nothing(split, path, seed):
  return 7
'''


@pytest.fixture(name="others")
def _others(tmp_path, monkeypatch):
  (tmp_path / "others_source.py").write_text(OTHERS)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  yield tmp_path
  sys.modules.pop("others_source", None)


def _config(name="Made", **changes):
  data = {"source": f"others_source:{name}", "path": "somewhere", "seed": 3, "input_shape": [3],
          "num_classes": 2, "value_range": [0.0, 1.0], "declared": "public", **changes}  # fmt: skip
  privacy = {"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch", "unit": "patient"}
  return small_config(data=data, model={"name": "linear"}, train__steps=2, privacy=privacy)


def test_a_source_of_other_people_is_trained_and_evaluated_with(others):
  from dp_jax.runs.using import evaluate_release
  from dp_jax.training.run import train

  config = _config(kwargs={"people": 30})
  train(config, others / "run", progress=False)
  assert Config.from_dict(config.to_dict()) == config
  seen = sys.modules["others_source"].SEEN
  assert {("train", "somewhere", 3, 30), ("test", "somewhere", 3, 30)} == {*seen}
  bare = _config(kwargs={"people": 30}, input_shape=None, num_classes=None, value_range=None)
  assert 0 <= evaluate_release(others / "run" / "release", bare)["accuracy"] <= 1
  sys.modules.pop("others_source")
  (others / "others_source.py").unlink()  # which nothing else may need
  assert main(["verify", str(others / "run" / "release")]) == 0
  assert "others_source" not in sys.modules


@pytest.mark.parametrize(("name", "changes", "told"), [
  ("Made", {"kwargs": {"persons": 3}}, "does not fit the arguments.*'persons'"),
  ("Made", {"kwargs": {"seed": 3}}, "has 'seed', which data.source gets from its own key"),
  ("Made", {"value_range": None}, "does not say its value_range: declare data.value_range"),
  ("Made", {"input_shape": None}, "does not say its input_shape: declare data.input_shape"),
  ("Made", {"resize": "stretch"}, "data.resize='stretch' is for the source folder or csv or hf"),
  ("Made", {"declared": "private", "path": "x", "features": ["a"]}, "is for the source csv or hf"),
  ("missing", {}, "has none of that name"),
  ("nothing", {}, "is a int without __len__ and __getitem__"),
  ("changing", {}, "are not the same when they are read again"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_built(others, name, changes, told):
  from dp_jax.training.setup.prepare import prepare

  with pytest.raises(UserError, match=told):
    prepare(_config(name, **changes))


def test_kwargs_are_for_such_sources_alone():
  with pytest.raises(UserError, match=r"data\.kwargs=.* is for the source package.module:function"):
    small_config(data__kwargs={"n": 3})
  with pytest.raises(UserError, match=r"unknown key config\.data\.options"):
    small_config(data__options={})
  with pytest.raises(UserError, match="must be a dictionary"):
    _config(kwargs=3)


def test_what_only_has_records_gets_the_rest():
  source = as_source(RECORDS, "mine", CONTEXT)
  assert isinstance(source, Records) and len(source) == 6 and source.info.num_classes is None
  assert source.column("patient").tolist() == ["p0", "p0", "p1", "p1", "p2", "p2"]
  assert source.column("age").tolist() == [str(40 + i) for i in range(6)]
  with pytest.raises(DataError, match="no column 'text'"):
    source.column("text")
  loader = UnitLoader(source, one_label((2,), 2, (0.0, 1.0)), unit_ids=source.column("patient"))
  units, _ = loader.load(np.arange(3), 3)
  assert units["inputs"].dtype == np.float32 and units["record_mask"].all()
  np.testing.assert_array_equal(units["label"][:, 0], [0, 0, 0])
  # Without labels a record may have none.
  bare = [{"inputs": [0.0, 1.0]}]
  assert as_source(bare, "m", Context(value_range=(0, 1), labelled=False))[0]["label"] == 0
  with pytest.raises(RecordError, match="has no inputs"):
    as_source([{"label": 0}], "m", CONTEXT)[0]
  spec = one_label((2,), 2, (0.0, 1.0))
  loader = UnitLoader(as_source(bare, "m", CONTEXT), spec)  # what the task asks for, it needs
  assert not loader.load(np.arange(1), 1)[0]["record_mask"].any()
  assert loader.bad_records == {0: "has no label"}


def test_arrays_by_name_are_a_source_with_columns():
  x = np.arange(12, dtype=np.float32).reshape(4, 3)
  arrays = {"inputs": x, "label": np.arange(4) % 2, "patient": np.array(["a", "a", "b", "c"])}
  source = as_source(arrays, "mine", CONTEXT)
  assert source.column("patient").tolist() == ["a", "a", "b", "c"]
  assert source.info.input_shape == (3,) and source.info.label_shape == ()
  changed = {**arrays, "patient": np.array(["a", "b", "b", "c"])}
  assert as_source(changed, "mine", CONTEXT).fingerprint() != source.fingerprint()
  with pytest.raises(UserError, match="a row for each record"):
    as_source({**arrays, "label": np.zeros(3, int)}, "mine", CONTEXT)
  with pytest.raises(UserError, match="the name 'inputs'"):
    as_source({"x": x}, "mine", CONTEXT)


def test_the_fingerprint_is_over_all_content():
  def digest(records):
    return as_source(records, "mine", CONTEXT).fingerprint()

  before = digest(RECORDS)
  assert before == digest([dict(each) for each in RECORDS])
  others = [{"label": 0}, {"inputs": [0.25, 2.5000001]}, {"patient": "p3"}, {"text": [6]},
            {"text": [5, [6]]}, {"inputs": np.array([0.25, 2.5], np.float32)}]  # fmt: skip
  found = {digest([*RECORDS[:5], {**RECORDS[5], **each}]) for each in others}
  assert len(found) == len(others) and before not in found
  long = [{"inputs": np.zeros(5000), "label": 0, "more": [np.zeros(5000), "x"]} for _ in range(2)]
  first = digest(long)
  long[1]["more"][0][2500] = 1  # what a printed array leaves out
  assert digest(long) != first


def test_a_cell_is_a_function_of_its_own_value():
  """P19: that one record has another type moves no other record to another unit."""
  cells = [
    7,
    7.0,
    np.int64(7),
    np.array(7),
    "7",
    True,
    None,
    float("nan"),
    2.5,
    b"ann",
    [1],
    "x" * 2000,
  ]
  source = as_source([{"inputs": [0], "label": 0, "id": cell} for cell in cells], "m", CONTEXT)
  texts = source.column("id").tolist()
  assert texts[:11] == ["7"] * 5 + ["1", "", "", "2.5", "ann", ""]
  assert texts[11].startswith("sha256 ")


class _Faulty:
  """Every record is wrong in its own way."""

  errors = (KeyError("CANARY"), ValueError("CANARY"), FileNotFoundError(2, "x", "CANARY"))
  values = (
    3,
    {"label": 0},
    {"inputs": "CANARY", "label": 0},
    {"inputs": [[1], [1, 2]], "label": 0},
  )

  def __len__(self):
    return 7

  def __getitem__(self, index):
    if index < 3:
      raise self.errors[index]
    return self.values[index - 3]


def test_whatever_is_wrong_with_a_record_is_its_own_fault_and_not_told():
  """P15: a crash would tell of the record."""
  source = as_source(_Faulty(), "m", CONTEXT)
  found = [*source.gather(np.arange(7))]
  assert all(isinstance(each, RecordError) for each in found)
  assert "CANARY" not in " ".join(map(str, found))
  assert len(source.fingerprint()) == 64

  class Machine(_Faulty):
    def __getitem__(self, index):
      raise OSError(5, "no such drive", "CANARY")

  with pytest.raises(OSError, match="records cannot be read: no such drive") as error:
    as_source(Machine(), "m", CONTEXT)
  assert "CANARY" not in str(error.value)


def test_one_thread_at_a_time_reads():
  class Slow(list):
    busy = threading.Lock()

    def __getitem__(self, index):
      assert self.busy.acquire(blocking=False)
      record = super().__getitem__(index)
      self.busy.release()
      return record

  source = as_source(Slow(RECORDS * 50), "m", CONTEXT)
  indices, bad = np.arange(300), []
  read = lambda: bad.extend(r for r in source.gather(indices) if isinstance(r, RecordError))  # noqa: E731
  threads = [threading.Thread(target=read) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not bad


def test_what_is_a_source_already_stays_itself():
  info = SourceInfo("mine", 2, (1,), 2, (0.0, 1.0), input_dtype="float32")
  whole = ArraySource(info, np.zeros((2, 1), np.float32), np.zeros(2, np.int64))
  assert as_source(whole, "m", Context()) is whole

  class Partly(list):
    pass

  partly = Partly([{"inputs": [0], "label": 0}] * 2)
  partly.info = info
  assert as_source(partly, "m", Context()).info == info
  partly.append(partly[0])
  with pytest.raises(UserError, match="has 3 records, and its info says 2"):
    as_source(partly, "m", Context())
  for odd, told in (
    ({"inputs": [0]}, "is not indexed by number"),
    ("ab", "is not"),
    ([], "no rec"),
  ):
    with pytest.raises(UserError, match=told):
      as_source(odd, "m", CONTEXT)


def test_keys_that_several_sources_have_are_of_one_type():
  """Files and flags have one key for all of them."""
  keys = {}
  for kind in SOURCES.values():
    hints, default = typing.get_type_hints(kind), kind()
    for name in (field.name for field in dataclasses.fields(kind)):
      found = hints[name], getattr(default, name)
      assert keys.setdefault(name, found) == found, name
  assert options_of("tfds:mnist:3.0.1") is SOURCES["tfds:NAME"]
  assert options_of("a.b:c") is SOURCES["package.module:function"]
  with pytest.raises(UserError, match="the source npz has no key 'features'"):
    open_source("npz", "train", path="x", features=("a",))
