"""Death within ten years from age and clinical measurements, (1, 1e-5)-DP for each person.

Command:   python -m dp_jax train --config=configs/nhanes_mortality.py --workdir=runs/nhanes
           --config.data.path=FOLDER/nhanes_mortality.csv
           without privacy: --config.privacy.enabled=False
Time:      10 seconds of processor time on x86 (2026-11-30).
Expected:  AUROC 0.835 to 0.840 on 1,927 people held out by a hash of their id (0.838 without
           privacy, 0.838 by scikit-learn's logistic regression), accuracy 85.1 to 85.5% where
           85.1% are alive after ten years, cross-entropy 0.318 to 0.322 (0.319 without privacy).
Data:      NHANES I with ten years of follow-up, 9,917 people (a US government survey, in the form
           that the package shap gives it): age, 15 measurements with gaps, sex, race.
"""

from ml_collections import ConfigDict

from dp_jax.config.files import base_config

# Ranges of adults that a textbook gives, with room for disease; none is read off the data.
RANGES = {
  "age": (20, 90),
  "diastolic_bp": (40, 130),
  "poverty_index": (0, 1000),
  "red_blood_cells": (25, 65),
  "sedimentation_rate": (0, 60),
  "serum_albumin": (2.5, 6),
  "serum_cholesterol": (100, 400),
  "serum_iron": (20, 200),
  "serum_magnesium": (1.2, 2.4),
  "serum_protein": (5, 9),
  "systolic_bp": (80, 220),
  "tibc": (200, 550),
  "ts": (5, 70),
  "white_blood_cells": (3, 15),
  "bmi": (15, 45),
  "pulse_pressure": (20, 120),
}


def get_config() -> ConfigDict:
  """One unit a person; a fifth of the people, by a hash of their id, is held out."""
  config = base_config()
  config.data.source = "csv"
  # True of this file alone; on other data nothing of it holds.
  config.facts.source = "csv"
  config.facts.sha256 = "0e756804ca03a69afa5db6f9dfb60a50ae481dff8ed532baab269590f821939a"
  config.facts.declared = "public"
  config.data.features = tuple(RANGES)
  config.data.feature_ranges = tuple(RANGES.values())
  config.data.missing_indicators = True
  config.data.label_columns = ("died_within_10_years",)
  config.data.class_names = ("0", "1")
  config.data.eval_fraction = 0.2
  config.data.max_records_per_unit = 1
  config.data.groups = ("sex", "race", "age")
  config.data.group_bins = ((), (), (40.0, 60.0))
  config.model.name = "linear"
  config.model.head_init_std = 0.0
  config.privacy.epsilon = 1.0
  config.privacy.delta = 1e-5
  config.privacy.unit = "person_id"
  config.privacy.sampling = "full_batch"
  config.privacy.clip_norm = 2.0
  config.facts.hyperparameter_selection = (
    "Chosen among about twenty settings by AUROC and loss on the people held out, which this"
    " guarantee does not cover"
  )
  config.train.steps = 80
  config.train.learning_rate = 0.3
  config.train.microbatch_size = 8192
  config.checkpoint.every = 20
  return config
