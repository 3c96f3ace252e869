"""LAMB on a full-batch step is optax's, on the same noised gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import key_file, small_config

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare


def test_one_full_batch_lamb_step_is_that_of_optax(tmp_path):
  config = small_config(
    model={"name": "linear", "head_init_std": 1e-3},
    privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "full_batch", "clip_norm": 0.7},
    train={"steps": 1, "optimizer": "lamb", "learning_rate": 0.3, "weight_decay": 0.01,
           "microbatch_size": 64},
  )  # fmt: skip
  secret = key_file(tmp_path)
  train(config, tmp_path / "run", test_key_file=secret, progress=False)
  got = load_release(tmp_path / "run").arrays

  run = prepare(config)
  units, mask = run.loader.load(np.arange(run.loader.num_units), run.loader.num_units)
  loss = lambda params, unit, key: run.task.loss(run.frozen, params, unit, key)  # noqa: E731
  grad_fn = jax.jit(clipped_grad(loss, 0.7, engine="vmap", compensated=True))
  total, _ = grad_fn(run.params, units, mask)
  noise_key = step_key(MasterKey.from_file(secret), "noise", 0)
  noised = jax.jit(add_noise, static_argnums=1)(total, run.mechanism.stddev, noise_key)
  mean = jax.tree.map(lambda x: x / run.loader.num_units, noised)
  optimizer = optax.lamb(0.3, weight_decay=0.01)
  updates, _ = optimizer.update(mean, optimizer.init(run.params), run.params)
  want = optax.apply_updates(run.params, updates)
  for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6)
  # The trust ratio scales a step to the norm of what is there: near zero, it is small.
  moved = {name: float(jnp.linalg.norm(want[name] - run.params[name])) for name in want}
  kernel = float(jnp.linalg.norm(run.params["head.kernel"]))
  assert 0.25 * kernel < moved["head.kernel"] < 0.35 * kernel
