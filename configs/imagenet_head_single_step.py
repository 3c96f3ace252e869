"""A head on frozen features in one private full-batch step from near zero: Mehta et al. 2022.

Command:   python -m dp_jax train --config=configs/imagenet_head_single_step.py --workdir=runs/head
           --config.data.path=features      (configs/imagenet_features.py makes these)
           epsilon: --config.privacy.epsilon=1, 2, 4, 8 or 10
           near zero instead of zero: --config.model.head_init_std=1e-4
           sigmoid instead of softmax: --config.task.kwargs.link=sigmoid
Time:      about ten seconds for 1,281,167 x 1280 features and 1,000 classes on 2 cores: from a head
           of exactly zero the gradient has a closed form.
Expected:  81.7% on ImageNet at epsilon 4 to 10 with the paper's backbone, which is not public
           (arXiv:2205.02973); not measured with the one here, which was trained on ImageNet.
"""

from ml_collections import ConfigDict

from dp_jax.config.files import base_config


def get_config() -> ConfigDict:
  """One LAMB step on the noised gradient of all units, accounted by the analytic Gaussian."""
  config = base_config()
  config.data.source = "npy"
  config.data.eval_split = "val"
  config.model.name = "linear"
  config.model.head_init_std = 0.0
  config.privacy.epsilon = 8.0
  config.privacy.delta = 1e-6
  config.privacy.accountant = "analytic_gaussian"
  config.privacy.sampling = "full_batch"
  config.privacy.clip_norm = 1.0
  config.train.steps = 1
  config.train.optimizer = "lamb"
  config.train.learning_rate = 0.01
  config.train.microbatch_size = 1024  # faster than 4096 on CPUs: experiments/benchmarks/README.md
  return config
