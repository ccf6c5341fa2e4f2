"""Every public setting: type, default, meaning, unit, range. The only place with defaults.

`configs/*.py` edit these through an ml_collections ConfigDict (`base.py`); `build.py` turns the
result back into these frozen classes; `validate.py` holds the rules that join several fields.
"""

import dataclasses
from typing import Any


def setting(
  default: Any,
  doc: str,
  *,
  unit: str = "",
  low: float | None = None,
  high: float | None = None,
  choices: tuple[str, ...] = (),
  resume: str = "fixed",
) -> Any:
  """Declare one setting.

  Args:
    default: its value when nothing is said.
    doc: what it means, one sentence.
    unit: what it counts.
    low: smallest legal value.
    high: largest legal value.
    choices: the legal words.
    resume: "fixed" if a workdir must be resumed with the same value, "free" if it may change.
  """
  metadata = dict(doc=doc, unit=unit, low=low, high=high, choices=choices, resume=resume)
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder (FEATURES: pre-norm, GQA, RoPE, SwiGLU)."""

  vocab_size: int = setting(
    0, "rows of the embedding; 0 = the tokenizer's size rounded up to a multiple of 128", low=0
  )
  num_layers: int = setting(4, "decoder blocks", low=1)
  d_model: int = setting(128, "width of the residual stream", low=8)
  num_heads: int = setting(4, "query heads", low=1)
  num_kv_heads: int = setting(4, "key/value heads (GQA); divides num_heads", low=1)
  head_dim: int = setting(0, "width of one head; 0 = d_model / num_heads", low=0)
  d_ff: int = setting(
    0, "hidden width of SwiGLU; 0 = 8/3 * d_model rounded up to a multiple of 256", low=0
  )
  rope_theta: float = setting(10_000.0, "base of the rotary frequencies", low=1.0)
  qk_norm: bool = setting(False, "RMS-normalise queries and keys per head before RoPE")
  tie_embeddings: bool = setting(False, "use the embedding table as the output head")
  dropout: float = setting(0.0, "rate on the output of each sub-layer", low=0.0, high=0.9)
  norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", low=0.0)
  init_std: float = setting(
    0.02, "standard deviation of weights; residual outputs get it / sqrt(2 * num_layers)", low=0.0
  )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Text to batches."""

  paths: str = setting(
    "",
    "comma-separated files, folders or globs (.txt .md .py .jsonl .bin .npy); "
    "empty = this Python's own standard library sources",
  )
  validation_paths: str = setting(
    "", "the same for validation; empty = hold out validation_fraction of the documents of `paths`"
  )
  validation_fraction: float = setting(
    0.05, "share of documents held out, chosen by a hash of their name", low=0.0, high=0.5
  )
  text_field: str = setting("text", "the field of a JSONL object that holds the document")
  strict: bool = setting(
    False, "stop at the first malformed line or file instead of counting it", resume="free"
  )
  tokenizer: str = setting(
    "bpe", "'bytes', 'bpe' (byte-level BPE trained on the training text), or a tokenizer.json"
  )
  bpe_vocab_size: int = setting(
    2048, "size of the trained BPE with its 3 special tokens", unit="tokens", low=300
  )
  seq_len: int = setting(256, "length of a packed row", unit="tokens", low=8)
  batch_size: int = setting(16, "packed rows per optimizer update, over all hosts", low=1)
  packing: str = setting(
    "concat",
    "how documents fill rows: 'concat' (cut at row ends, no padding), 'first_fit' or 'best_fit' "
    "(documents shorter than a row stay whole)",
    choices=("concat", "first_fit", "best_fit"),
  )
  max_segments: int = setting(64, "documents in one row at most; the rest is padding", low=1)
  num_workers: int = setting(
    0, "loader processes; 0 = threads of the main process", low=0, resume="free"
  )
  prefetch: int = setting(
    4, "batches made ahead by each loader process or thread pool", low=1, resume="free"
  )
  cache_dir: str = setting(
    "", "tokenised corpora and trained tokenizers; empty = ~/.cache/ats_jax/data", resume="free"
  )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW and its schedule."""

  learning_rate: float = setting(3e-4, "peak learning rate", low=0.0)
  schedule: str = setting(
    "cosine",
    "shape after warm-up",
    choices=("cosine", "linear", "wsd", "constant", "rex", "one_cycle", "none"),
  )
  warmup_steps: int = setting(0, "linear warm-up; the first step uses lr/warmup_steps", low=0)
  warmup_fraction: float = setting(
    0.0, "warm-up as a share of num_steps, used when warmup_steps is 0", low=0.0, high=1.0
  )
  final_lr_fraction: float = setting(
    0.1, "learning rate at the end as a share of the peak", low=0.0, high=1.0
  )
  decay_fraction: float = setting(
    0.2, "share of num_steps spent in the decay phase of 'wsd'", low=0.0, high=1.0
  )
  b1: float = setting(0.9, "decay of Adam's first moment", low=0.0, high=1.0)
  b2: float = setting(0.95, "decay of Adam's second moment", low=0.0, high=1.0)
  eps: float = setting(1e-8, "added to the root of the second moment", low=0.0)
  weight_decay: float = setting(
    0.1, "decoupled decay of matrices; norms, biases and scalars are never decayed", low=0.0
  )
  decay_embeddings: bool = setting(False, "decay the embedding table too")
  grad_clip: float = setting(1.0, "global-norm clip; 0 = off", low=0.0)
  ema_decay: float = setting(
    0.0,
    "decay of an average of the weights, used by evaluation and generation; 0 = none",
    low=0.0,
    high=1.0,
  )


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """One update: its loss and how it is computed."""

  accum_steps: int = setting(
    1, "micro-batches per update; divides data.batch_size", low=1, resume="free"
  )
  remat: str = setting(
    "none",
    "what the backward pass recomputes: 'none' keeps all, 'full' recomputes each block, 'dots' "
    "keeps matmul outputs, 'names' keeps the named ones (docs/architecture.md)",
    choices=("none", "full", "dots", "names"),
    resume="free",
  )
  scan_unroll: int = setting(
    1, "blocks per iteration of the scan over layers", low=1, resume="free"
  )
  loss_chunk_tokens: int = setting(
    8192, "tokens whose logits exist at one time, over all devices", low=1, resume="free"
  )
  z_loss: float = setting(0.0, "weight of mean(logsumexp(logits)^2)", low=0.0)
  label_smoothing: float = setting(
    0.0, "share of the target spread over the vocabulary", low=0.0, high=0.9
  )


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
  """Number formats. Norms, softmax, loss and reductions are float32 whatever is said here."""

  param_dtype: str = setting(
    "float32", "stored weights", choices=("float32", "bfloat16"), resume="fixed"
  )
  compute_dtype: str = setting("bfloat16", "operands of matmuls", choices=("float32", "bfloat16"))
  mu_dtype: str = setting("float32", "Adam's first moment", choices=("float32", "bfloat16"))
  nu_dtype: str = setting("float32", "Adam's second moment", choices=("float32", "bfloat16"))
  deterministic: bool = setting(
    False, "GPU: bit-equal reruns, at a cost in speed (docs/performance.md)"
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many ways each mesh axis is split."""

  data: int = setting(-1, "copies of the weights; -1 = all devices that are left", resume="free")
  fsdp: int = setting(1, "ways weights and moments are sharded", low=1, resume="free")
  tensor: int = setting(
    1, "ways heads, hidden width and vocabulary are sharded", low=1, resume="free"
  )


