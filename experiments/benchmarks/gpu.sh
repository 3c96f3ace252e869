#!/bin/sh
# The JAX part of the clipping benchmark on an accelerator, with the python that is there: nothing
# is installed. Under 8 minutes; writes clipping_gpu.json (or the path given as the first argument).
#
#     sh experiments/benchmarks/gpu.sh [output.json]
set -eu
cd "$(dirname "$0")/../.."
output=${1:-experiments/benchmarks/clipping_gpu.json}
date -u +%Y-%m-%dT%H:%MZ
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "no nvidia-smi"
export PYTHONPATH=. XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -c "import jax, flax; print('jax', jax.__version__, 'flax', flax.__version__, jax.devices())"
# The rows in the order of what they tell; a timeout leaves the rows before it in the log.
timeout 440 python3 -m experiments.benchmarks.clipping --repeats=5 --engines=ghost,vmap \
  --models=head,gpt_124m,resnet18,vit_s,lora,gpt_10m --output="$output"
