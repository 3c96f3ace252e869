"""A private linear head on frozen features of CIFAR-10, (1, 1e-5)-DP for each image.

Command:   python -m dp_jax train --config=configs/cifar10_features.py --workdir=runs/cifar10
           --config.data.path=cifar10_efficientnet_lite2_560.npz
           other budgets: --config.privacy.epsilon=4 (the learning rate follows)
Time:      11 seconds from start to report on 2 cores (x86 CPU, 2026-11-30).
Expected:  82.2% on the 10,000 test rows (standard deviation 0.2 over 5 seeds); 83.1% at epsilon
           4; 83.9% without privacy. Settings were chosen on held-out training rows; how, and when
           test rows were looked at: experiments/heads/README.md.
Public:    cifar10_public/, features of 2,000 crops of the two photos that scikit-learn ships, from
           the same backbone: experiments/heads/public_photos.py. Their second moment says which
           directions of the features are long and which short, at no cost.
"""

from pathlib import Path

from ml_collections import ConfigDict

from dp_jax.config.files import base_config


def get_config() -> ConfigDict:
  """A noised mean, whitening by public features, 36 noised gradients, the mean of 18 heads."""
  config = base_config()
  config.data.source = "npz"
  # True of this file alone; on other data nothing of it holds.
  config.facts.source = "npz"
  config.facts.sha256 = "42d3c01e1b5e539205df96194c359028e554fa397f2bea97a53f35ecfd19fb08"
  config.facts.declared = "public"
  config.data.num_classes = 10
  config.model.name = "feature_head"
  config.privacy.epsilon = 1.0
  config.privacy.delta = 1e-5
  config.privacy.sampling = "full_batch"
  config.privacy.clip_norm = 0.18
  config.facts.hyperparameter_selection = (
    "Chosen among some five hundred settings by accuracy on held-out rows of the same training"
    " data, which this guarantee does not cover"
  )
  config.train.steps = 36
  # Less noise allows longer steps; a flag for epsilon moves it too.
  config.train.learning_rate = 115.0 * config.privacy.get_ref("epsilon") ** 0.5
  config.train.momentum = 0.0
  config.train.schedule = "constant"
  config.train.microbatch_size = 5000
  config.solver.method = "feature_covariance"
  config.solver.public_features = str(Path(__file__).resolve().parent / "cifar10_public")
  # Block 15 has shorter rows than the last block, and more to say than its share.
  config.solver.blocks = ((352, 1.0), (208, 2.0))
  config.solver.centre_share = 0.006
  config.solver.moment_share = 0.0
  config.solver.whiten = 0.2
  config.solver.precondition = 0.0
  config.solver.ridge = 0.1
  config.solver.average = 0.5
  return config
