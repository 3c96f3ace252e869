"""Time and memory of drawing a step's units.

    python experiments/benchmarks/sampling.py

Prints, for each setting, the milliseconds of a step (the median of 200) and the peak memory of
the process so far. A thousand of 10^9 units should take well under 50 ms.
"""

import resource
import statistics
import time

from dp_jax.privacy import FixedSize, MasterKey, Mechanism, Poisson, TruncatedPoisson

SETTINGS = [
  (Poisson(1e-6), 10**9),
  (Poisson(1e-3), 10**7),
  (Poisson(0.05), 1_281_167),
  (TruncatedPoisson(1e-6, 1200, 10**9), 10**9),
  (FixedSize(1000, 10**9), 10**9),
]


def main() -> None:
  """Prints the table."""
  key = MasterKey.from_os()
  print("| sampling | units | ms a step | peak MiB |")
  print("| --- | --- | --- | --- |")
  for sampling, num_units in SETTINGS:
    adjacency = "replace_one" if sampling.name == "fixed_size" else "zero_out"
    sampler = Mechanism(sampling, 1.0, 200, adjacency=adjacency).sampler(key, num_units)
    times = []
    for step in range(200):
      start = time.perf_counter()
      sampler.indices(step)
      times.append(1000 * (time.perf_counter() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = f"{sampling.name} {sampling.sampling_rate:g}"
    print(f"| {rate} | {num_units} | {statistics.median(times):.3f} | {peak:.0f} |")


if __name__ == "__main__":
  main()
