"""What a configuration says of one data set does not hold for another."""

import hashlib
import json

import numpy as np
import pytest
from support import ROOT, small_config, write_npz

from configs import cifar10_features, digits, digits_finetune, nhanes_mortality, rendered_digits
from dp_jax import cli
from dp_jax.config.run_config import Config
from dp_jax.training.run import train

CHOSEN = "Chosen by looking at these very records"


def _config(declared=None, chosen=None, **facts) -> Config:
  values = small_config(train__steps=1).to_dict()
  values["data"]["declared"] = declared
  values["privacy"]["hyperparameter_selection"] = chosen
  about = {"source": "digits", "declared": "public", "hyperparameter_selection": CHOSEN}
  return Config.from_dict({**values, "facts": about | facts})


def test_facts_hold_for_the_data_that_they_name():
  config = _config()
  assert config.data.declared == "public"
  assert config.privacy.hyperparameter_selection == CHOSEN
  assert "facts" not in config.to_dict()  # they stand in the sections that they are about
  assert Config.from_dict(config.to_dict()) == config


def test_what_is_given_comes_before_a_fact():
  config = _config("private", "Chosen on public data")
  assert config.data.declared == "private"
  assert config.privacy.hyperparameter_selection == "Chosen on public data"


def test_other_data_are_declared_anew_and_nothing_is_said_of_the_choice(tmp_path):
  with pytest.raises(ValueError, match=r"say --config\.data\.declared=private"):
    _config(source="rendered_digits")
  for declared in ("private", "public"):
    config = _config(declared, source="rendered_digits")
    assert config.data.declared == declared
    assert config.privacy.hyperparameter_selection is None
  train(config, tmp_path / "run", progress=False)
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  assert "not recorded" in record["hyperparameter_selection"]


def test_what_is_not_declared_is_private():
  values = small_config().to_dict()
  values["data"]["declared"] = None
  assert Config.from_dict(values).data.declared == "private"
  del values["data"]["declared"]
  assert Config.from_dict(values).data.declared == "private"


def test_a_file_is_known_by_its_content(tmp_path):
  arrays = np.zeros((8, 4, 4, 1), np.float32), np.arange(8) % 2
  file = write_npz(tmp_path, *arrays, splits=("train",)) / "train.npz"
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  values = small_config().to_dict()
  values["data"] = {"source": "npz", "path": str(file), "num_classes": 2}
  values["facts"] = {"source": "npz", "sha256": digest, "declared": "public"}
  assert Config.from_dict(values).data.declared == "public"
  file.write_bytes(file.read_bytes() + b"0")
  with pytest.raises(ValueError, match=f"sha256 {digest[:16]}"):
    Config.from_dict(values)
  values["data"]["path"] = str(tmp_path / "nowhere.npz")
  with pytest.raises(ValueError, match="are other data"):
    Config.from_dict(values)


@pytest.mark.parametrize(
  "module", [cifar10_features, digits, digits_finetune, nhanes_mortality, rendered_digits]
)
def test_a_shipped_configuration_states_nothing_of_other_data(module):
  """The broken variant: `declared` and the choice of settings as plain keys of the file."""
  values = module.get_config().to_dict()
  assert values["data"]["declared"] is None
  assert values["privacy"]["hyperparameter_selection"] is None
  values["data"] |= {"source": "npz", "path": "of_a_hospital.npz"}
  with pytest.raises(ValueError, match="are other data"):
    Config.from_dict(values)


def test_a_template_with_other_data_ends_in_one_line(tmp_path, capsys):
  path = write_npz(tmp_path / "own", np.zeros((8, 8, 8, 1), np.uint8), np.arange(8) % 2)
  arguments = [
    "train", f"--config={ROOT / 'configs' / 'digits.py'}", f"--workdir={tmp_path / 'run'}",
    "--config.data.source=npz", f"--config.data.path={path}", "--config.data.num_classes=2",
  ]  # fmt: skip
  assert cli.main(arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: this configuration declares digits to be public")
  assert error.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "said"), [
  (["--config.privacy.epsilon=1", "--config.train.microbatch_size=64", "--config.seed=3"], ""),
  (["--config.train.learning_rate=7"], "; for this run train.learning_rate was set anew, how"),
  (
    ["--config.privacy.sampling_rate=none", "--config.privacy.expected_batch_size=64",
     "--config.model.kwargs.widths=(8,)"],
    "; for this run model.kwargs.widths, privacy.expected_batch_size, privacy.sampling_rate were"
    " set anew",
  ),
])  # fmt: skip
def test_what_a_flag_sets_was_not_chosen_as_the_file_says(monkeypatch, flags, said):
  """The broken variant: "chosen among four settings" of a rate that is none of them."""
  found = []
  monkeypatch.setattr("dp_jax.training.run.train", lambda config, *_, **__: found.append(config))
  argv = ["train", f"--config={ROOT / 'configs' / 'digits.py'}", "--workdir=x", *flags]
  cli.main(argv)  # there is no result
  chosen = found[0].privacy.hyperparameter_selection
  own = digits.get_config().facts.hyperparameter_selection
  assert chosen == own if not said else chosen.startswith(own + said)


@pytest.mark.parametrize("source", ["digits", "rendered_digits"])
def test_a_path_that_is_not_read_is_refused(source):
  """Else a template trains on its own data, and says so of nothing."""
  with pytest.raises(ValueError, match=f"'own.npz' is not read by the source {source}: set data.s"):
    small_config(data={"source": source, "path": "own.npz"})


@pytest.mark.parametrize("changes", [
  {"resize": "stretch"}, {"crop_fraction": 0.5}, {"interpolation": "bicubic"}
])  # fmt: skip
def test_how_images_are_decoded_is_refused_where_none_are(changes):
  (name,) = changes
  for source in ("digits", "npz", "npy", "tfds:mnist"):
    with pytest.raises(ValueError, match=rf"data\.{name}=.* is for the source folder or csv or hf"):
      small_config(data={"source": source, **changes})
  for data in ({"source": "folder"}, {"source": "hf"}, {"source": "csv", "image_column": "x"}):
    small_config(data={**data, **changes})
