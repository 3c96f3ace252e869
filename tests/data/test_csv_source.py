"""Tables: features by declared ranges, labels, splits by person, and cells that cannot be read."""

import dataclasses
import hashlib
import re

import numpy as np
import pytest
from PIL import Image
from support import one_label

from dp_jax.data import RecordError, UnitLoader, check_records, open_source
from dp_jax.data.sources.csv_source import Csv
from dp_jax.data.sources.source import Unlabelled, telling

SPEC = Csv(
  label_columns=("ill",), class_names=("no", "yes"), features=("age", "bp"),
  feature_ranges=((0.0, 100.0), (50.0, 150.0)),
)  # fmt: skip
HEADER = "person,age,bp,ill,sex\n"


def open_text(folder, text, spec=SPEC, **options):
  """A split that holds this text."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "train.csv").write_text(text) if isinstance(text, str) else (
    folder / "train.csv"
  ).write_bytes(text)
  return open_source("csv", "train", spec, path=str(folder), **options)


def test_features_are_scaled_by_declared_ranges_and_clipped(tmp_path):
  source = open_text(tmp_path, HEADER + 'a,50,50,no,f\n"b",0, 150 ,yes,\nc,1000,-7,no,m\n')
  assert len(source) == 3 and source.info.input_shape == (2,)
  assert source.info.class_names == ("no", "yes") and source.info.value_range == (-1, 1)
  batch = source.gather(np.arange(3))
  assert batch["inputs"].dtype == np.float32
  np.testing.assert_array_equal(batch["inputs"], [[0, -1], [-1, 1], [1, -1]])
  np.testing.assert_array_equal(batch["label"], [0, 1, 0])
  np.testing.assert_array_equal(source[1]["inputs"], [-1, 1])
  assert source.column("sex").tolist() == ["f", "", "m"]
  told = "no column 'weight'; its columns: person, age, bp, ill, se"
  with pytest.raises(ValueError, match=told), telling(True):
    source.column("weight")


def test_what_one_row_holds_changes_no_other(tmp_path):
  """Scaling and imputation come from the declaration: P19's spirit for values."""
  rows = ["a,50,70,no,f", "b,,120,yes,m", "c,30,NA,no,m"]
  before = open_text(tmp_path / "a", HEADER + "\n".join(rows)).gather(np.arange(3))["inputs"]
  for other in ("b,99,51,no,f", "b,1e30,-1e30,yes,"):
    changed = HEADER + "\n".join([rows[0], other, rows[2]])
    after = open_text(tmp_path / "b", changed).gather(np.arange(3))["inputs"]
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])


def test_a_missing_value_is_the_declared_one_and_may_be_shown(tmp_path):
  text = HEADER + "a,,70,no,f\nb,40,NaN,yes,m\n"
  middle = open_text(tmp_path, text).gather(np.arange(2))["inputs"]
  np.testing.assert_allclose(middle, [[0, -0.6], [-0.2, 0]], atol=1e-6)
  spec = dataclasses.replace(SPEC, feature_defaults=(20.0, 60.0), missing_indicators=True)
  source = open_text(tmp_path, text, spec)
  assert source.info.input_shape == (4,)
  np.testing.assert_allclose(
    source.gather(np.arange(2))["inputs"], [[-0.6, -0.6, 1, 0], [-0.2, -0.8, 0, 1]], atol=1e-6
  )


def test_a_row_that_cannot_be_read_keeps_its_place_with_zero_weight(tmp_path):
  rows = ["a,50,100,no,f", "b,old,100,no,f", "c,50,100", "d,50,inf,no,f", "e,50,100,maybe,f",
          "f,50,100,,f", "g,50,100,yes,f,1", "h,50,100,yes,f"]  # fmt: skip
  source = open_text(tmp_path, HEADER + "\n".join(rows))
  record = one_label((2,), 2, (-1.0, 1.0))
  loader = UnitLoader(source, record)
  units, mask = loader.load(np.arange(8), 8)
  assert mask.all()
  np.testing.assert_array_equal(np.flatnonzero(units["record_mask"][:, 0]), [0, 7])
  np.testing.assert_array_equal(units["label"][:, 0], [0, 0, 0, 0, 0, 0, 0, 1])
  assert not units["inputs"][1:7].any()
  assert loader.bad_records == {
    1: "column 'age' holds what is no finite number",
    2: "the row has 3 cells, not 5",
    3: "column 'bp' holds what is no finite number",
    4: "column 'ill' holds what is no label",
    6: "the row has 6 cells, not 5",
  }
  assert source.column("person").tolist() == ["a", "b", "", "d", "e", "f", "", "h"]
  with pytest.raises(RecordError, match="no finite number"):
    source[1]
  with pytest.raises(Unlabelled):
    source[5]
  with pytest.raises(ValueError, match=r"record 1 of train.csv/train: column 'age'"):
    check_records(source, record)


