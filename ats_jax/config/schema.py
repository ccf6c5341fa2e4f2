"""Every public setting: type, default, meaning, unit, range. The only place with defaults.

`configs/*.py` edit these through an ml_collections ConfigDict (`base.py`); `build.py` turns the
result back into these frozen classes; `validate.py` holds the rules that join several fields.
"""

import dataclasses
from typing import Any

MAX_SEED = 2**32 - 1  # jax drops what is above 32 bits: 2**32 would be seed 0 again
MAX_STEPS = 2**31 - 1  # steps are counted in int32 on the device


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
class MoEConfig:
  """Mixture of experts: several feed-forwards in a layer, of which each token uses a few."""

  num_experts: int = setting(0, "routed experts of a layer; 0 = no mixture of experts", low=0)
  top_k: int = setting(2, "experts that a token goes to", low=1)
  d_ff: int = setting(0, "hidden width of an expert; 0 = model.d_ff", low=0)
  num_shared: int = setting(0, "experts of the same width that every token goes to", low=0)
  every: int = setting(1, "every n-th layer has experts, the n-th first; 1 = all", low=1)
  dense_first: int = setting(0, "layers without experts at the bottom", low=0)
  dense_last: int = setting(0, "layers without experts at the top", low=0)
  score: str = setting(
    "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid")
  )
  router_bias: bool = setting(False, "train an offset of each expert's logit")
  renormalize: bool = setting(
    True,
    "divide the scores of a token's experts by their sum; with top_k = 1 never, as the router "
    "would have no gradient",
  )
  route_scale: float = setting(1.0, "multiplies the weights of the experts", low=0.0)
  temperature: float = setting(1.0, "divides the router's logits", low=0.01, high=100.0)
  noise: float = setting(
    0.0, "standard deviation of what is added to the logits when training chooses experts", low=0.0
  )
  num_groups: int = setting(
    1, "groups of neighbouring experts, of which a token uses top_groups; 1 = no limit", low=1
  )
  top_groups: int = setting(1, "groups that a token may use", low=1)
  null_experts: int = setting(
    0, "experts that do nothing: the compute of a token depends on how many it draws", low=0
  )
  spare_experts: int = setting(
    0,
    "idle slots that surgery can fill with new experts, each as large as an expert (weights, "
    "gradients, moments)",
    low=0,
  )
  dispatch: str = setting(
    "dropless",
    "'dropless' computes every choice; 'capacity' gives an expert room for capacity_factor times "
    "its fair share of each row and drops the rest (training only)",
    choices=("dropless", "capacity"),
  )
  capacity_factor: float = setting(1.25, "room of an expert over its fair share", low=0.1)
  drop_policy: str = setting(
    "position",
    "who keeps a place in a full expert: the first in the row, or the highest weight",
    choices=("position", "weight"),
  )
  aux_loss: float = setting(
    0.001, "weight of the Switch balance loss over the global batch", low=0.0
  )
  sequence_aux_loss: float = setting(0.0, "weight of the balance loss within each row", low=0.0)
  z_loss: float = setting(0.001, "weight of mean(logsumexp(router logits)^2)", low=0.0)
  bias_update: str = setting(
    "proportional",
    "how the selection bias follows the load: not, by the error's sign, or by the error",
    choices=("none", "sign", "proportional"),
  )
  bias_rate: float = setting(
    0.005,
    "step of the selection bias, in logits; up to 0.15 while a router is collapsed",
    low=0.0,
    high=1.0,
  )
  bias_freeze: float = setting(
    0.05, "last share of the run over which bias_rate falls to 0", low=0.0, high=1.0
  )


