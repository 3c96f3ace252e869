"""The config of a real table: clinical measurements with gaps, people as units."""

import json

import numpy as np
from sklearn.metrics import roc_auc_score

import dp_jax
from configs.nhanes_mortality import get_config
from dp_jax.config.run_config import Config
from dp_jax.training.run import train
from dp_jax.training.setup.open_data import read_groups
from dp_jax.training.setup.prepare import prepare


def test_death_within_ten_years(shared_data, tmp_path):
  values = get_config()
  values.data.path = str(shared_data / "nhanes_mortality.csv")
  config = Config.from_dict(values.to_dict())
  # What the file says of these data holds for them: elsewhere they would be private.
  assert config.data.declared == "public" and "twenty" in config.privacy.hyperparameter_selection
  train(config, tmp_path / "run", progress=False)
  run = prepare(config)
  held_out = run.eval_loader.source
  assert run.loader.num_units == 7990 and len(held_out) == 1927
  people = run.loader.source.column("person_id")
  assert not set(people) & set(held_out.column("person_id"))
  batch = held_out.gather(np.arange(1927))
  scores = dp_jax.load_release(tmp_path / "run").predict(batch["inputs"])[:, 1]
  assert roc_auc_score(batch["label"], scores) > 0.82
  groups = read_groups(config.data, held_out)
  assert set(groups["age"]) == {"below 40", "40 to 60", "60 and above"}
  assert set(groups["sex"]) == {"female", "male"}
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  assert record["epsilon"] <= 1.0 and record["unit"] == "person_id"
  assert record["treated_as_public"]["records_left_out"] == 0
  assert "its first record; none has more" in record["statement"]