def test_a_label_to_be_ignored_is_no_mistake(tmp_path):
  text = HEADER + "a,1,60,-1,f\nb,1,60,,f\nc,1,60,yes,f\nd,1,60,-1.0,f\n"
  source = open_text(tmp_path, text)
  record = one_label((2,), 2, (-1.0, 1.0))
  check_records(source, record)
  loader = UnitLoader(source, record, strict=True)
  units, _ = loader.load(np.arange(4), 4)
  np.testing.assert_array_equal(units["record_mask"][:, 0], [False, False, True, False])
  assert loader.bad_records == {}
  for uncertain, blank, labels in (
    ("ones", "zeros", [1, 0, 1, 1]), ("zeros", "zeros", [0, 0, 1, 0]),
  ):  # fmt: skip
    spec = dataclasses.replace(SPEC, uncertain=uncertain, blank=blank)
    labelled = open_text(tmp_path, text, spec)
    np.testing.assert_array_equal(labelled.gather(np.arange(4))["label"], labels)


def test_several_labels_of_yes_no_and_unknown(tmp_path):
  """As CheXpert writes them: 1.0, 0.0, -1.0 for uncertain, blank for not mentioned."""
  spec = dataclasses.replace(SPEC, label_columns=("edema", "fracture"), class_names=())
  text = "age,bp,edema,fracture\n1,60,1.0,\n2,60,-1.0,0.0\n3,60,5,1\n"
  source = open_text(tmp_path, text, spec)
  assert source.info.label_shape and source.info.class_names == ("edema", "fracture")
  np.testing.assert_array_equal(source.gather(np.arange(2))["label"], [[1, -1], [-1, 0]])
  loader = UnitLoader(source, one_label((2,), 2, (-1.0, 1.0), several=True))
  units, _ = loader.load(np.arange(3), 4)
  assert units["label"].dtype == np.float32
  np.testing.assert_array_equal(units["label"][:, 0], [[1, -1], [-1, 0], [0, 0], [0, 0]])
  np.testing.assert_array_equal(units["record_mask"][:, 0], [True, True, False, False])
  assert loader.bad_records == {2: "column 'edema' holds what is no label"}
  known = dataclasses.replace(spec, uncertain="ones", blank="zeros")
  labels = open_text(tmp_path, text, known).gather(np.arange(2))["label"]
  np.testing.assert_array_equal(labels, [[1, 0], [1, 0]])


def test_all_rows_of_a_person_are_on_one_side(tmp_path):
  """And which side depends on that person's id alone."""
  people = [f"p{i % 400}" for i in range(1000)]
  spec = dataclasses.replace(SPEC, eval_fraction=0.25)

  def split(people, seed=0):
    file = tmp_path / "all.csv"
    file.write_text(HEADER + "".join(f"{each},1,60,no,f\n" for each in people))
    train, test = (
      open_source("csv", name, spec, path=str(file), unit="person", seed=seed)
      .column("person")
      .tolist()
      for name in ("train", "test")
    )
    assert len(train) + len(test) == len(people)
    return set(train), set(test)

  train, test = split(people)
  assert not train & test and len(train | test) == 400
  assert 70 < len(test) < 130
  fewer, held_out = split([each for each in people if each != "p7"])
  assert train - fewer <= {"p7"} and test - held_out <= {"p7"}
  assert split(people, seed=1)[1] != test
  with_blank, test_with_blank = split([*people, ""])
  assert "" in with_blank and test_with_blank == test