@dataclasses.dataclass(frozen=True)
class MoDConfig:
  """Mixture of depths: layers that only some tokens of a row go through."""

  routing: str = setting(
    "none",
    "who chooses the tokens: nobody (no mixture of depths), a trained router, an even pattern of "
    "positions, or chance",
    choices=("none", "learned", "static", "random"),
  )
  scope: str = setting(
    "block", "what is skipped: the whole block or its feed-forward", choices=("block", "ffn")
  )
  capacity: float = setting(0.125, "share of a row's tokens that go through", low=0.001, high=1.0)
  every: int = setting(2, "every n-th layer of the range skips tokens, the n-th first", low=1)
  start_layer: int = setting(0, "first layer of the range", low=0)
  end_layer: int = setting(0, "end of the range, exclusive; 0 = num_layers", low=0)
  start_capacity: float = setting(
    1.0, "capacity at the start of the annealing", low=0.001, high=1.0
  )
  anneal_fraction: float = setting(
    0.0,
    "share of the run over which capacity falls to its final value; 0 = at once",
    high=1.0,
    low=0.0,
  )
  rungs: int = setting(
    4, "steps of the annealing, each compiled once; capacities in geometric progression", low=1
  )
  decision: str = setting(
    "threshold",
    "causal rule of evaluation and generation: score above a running quantile, or a predictor "
    "trained beside the router",
    choices=("threshold", "predictor"),
  )
  threshold_decay: float = setting(0.99, "decay of the running quantile", low=0.0, high=0.9999)


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
    0,
    "blocks per iteration of the scan over layers; 0 = on a GPU all of them, up to 32 layers; 1 "
    "elsewhere, and under accumulation or with deterministic kernels (docs/log.md)",
    low=0,
    resume="free",
  )
  compiler_options: str = setting(
    "",
    "options of XLA for the train step, e.g. 'xla_gpu_enable_dynamic_slice_fusion=false,"
    "xla_gpu_autotune_level=1'; they go before those that the device gets anyway (logged)",
    resume="free",
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

  param_dtype: str = setting("float32", "stored weights", choices=("float32", "bfloat16"))
  compute_dtype: str = setting("bfloat16", "operands of matmuls", choices=("float32", "bfloat16"))
  fp8: bool = setting(
    False,
    "projections of attention and dense feed-forwards in 8 bits: e4m3 operands, e5m2 gradients, "
    "one scale a tensor; not in layers that skip tokens (docs/adr/0009-eight-bits.md)",
  )
  fp8_keep_first: int = setting(1, "layers at the bottom that stay in compute_dtype", low=0)
  fp8_keep_last: int = setting(1, "layers at the top that stay in compute_dtype", low=0)
  fp8_band: float = setting(
    0.0025,
    "share of the validation loss that 8 bits may add at an evaluation (eval.every_steps); past it "
    "they are off for the rest of the run, with a warning",
    low=0.0,
    resume="free",
  )
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
  expert: int = setting(
    1, "ways experts are spread; the batch is split over it too", low=1, resume="free"
  )
  tensor: int = setting(
    1, "ways heads, hidden width and vocabulary are sharded", low=1, resume="free"
  )


@dataclasses.dataclass(frozen=True)
class OpsConfig:
  """Which implementation runs."""

  kernels: str = setting(
    "",
    "implementations of ops or of single slots, e.g. 'attention=xla,rms_norm.backward=cuda'; "
    "docs/kernels.md lists them. The rest is the measured best for the device",
    resume="free",
  )
  strict: bool = setting(
    False, "a choice of ours that is not the fast one for this device is an error", resume="free"
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
class OrchestratorConfig:
  """What watches the run and steps in."""

  mode: str = setting(
    "off",
    "nothing, or measure and report, or also act",
    choices=("off", "observe", "act"),
  )
  check_interval: int = setting(100, "updates between two looks of the supervisor", low=1)
  confidence: float = setting(
    0.75,
    "probability that a fault is there and an action helps, from which on it acts",
    low=0.0,
    high=1.0,
    resume="free",
  )
  snapshot_interval: int = setting(
    100, "least updates between two snapshots to roll back to", low=1, resume="free"
  )
  snapshot_gb: float = setting(
    64.0,
    "host memory of a process that three snapshots may take; past it, or with 0, a rollback goes "
    "to the last checkpoint",
    unit="GiB",
    low=0.0,
    resume="free",
  )
  branch_steps: int = setting(
    0,
    "updates of an arm of a paired branch, eight of which are trained ahead at a checkpoint before "
    "what a hook wants tried is done; 0 = nothing is tried",
    low=0,
    resume="free",
  )
  raise_learning_rate: bool = setting(
    False,
    "try higher learning rates on branches from a snapshot, and keep one that wins; a try takes "
    "the time of two intervals and the host memory of two snapshots",
    resume="free",
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  seed: int = setting(0, "of weights, dropout, data order and sampling", low=0, high=MAX_SEED)
  num_steps: int = setting(400, "optimizer updates", low=1, high=MAX_STEPS, resume="free")
  num_epochs: float = setting(
    0.0, "passes over the training rows, in place of num_steps; 0 = num_steps", low=0.0,
    resume="free",
  )  # fmt: skip
  compilation_cache: str = setting(
    "auto",
    "folder of compiled programs; 'auto' = ~/.cache/ats_jax/xla, 'off' = none",
    resume="free",
  )
  heartbeat_secs: int = setting(
    100,
    "in a job of several processes, one that gives no sign of life for so long is taken for dead, "
    "and all end",
    unit="s",
    low=1,
    resume="free",
  )
  model: ModelConfig = ModelConfig()
  moe: MoEConfig = MoEConfig()
  mod: MoDConfig = MoDConfig()
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
  orchestrator: OrchestratorConfig = OrchestratorConfig()
