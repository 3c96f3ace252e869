"""What a flag of a configuration can say: none unsets a key, and commas separate names."""

import pytest
from support import ROOT

from dp_jax import cli
from dp_jax.commands import overrides
from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.run_config import Config

KINDS = (Config, FeaturesConfig)
DIGITS = f"--config={ROOT / 'configs' / 'digits.py'}"


@pytest.mark.parametrize(
  ("given", "wanted"),
  [
    (["--config.privacy.sampling_rate=none"], ["--unset_key=privacy.sampling_rate"]),
    (["--config.privacy.sampling_rate", "None"], ["--unset_key=privacy.sampling_rate"]),
    (["-config.data.declared=NONE"], ["--unset_key=data.declared"]),
    (["--config.model.weights=none"], ["--unset_key=model.weights"]),
    (["--config.data.features=age,bmi"], ["--config.data.features=('age', 'bmi')"]),
    (["--config.data.features=age, bmi"], ["--config.data.features=('age', 'bmi')"]),
    (["--config.data.class_names=0,1"], ["--config.data.class_names=('0', '1')"]),
    (["--config.data.groups=sex"], ["--config.data.groups=('sex',)"]),
    (["--config.data.features=('a,b', 'c')"], ["--config.data.features=('a,b', 'c')"]),
    (["--config.model.kwargs.widths=(8, 16)"], ["--set_key=model.kwargs.widths=(8, 16)"]),
    (["--config.train.tensorboard", "--json"], ["--config.train.tensorboard", "--json"]),
    (["--config.privacy.epsilon"], ["--config.privacy.epsilon"]),
    (["--config.nothing.here=none", "x"], ["--config.nothing.here=none", "x"]),
    (["--config.data.augment=none"], ["--config.data.augment=none"]),
    (["--config.solver.method=none"], ["--config.solver.method=none"]),
    (["--workdir=none", DIGITS], ["--workdir=none", DIGITS]),
    (["--config.train.epochs=none", "--config.train.epochs=2"], ["--config.train.epochs=2"]),
    (["--config.backbone.columns=a,b"], ["--config.backbone.columns=('a', 'b')"]),
  ],
)
def test_overrides_become_what_the_parser_reads(given, wanted):
  assert overrides.rewrite(given, KINDS) == wanted


@pytest.mark.parametrize("key", ["train.learning_rate", "train.ema", "seed", "privacy.enabled"])
def test_a_key_that_is_needed_cannot_be_unset(key, capsys, tmp_path):
  arguments = ["train", DIGITS, f"--workdir={tmp_path / 'run'}", f"--config.{key}=none"]
  assert cli.main(arguments) == 2
  assert f"--config.{key}=none: this key cannot be unset" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--config.privacy.expected_batch_size=64"],
     "privacy.sampling_rate=0.25 and privacy.expected_batch_size=64.0 both say"),
    (["--config.train.epochs=3"], "train.steps=80 and train.epochs=3.0: set exactly one"),
    (["--config.train.steps=none"], "train.steps=None and train.epochs=None: set exactly one"),
    (["--config.privacy.sampling=full_batch", "--config.privacy.sampling_rate=none",
      "--config.privacy.expected_batch_size=64"], "has no meaning under sampling 'full_batch'"),
    (["--config.train.optimizer=adam", "--config.train.momentum=0.5"], "momentum=0.5 is of sgd"),
    (["--config.data.min_crop_area=0.5"], "data.min_crop_area=0.5 is of random_resized_crop"),
    (["--config.data.source=folder", "--config.data.resize=stretch",
      "--config.data.crop_fraction=0.5"], "is of centre_crop"),
  ],
)  # fmt: skip
def test_of_two_keys_for_one_thing_neither_wins(flags, said, capsys, tmp_path):
  """The broken variant: the rate draws, and the other one divides."""
  assert cli.main(["train", DIGITS, f"--workdir={tmp_path / 'run'}", *flags]) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "run").exists()


class _Done:
  def summary(self):
    return "done"


def test_what_a_file_sets_can_be_unset(tmp_path, monkeypatch):
  from dp_jax.training import run

  seen = []
  monkeypatch.setattr(run, "train", lambda config, *_, **__: seen.append(config) or _Done())
  flags = ["--config.privacy.sampling_rate=none", "--config.privacy.expected_batch_size=64",
           "--config.train.steps=none", "--config.train.epochs=2"]  # fmt: skip
  assert cli.main(["train", DIGITS, f"--workdir={tmp_path / 'run'}", *flags]) == 0
  (config,) = seen
  assert (config.privacy.sampling_rate, config.privacy.expected_batch_size) == (None, 64)
  assert (config.train.steps, config.train.epochs) == (None, 2)


def test_zero_steps_have_spent_nothing(capsys):
  arguments = ["--noise_multiplier=1", "--delta=1e-5", "--sampling_rate=.1", "--json"]
  assert cli.main(["epsilon", "--steps=0", *arguments]) == 0
  assert '"epsilon": 0.0' in capsys.readouterr().out
  assert cli.main(["epsilon", "--steps=-1", *arguments]) == 2