def test_a_column_may_name_the_split(tmp_path):
  file = tmp_path / "all.csv"
  file.write_text("age,bp,ill,part\n1,60,no,train\n2,60,no,test\n3,60,yes,train\n")
  spec = dataclasses.replace(SPEC, split_column="part")
  train = open_source("csv", "train", spec, path=str(file))
  assert train.column("age").tolist() == ["1", "3"]
  other = open_source("csv", "test", spec, path=str(file))
  assert len({train.fingerprint(), other.fingerprint()}) == 2
  with pytest.raises(ValueError, match=r"all.csv/validation has no rows"):
    open_source("csv", "validation", spec, path=str(file))


def test_images_by_path(tmp_path):
  (tmp_path / "scans").mkdir()
  for name, value in (("a", 0), ("b", 255)):
    Image.fromarray(np.full((6, 6, 3), value, np.uint8)).save(tmp_path / "scans" / f"{name}.png")
  (tmp_path / "scans" / "c.png").write_bytes(b"no image")
  spec = Csv(label_columns=("ill",), class_names=("no", "yes"), image_column="file")
  text = "file,ill\nscans/a.png,no\nscans/b.png,yes\nscans/c.png,no\nscans/gone.png,no\n,no\n"
  source = open_text(tmp_path, text, spec, input_shape=(4, 4, 1))
  assert source.info.input_shape == (4, 4, 1) and source.info.read_on_demand
  np.testing.assert_array_equal(source[1]["inputs"], np.full((4, 4, 1), 255))
  loader = UnitLoader(source, one_label((4, 4, 1), 2, (0.0, 255.0)))
  units, _ = loader.load(np.arange(5), 5)
  np.testing.assert_array_equal(units["record_mask"][:, 0], [True, True, False, False, False])
  assert set(loader.bad_records) == {2, 3, 4}
  rooted = dataclasses.replace(spec, image_root=str(tmp_path / "scans"))
  text = "file,ill\na.png,no\n"
  assert not open_text(tmp_path / "csv", text, rooted, input_shape=(4, 4, 1))[0]["inputs"].any()


def test_cells_that_are_no_utf8_matter_only_where_they_are_read(tmp_path):
  source = open_text(tmp_path, HEADER.encode() + b"a,1,60,no,\xff\nb,\xff,60,no,m\n")
  assert source.column("sex")[1] == "m"
  assert set(source.gather(np.arange(2))[0]) == {"inputs", "label"}
  with pytest.raises(RecordError, match="column 'age'"):
    source[1]


def test_rows_keep_their_place_across_blocks_of_a_long_file(tmp_path):
  """The reader takes a megabyte at a time, and numbers what it leaves out."""
  rows = [f"{i},50,100,no,{'f' * 20}" for i in range(60_000)]
  for bad in (7, 30_000, 59_999):
    rows[bad] += ",1"
  source = open_text(tmp_path, HEADER + "\n".join(rows))
  people = source.column("person")
  assert np.flatnonzero(people == "").tolist() == [7, 30_000, 59_999]
  assert people[[0, 8, 29_999, 30_001, 59_998]].tolist() == ["0", "8", "29999", "30001", "59998"]


@pytest.mark.parametrize("rows", [
  ['a,50,70,"no,f', "b,40,60,yes,m"],  # to the end of the file
  ['"a,50,70,no,f', 'b,40,60,yes,"m"', "c,30,80,no,m"],  # up to the next quote
  ['a,50,70,no,"f', "b,40,60,yes,m", 'c,30,80,no,"m'],
])  # fmt: skip
def test_a_quote_that_nothing_closes_is_refused(tmp_path, rows):
  """P19: else one row takes in others."""
  with pytest.raises(ValueError, match=r"has a quote that nothing closes") as error:
    open_text(tmp_path, HEADER + "\n".join(rows))
  said = str(error.value).replace(str(tmp_path), "")
  assert not re.search(r"\d", said), "neither a cell nor where it is"


