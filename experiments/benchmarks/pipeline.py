"""Images a second through the host pipeline, against the decoder's own speed.

    python experiments/benchmarks/pipeline.py

Makes JPEGs of smooth noise in a temporary folder. The bare decoder is a pool of threads that calls
the same `ImageDecoder.read` on the same files and keeps nothing; the pipeline is what training
uses: folder source, units, microbatches, transfer to the device. Both on every core, in turn, the
median of several rounds; by the clock, and by the processor time of an image, which other work on
the machine disturbs less. Prints a table and writes it, with the machine and the date, to
pipeline.json beside this file. Takes about a minute.
"""

import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from PIL import Image

from dp_jax.data import UnitLoader, open_source
from dp_jax.data.pipeline import Pipeline, cut
from dp_jax.data.sources.images import ImageDecoder
from dp_jax.tasks.classification import Classification

HERE = pathlib.Path(__file__).resolve()
IMAGES = 256
PASSES = 8
MICROBATCH = 128
ROUNDS = 5
# (height, width) of the files; all are brought to 224x224.
SIZES = ((224, 224), (375, 500))
SHAPE = (224, 224, 3)


def write_images(root: pathlib.Path, height: int, width: int) -> None:
  """JPEGs of quality 90 whose detail at each scale is about that of photographs."""
  rng = np.random.default_rng(0)
  folder = root / "train" / "noise"
  folder.mkdir(parents=True)
  for number in range(IMAGES):
    image = np.full((height, width, 3), 128.0)
    for cells, strength in ((4, 60), (16, 30), (64, 15), (128, 8)):
      noise = rng.normal(0, strength, (cells, cells, 3)).clip(-127, 127) + 128
      small = Image.fromarray(noise.astype(np.uint8))
      image += np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), float) - 128
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(
      folder / f"{number:05d}.jpg", "JPEG", quality=90
    )


def timed(run: Callable[[], None]) -> tuple[float, float]:
  """Images a second, and milliseconds of processor time an image."""
  start, cpu = time.perf_counter(), time.process_time()
  run()
  cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
  return PASSES * IMAGES / seconds, 1000 * cpu / (PASSES * IMAGES)


def bare(files: list[pathlib.Path], workers: int) -> None:
  """The decoder alone."""
  decoder = ImageDecoder(SHAPE)
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for _ in pool.map(lambda file: decoder.read(file) is None, files * PASSES):
      pass


def pipeline(root: pathlib.Path, workers: int) -> None:
  """All the way to the device, in steps of a few microbatches."""
  source = open_source("folder", "train", path=str(root), input_shape=SHAPE)
  loader = UnitLoader(source, Classification(SHAPE, 1, (0.0, 255.0)).record)
  orders = [np.random.default_rng(step).permutation(IMAGES) for step in range(PASSES)]
  with Pipeline(
    loader, lambda step: orders[step], range(PASSES), MICROBATCH, workers=workers,
    prefetch=workers + 2, put=jax.device_put,
  ) as ahead:  # fmt: skip
    for order in orders:
      for part in cut(order, MICROBATCH):
        jax.block_until_ready(ahead.take(part))


def main() -> None:
  """Measures, prints and records."""
  workers = len(os.sched_getaffinity(0))
  jax.block_until_ready(jax.device_put(np.zeros(1)))  # starting up is no part of it
  rows = []
  for height, width in SIZES:
    with tempfile.TemporaryDirectory() as name:
      root = pathlib.Path(name)
      write_images(root, height, width)
      files = sorted(root.rglob("*.jpg"))
      sizes = [file.stat().st_size for file in files]
      bare(files, workers), pipeline(root, workers)  # files into the page cache
      rounds = [
        (*timed(lambda: bare(files, workers)), *timed(lambda: pipeline(root, workers)))  # noqa: B023
        for _ in range(ROUNDS)
      ]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    rows.append({
      "files": f"{height}x{width}", "kib": round(statistics.mean(sizes) / 1024, 1),
      "decoder": round(medians[0]), "pipeline": round(medians[2]),
      "ratio": round(statistics.median(row[2] / row[0] for row in rounds), 3),
      "decoder_cpu_ms": round(medians[1], 3), "pipeline_cpu_ms": round(medians[3], 3),
      "rounds": [[round(row[0]), round(row[2])] for row in rounds],
    })  # fmt: skip
    print(rows[-1])
  HERE.with_suffix(".json").write_text(
    json.dumps(
      {
        "command": "python experiments/benchmarks/pipeline.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{workers} cores, {platform.machine()}",
        "microbatch_size": MICROBATCH,
        "images": IMAGES,
        "unit": "images a second, 224x224x3",
        "rows": rows,
      },
      indent=1,
    )
    + "\n"
  )


if __name__ == "__main__":
  main()