@dataclasses.dataclass(frozen=True)
class OpsConfig:
  """Which implementation runs."""

  attention: str = setting(
    "auto",
    "'auto' = the measured best for the device",
    choices=("auto", "xla", "cudnn"),
    resume="free",
  )
  strict: bool = setting(
    False, "an 'auto' choice that is not the fast one for this device is an error", resume="free"
  )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on the validation split."""

  every_steps: int = setting(
    0, "steps between evaluations; 0 = only at the end", low=0, resume="free"
  )
  num_batches: int = setting(
    0, "batches of the validation split; 0 = all of it once", low=0, resume="free"
  )
  bigram_baseline: bool = setting(
    False,
    "at the end, print the loss of a Witten-Bell bigram model fitted on the same tokens",
    resume="free",
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is kept on disk."""

  every_steps: int = setting(
    200, "steps between checkpoints; the last step is always saved", low=1, resume="free"
  )
  keep: int = setting(2, "newest checkpoints kept", low=1, resume="free")
  keep_best: bool = setting(
    False, "keep the one with the lowest validation loss as well", resume="free"
  )
  asynchronous: bool = setting(True, "write in the background", resume="free")


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What is written and shown."""

  every_steps: int = setting(10, "steps between metric rows", low=1, resume="free")
  writers: str = setting(
    "console,jsonl,csv,tensorboard",
    "comma-separated: console, jsonl, csv, tensorboard, clu (needs the tf extra)",
    resume="free",
  )
  progress: bool = setting(True, "a progress bar with ETA on a terminal", resume="free")
  profile_step: int = setting(
    0,
    "write a profiler trace of 3 steps from here to workdir/profile; 0 = none",
    low=0,
    resume="free",
  )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """Generation: the sample at the end of training, and `ats_jax.generate`."""

  prompt: str = setting("", "text to continue", resume="free")
  max_tokens: int = setting(
    128, "tokens to generate at most; 0 = no sample", unit="tokens", low=0, resume="free"
  )
  temperature: float = setting(0.8, "divides the logits; 0 = greedy", low=0.0, resume="free")
  top_k: int = setting(0, "keep the k likeliest tokens; 0 = all", low=0, resume="free")
  top_p: float = setting(
    0.95, "keep the likeliest tokens that sum to p; 1 = all", low=0.0, high=1.0, resume="free"
  )
  stop: str = setting("", "comma-separated texts that end generation", resume="free")


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  seed: int = setting(0, "of initialisation, dropout, data order and sampling", low=0)
  num_steps: int = setting(400, "optimizer updates", low=1, resume="free")
  compilation_cache: str = setting(
    "auto",
    "folder of compiled programs; 'auto' = ~/.cache/ats_jax/xla, 'off' = none",
    resume="free",
  )
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  step: StepConfig = StepConfig()
  precision: PrecisionConfig = PrecisionConfig()
  mesh: MeshConfig = MeshConfig()
  ops: OpsConfig = OpsConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()
  sample: SampleConfig = SampleConfig()
