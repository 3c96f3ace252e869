"""Features of a table of images whose held-out part is a share of the people."""

import jax.numpy as jnp
import pytest
from PIL import Image
from support import small_config

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.files import base_features_config
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.models.pretrained.ancestry import Ancestor
from dp_jax.models.pretrained.backbones import Backbone
from dp_jax.runs import extract_features as features
from dp_jax.runs.extract_features import extract_features
from dp_jax.training.setup.prepare import prepare

PEOPLE = 20


@pytest.fixture(autouse=True)
def tiny_backbone(monkeypatch):
  """The mean of each channel."""

  def load(*_, **__):
    def forward(arrays, inputs):
      return inputs.astype(jnp.float32).mean(axis=(1, 2)) * arrays["scale"]

    lineage = (Ancestor("means", "ab" * 32, protected=False, declared="public"),)
    return Backbone(
      {"scale": jnp.float32(0.01)}, "ab" * 32, (), 3, forward, {"layers": ["means"]}, lineage
    )

  monkeypatch.setattr(features, "load_backbone", load)


@pytest.fixture
def table(tmp_path):
  """Two images of each person."""
  lines = ["path,ill,patient"]
  for i in range(2 * PEOPLE):
    Image.new("RGB", (8, 8), (i, 2 * i, 3 * i)).save(tmp_path / f"{i}.png")
    lines.append(f"{i}.png,{i % 2},p{i // 2}")
  (tmp_path / "table.csv").write_text("\n".join(lines))
  return tmp_path / "table.csv"


def _config(table, **privacy):
  values = base_features_config().to_dict()
  values["data"] |= {
    "source": "csv", "path": str(table), "image_column": "path", "input_shape": [8, 8, 3],
    "label_columns": ["ill"], "class_names": ["0", "1"], "eval_fraction": 0.3,
  }  # fmt: skip
  values["privacy"] |= privacy
  return FeaturesConfig.from_dict(values)


def test_the_split_is_by_person_and_their_ids_are_kept_for_training(table, tmp_path):
  manifest = extract_features(_config(table, unit="patient"), tmp_path / "out", progress=False)
  assert manifest["columns"] == ["patient"]
  people = [{*NpyShards(str(tmp_path / "out"), s).column("patient")} for s in ("train", "test")]
  assert all(people) and not people[0] & people[1] and len(people[0] | people[1]) == PEOPLE
  data = {"source": "npy", "path": str(tmp_path / "out"), "max_records_per_unit": 2}
  run = prepare(small_config(data=data, model={"name": "linear"}, privacy__unit="patient"))
  assert run.loader.num_units == len(people[0]) and run.loader.members.shape[1] == 2
  # The same people as in a run on the images themselves.
  same = {k: v for k, v in _config(table).data.to_dict().items() if v is not None}
  image_run = prepare(small_config(data=same, privacy__unit="patient"))
  assert {*image_run.eval_loader.source.column("patient")} == people[1]


def test_without_a_column_of_units_one_key_is_named_that_there_is(table, tmp_path):
  with pytest.raises(ValueError, match=r"needs privacy\.unit to name a column"):
    extract_features(_config(table), tmp_path / "out", progress=False)
  with pytest.raises(ValueError, match="has no column 'person'"):
    extract_features(_config(table, unit="person"), tmp_path / "out", progress=False)
  with pytest.raises(ValueError, match=r"privacy\.unit='' must name a column"):
    _config(table, unit="")
  assert not (tmp_path / "out").exists()


def test_images_that_cannot_be_read_at_all_are_refused(table, tmp_path):
  for image in tmp_path.glob("*.png"):
    image.unlink()
  with pytest.raises(ValueError, match="none of the first 64 records of the split 'train'"):
    extract_features(_config(table, unit="patient"), tmp_path / "out", progress=False)
  assert not (tmp_path / "out").exists()