def test_quotes_that_are_closed_are_read(tmp_path):
  rows = ['"a, ""b""",50,70,no,"f\nm"', 'c 5" tall,40,60,"yes",m', f'"{"x" * 200_000}",1,2,no,f']
  source = open_text(tmp_path, HEADER + "\n".join(rows))
  hashed = f"sha256 {hashlib.sha256(b'x' * 200_000).hexdigest()}"  # P15: else all take its width
  assert source.column("person").tolist() == ['a, "b"', 'c 5" tall', hashed]
  assert source.column("sex").tolist() == ["f\nm", "m", "f"]


@pytest.mark.parametrize(("changes", "message"), [
  ({"features": ()}, r"needs data\.features or data\.image_column, one of them"),
  ({"image_column": "file"}, r"needs data\.features or data\.image_column, one of them"),
  ({"feature_ranges": ()}, "0 entries for the 2 of data.features"),
  ({"feature_ranges": ((0.0, 1.0), (2.0, 2.0))}, r"bp needs \(low, high\), low < high"),
  ({"feature_defaults": (1.0,)}, "must have one value for each"),
  ({"class_names": ()}, "needs data.class_names"),
  ({"label_columns": ()}, "needs data.class_names"),
  ({"label_columns": ("a", "b")}, "which are the classes themselves"),
  ({"class_names": ("no", "no")}, "names a class twice"),
  ({"class_names": ("a", "b", "c"), "uncertain": "ones"}, "not for 3 classes"),
  ({"label_columns": ("age",)}, "column 'age' is used twice"),
  ({"eval_fraction": 0.2}, "needs privacy.unit to name a column"),
  ({"eval_fraction": 2.0, "unit": "person"}, "must lie between 0 and 1"),
])  # fmt: skip
def test_a_declaration_that_contradicts_itself_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    open_source("csv", "train", SPEC, path="x", **changes)


def test_files_that_are_no_tables_are_refused(tmp_path):
  for content, message in (
    (b"", "its first line must name the columns"),
    (b"\xff,b\n1,2\n", "its first line must name the columns"),
    (b"age,bp,age\n1,2,3\n", "has the columns age more than once"),
    (HEADER.encode(), "has no rows"),
    (b"person,age\n1,2\n", "no column 'ill'"),
  ):
    with pytest.raises(ValueError, match=message), telling(True):
      open_text(tmp_path, content)
  with pytest.raises(ValueError, match=r"cannot read '.*test.csv': No such file"):
    open_source("csv", "test", SPEC, path=str(tmp_path))
  for path, spec in (
    (str(tmp_path / "train.csv"), SPEC),
    (str(tmp_path), dataclasses.replace(SPEC, split_column="part")),
  ):
    with pytest.raises(ValueError, match=r"must be a folder with train.csv, or a file with data.s"):
      open_source("csv", "train", spec, path=path)
  with pytest.raises(ValueError, match=r"set data\.path"):
    open_source("csv", "train", SPEC)


def test_without_labels_there_need_be_no_label_column(tmp_path):
  source = open_text(tmp_path, "age,bp\n50,100\n60,-1\n", labelled=False)
  assert source.gather(np.arange(2))["label"].tolist() == [0, 0]
  several = dataclasses.replace(SPEC, label_columns=("a", "b"), class_names=())
  source = open_text(tmp_path, "age,bp\n50,100\n", several, labelled=False)
  np.testing.assert_array_equal(source[0]["label"], [-1, -1])


def test_images_are_decoded_as_declared(tmp_path):
  """resize, crop_fraction and interpolation reach the decoder."""
  pixels = np.random.default_rng(0).integers(0, 255, (9, 12), np.uint8)
  Image.fromarray(pixels).save(tmp_path / "a.png")
  spec = Csv(label_columns=("ill",), class_names=("no", "yes"), image_column="file")
  kinds = ({}, {"resize": "stretch"}, {"crop_fraction": 0.5}, {"interpolation": "bicubic"})
  text = "file,ill\na.png,no\n"
  seen = [open_text(tmp_path, text, spec, input_shape=(6, 6, 1), **options) for options in kinds]
  assert len({source[0]["inputs"].tobytes() for source in seen}) == 4
  assert len({source.fingerprint() for source in seen}) == 4
