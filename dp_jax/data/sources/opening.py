"""Opens a source by its name: the one place that knows all of them."""

from __future__ import annotations

from dp_jax.data.sources.source import Head, Interpolation, ResizePolicy, Source
from dp_jax.data.sources.table_spec import TableSpec
from dp_jax.errors import UserError


def open_source(
  name: str,
  split: str,
  *,
  path: str | None = None,
  seed: int = 0,
  num_records: int | None = None,
  input_shape: tuple[int, ...] | None = None,
  resize: ResizePolicy = "centre_crop",
  crop_fraction: float = 1.0,
  interpolation: Interpolation = "bilinear",
  class_names: tuple[str, ...] | None = None,
  table: TableSpec | None = None,
  input_column: str | None = None,
  label_column: str | None = None,
) -> Source:
  """Opens a source by name.

  Args:
    name: "digits" (the scans that scikit-learn ships), "rendered_digits" (drawn here, public),
      "npz" (arrays in files), "npy" (memory-mapped shards), "folder" (images in class folders),
      "csv" (a table of numbers or of image paths), "hf" (a Hugging Face data set on disk) or
      "tfds:NAME" (a prepared TensorFlow Datasets data set).
    split: "train" or "test", or what the tfds data set calls its splits.
    path: the file or folder of "npz" and "csv", the folder of "npy", "folder" and "hf"; the
      data_dir of "tfds:NAME".
    seed: picks the split of "digits" and the drawings of "rendered_digits".
    num_records: how many digits to render (default 20,000); for the other sources, reads only
      the first so many records.
    input_shape: (height, width, channels) to which encoded images are brought.
    resize: how, as `dp_jax.data.sources.images.ImageDecoder` says.
    crop_fraction: of "centre_crop", how much of the height and width is kept.
    interpolation: of what is resized.
    class_names: of "folder", its class folders in the order of their labels; None takes those that
      are there, sorted, but for those that systems leave.
    table: how the rows of "csv" become records.
    input_column: of "hf"; None takes its only column of images.
    label_column: of "hf"; None takes its only ClassLabel, or "label".

  Returns:
    The source.

  Raises:
    ValueError: for an unknown name or split, or a file that is missing or malformed. What may be a
      record's, a name in a first line or of a folder, is the detail of a DataError, not its text.
  """
  # Imported here so that a source's own dependencies are only needed where it is used.
  source: Source
  if num_records is not None and num_records < 1:
    raise UserError(f"num_records must be at least 1, not {num_records}")
  if name == "rendered_digits":
    from dp_jax.data.sources import rendered_digits

    count = rendered_digits.DEFAULT_NUM_RECORDS if num_records is None else num_records
    return rendered_digits.open_rendered_digits(split, seed=seed, num_records=count)
  if name == "digits":
    from dp_jax.data.sources import digits

    source = digits.open_digits(split, seed=seed)
  elif name == "npz":
    from dp_jax.data.sources import npz

    source = npz.open_npz(path, split)
  elif name == "npy":
    from dp_jax.data.sources import npy_shards

    source = npy_shards.NpyShards(path, split)
  elif name == "folder":
    from dp_jax.data.sources import folder, images

    decoder = images.ImageDecoder(_image_shape(input_shape), resize, crop_fraction, interpolation)
    source = folder.FolderSource(path, split, decoder, class_names=class_names)
  elif name == "csv":
    from dp_jax.data.sources import csv_source, images

    if table is None:
      raise UserError("the source csv needs a TableSpec")
    image_decoder = None
    if table.image_column is not None:
      image_decoder = images.ImageDecoder(
        _image_shape(input_shape), resize, crop_fraction, interpolation
      )
    source = csv_source.open_csv(path, split, table, image_decoder)
  elif name == "hf":
    from dp_jax.data.sources import hf_source, images

    image_decoder = None
    if input_shape is not None and len(input_shape) == 3:
      image_decoder = images.ImageDecoder(
        _image_shape(input_shape), resize, crop_fraction, interpolation
      )
    source = hf_source.HfSource(
      path, split, decoder=image_decoder, input_column=input_column, label_column=label_column
    )
  elif name.startswith("tfds:"):
    from dp_jax.data.sources import tfds_source

    source = tfds_source.TfdsSource(name.removeprefix("tfds:"), split, data_dir=path)
  else:
    raise UserError(
      f"unknown data source {name!r}; use one of digits, rendered_digits, npz, npy, folder,"
      " csv, hf, tfds:NAME"
    )
  return source if num_records is None else Head(source, num_records)


def _image_shape(shape: tuple[int, ...] | None) -> tuple[int, int, int]:
  if shape is None or len(shape) != 3:
    raise UserError(
      "encoded images are brought to one public shape: declare data.input_shape as"
      f" (height, width, channels), for example (224, 224, 3), not {shape}"
    )
  return shape[0], shape[1], shape[2]
