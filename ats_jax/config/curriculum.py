"""What `data.length_buckets` and `data.curriculum` cannot be used with."""

from ats_jax.config.schema import Config

LEAST_LENGTH = 16  # of a row, where rows have several lengths


def curriculum(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for settings that need rows of one length, or documents in one order.
  """
  data = cfg.data
  several = data.length_buckets > 1
  what = f"data.length_buckets={data.length_buckets}"
  if data.curriculum == "length" and not several:
    raise ValueError(
      "data.curriculum=length does nothing with rows of one length. Set data.length_buckets to 2, "
      "3 or 4."
    )
  if data.curriculum == "difficulty":
    if several:
      raise ValueError(
        f"{what} and data.curriculum=difficulty both part the documents. Set "
        "data.length_buckets=1, or data.curriculum to none or length."
      )
    what = "data.curriculum=difficulty"
  elif not several:
    return
  if data.sources:
    raise ValueError(
      f"{what} parts the documents of one text, and data.sources take turns row by row. Put all "
      "text into data.paths, or set data.length_buckets=1 and data.curriculum=none."
    )
  if data.streaming:
    raise ValueError(
      f"{what} looks at all documents before the first step, and data.streaming=true does not. Set "
      "data.streaming=false."
    )
  if not several:
    return
  if data.seq_len % (2 * LEAST_LENGTH):
    raise ValueError(
      f"{what}: shorter rows are halves of data.seq_len={data.seq_len} and multiples of "
      f"{LEAST_LENGTH}. Use a multiple of {2 * LEAST_LENGTH}, better a power of two."
    )
  if cfg.mesh.stage > 1:
    raise ValueError(
      f"{what} with mesh.stage={cfg.mesh.stage}: a pipeline has rows of one length. Set one of "
      "them to 1."
    )
  if cfg.mod.routing != "none":
    raise ValueError(
      f"{what} with mod.routing={cfg.mod.routing}: a layer that skips tokens keeps a share of a "
      "row, so tokens would compete otherwise in each length. Set one of them to none (1)."
    )
  if cfg.moe.num_experts and cfg.moe.dispatch == "capacity":
    raise ValueError(
      f"{what} with moe.dispatch=capacity: experts have places by row, of which a short one has "
      "few. Set moe.dispatch=dropless, or data.length_buckets=1."
    )
