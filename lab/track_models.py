"""The models of `lab.optimizer_track` that its figures are of, on bytes: `60m` and `100m`.

Command: python -m lab.optimizer_track --config=lab/track_models.py:60m --set=data.paths=TEXT ...
"""

from ml_collections import ConfigDict

from ats_jax.config import base_config

# Layers, width, hidden width, rows of a batch, batches of an evaluation.
SIZES = {"60m": (12, 640, 1792, 32, 32), "100m": (12, 768, 2560, 16, 128)}


def get_config(variant: str = "60m") -> ConfigDict:
  """A dense model of 61 or 99 million parameters, with heads of 64."""
  layers, width, d_ff, rows, held_out = SIZES[variant]
  config = base_config()
  config.update_from_flattened_dict({
    "model.num_layers": layers,
    "model.d_model": width,
    "model.num_heads": width // 64,
    "model.num_kv_heads": width // 64,
    "model.d_ff": d_ff,
    "model.tie_embeddings": False,
    "data.tokenizer": "bytes",
    "data.validation_fraction": 0.02,
    "data.seq_len": 1024,
    "data.batch_size": rows,
    "optimizer.warmup_fraction": 0.05,
    "optimizer.schedule": "cosine",
    "eval.num_batches": held_out,
  })  # fmt: skip
  return config
