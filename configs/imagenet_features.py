"""Features of ImageNet, or of any folder of images, from a frozen public backbone.

Command:   python -m dp_jax features --config=configs/imagenet_features.py --out=features
           --config.data.path=FOLDER        (FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg)
Time:      45 images a second at 224 pixels on 2 cores with EfficientNet-Lite0.
Then:      python -m dp_jax train --config=configs/imagenet_head_single_step.py --workdir=runs/head
           --config.data.path=features
Note:      the weights were trained on ImageNet itself, so ImageNet is an exercise of speed here;
           Mehta et al. 2022 pre-train on other data.
"""

from ml_collections import ConfigDict

from dp_jax.config.files import base_features_config


def get_config() -> ConfigDict:
  """The largest centred square, scaled to 256 x 256 (Mehta et al. 2022)."""
  config = base_features_config()
  config.data.source = "folder"
  config.data.eval_split = "val"
  config.data.input_shape = (256, 256, 3)
  config.data.resize = "centre_crop"
  config.data.interpolation = "bicubic"
  config.backbone.name = "efficientnet_lite"
  config.backbone.size = "lite2"
  return config
