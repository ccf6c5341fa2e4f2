"""What a run says about itself at its start and at its end."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging

from ats_jax import runtime, workdir
from ats_jax.config.schema import Config
from ats_jax.data.bigram import Bigram
from ats_jax.data.dataset import Dataset
from ats_jax.feed import eval_feed, train_feed
from ats_jax.inference.generator import generate
from ats_jax.metrics.environment import environment
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.layers import LayerLog
from ats_jax.metrics.memory import GIB, memory_metrics
from ats_jax.metrics.overview import parameter_overview
from ats_jax.metrics.throughput import Throughput, peak_flops
from ats_jax.model.decoder import Decoder
from ats_jax.model.layout import layer_kinds
from ats_jax.scoring import score
from ats_jax.step.program import Program, predicted_bytes
from ats_jax.step.state import TrainState


def opening(program: Program, folder: Path, model: Decoder, train_set: Dataset, start: int) -> None:
  """Log and store what will run: parameters, implementations, formats, mesh, data."""
  cfg, mesh = program.cfg, jax.sharding.get_mesh()
  logging.info("parameters:\n%s", parameter_overview(model))
  facts = {
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "mesh": ", ".join(f"{name}={size}" for name, size in mesh.shape.items()),
    **{choice.op: f"{choice.implementation} ({choice.reason})" for choice in program.choices},
    "formats": f"parameters {cfg.precision.param_dtype}, matmuls {cfg.precision.compute_dtype}, "
    f"moments {cfg.precision.mu_dtype} and {cfg.precision.nu_dtype}; "
    "norms, softmax and loss float32",
    **_eight_bits(cfg),
    "compiler options": ", ".join(f"{k}={v}" for k, v in program.options.items())
    or "XLA's defaults",
    "training text": f"{train_set.num_documents:,} documents, {train_set.num_tokens:,} tokens in "
    f"{train_set.num_rows:,} rows of {cfg.data.seq_len}",
    "run": f"{cfg.num_steps:,} steps x {cfg.data.batch_size} rows = "
    f"{cfg.num_steps * cfg.data.batch_size / train_set.num_rows:.2f} epochs",
    "active parameters a token": f"{program.counts.active:,.0f} of {program.counts.parameters:,}",
    "FLOPs a token": f"{program.counts.flops_causal:.3g} (causal attention, no input embedding; "
    f"the base of train/mfu), {program.counts.flops_full:.3g} (6N + 12LdS)",
    "compilation cache": runtime.cache_use(cfg),
  }
  for name, value in facts.items():
    logging.info("%s: %s", name, value)
  if jax.process_index() == 0:
    shape = {name: vars(getattr(cfg, name)) for name in ("model", "moe", "mod")}
    run = {**shape, "parameters": program.counts.parameters, **facts}
    workdir.write_json(folder / workdir.METADATA, {**environment(), "run": run})
  if start == cfg.num_steps:
    logging.info(
      "%s is complete: step %d of %d. --config.num_steps=%d would train on.",
      folder, start, cfg.num_steps, 2 * cfg.num_steps,
    )  # fmt: skip
  elif start:
    logging.info("resuming %s from step %d of %d", folder, start, cfg.num_steps)


def _eight_bits(cfg: Config) -> dict[str, str]:
  if not cfg.precision.fp8:
    return {}
  number, every = sum(kind.fp8 for kind in layer_kinds(cfg)), cfg.eval.every_steps
  watch = "not watched (eval.every_steps=0)"
  if every:
    watch = (
      f"off once they add {cfg.precision.fp8_band:.2%} to a validation loss (each {every} steps)"
    )
  return {"8 bits": f"{number} of {cfg.model.num_layers} layers; {watch}"}


def speed(program: Program) -> Throughput:
  """A meter that knows the run's FLOPs and its devices' peak."""
  return Throughput(
    num_devices=jax.device_count(),
    peak=peak_flops(jax.devices()[0].device_kind, program.cfg.precision.compute_dtype),
    tokens_per_step=program.cfg.data.batch_size * program.cfg.data.seq_len,
    flops_per_token={
      "train/mfu": program.counts.flops_causal,
      "train/mfu_6n": program.counts.flops_full,
    },
  )


@contextlib.contextmanager
def layer_log(program: Program, folder: Path, resume_step: int | None) -> Iterator[LayerLog | None]:
  """Where arrays of sparse layers go; None where there are none, or on another process."""
  sparse = program.cfg.moe.num_experts or program.cfg.mod.routing != "none"
  if not sparse or jax.process_index() != 0:
    yield None
    return
  path = folder / workdir.LAYERS
  with contextlib.closing(
    LayerLog(path, last_step=-1 if resume_step is None else resume_step)
  ) as log:
    yield log


def get_performance_stats(
  program: Program,
  goodput: Goodput,
  meter: Throughput,
  train_step: Callable[..., Any],
) -> dict[str, Any]:
  """What this process's part of a run took, as JSON-ready numbers.

  Args:
    program: what ran.
    goodput: where the wall time went.
    meter: that measured its speed.
    train_step: the newest one; its memory is left out if it is not compiled.

  Returns:
    `Throughput.summary` (step times are means of `log.every_steps` steps), `Goodput.summary`,
    `memory_metrics`, `memory/predicted_gib`; `device`, `kernels` (op -> implementation),
    `compiler_options`, `compilation_cache`.
  """
  predicted = {}
  if isinstance(train_step, jax.stages.Compiled):
    predicted["memory/predicted_gib"] = predicted_bytes(train_step) / GIB
  return {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    **meter.summary(),
    **goodput.summary(),
    **memory_metrics(),
    **predicted,
    "kernels": {choice.op: choice.implementation for choice in program.choices},
    "compiler_options": program.options,
    "compilation_cache": runtime.cache_use(program.cfg),
  }


def performance(stats: dict[str, Any]) -> str:
  """The numbers of `get_performance_stats` as text; what is not known here is left out."""

  def say(*parts: tuple[str, str, float]) -> str:
    known = [form.format(scale * stats[name]) for form, name, scale in parts if name in stats]
    return ", ".join(known)

  lines = {
    f"speed on {stats['device']}": say(
      ("{:,.0f} tokens/s", "train/tokens_per_sec", 1),
      ("MFU {:.1%}", "train/mfu", 1),
      ("{:.1%} by 6N + 12LdS", "train/mfu_6n", 1),
    )
    or "too few steps to time",
    "a step": say(
      ("median {:,.1f} ms", "train/step_secs_p50", 1e3),
      ("90th percentile {:,.1f}", "train/step_secs_p90", 1e3),
      ("slowest {:,.1f} (means of intervals)", "train/step_secs_max", 1e3),
    ),
    "memory of a device": say(
      ("{:.2f} GiB used at most", "memory/device_peak_gib", 1),
      ("{:.2f} GiB predicted for the step", "memory/predicted_gib", 1),
      ("{:.2f} GiB there", "memory/device_limit_gib", 1),
    ),
    "kernels": ", ".join(f"{op} {name}" for op, name in stats["kernels"].items()),
    "compilation": f"{stats['goodput/compile_secs']:.1f} s",
    "compilation cache": stats["compilation_cache"],
  }
  return "\n".join(f"{title}: {text}" for title, text in lines.items() if text)


def closing(
  program: Program,
  folder: Path,
  state: TrainState,
  train_set: Dataset,
  valid_set: Dataset,
  scores: dict[str, float] | None,
) -> None:
  """Say what was reached: the validation scores, the bigram baseline, a sample of text."""
  cfg, step = program.cfg, int(state.step)
  if scores is None and valid_set.num_rows:  # the run was complete before it began
    scores = score(program, state.weights, valid_set, step)
  if scores:
    say_scores(cfg, train_set, valid_set, scores)
  if cfg.sample.max_tokens:
    text = sample(program, state.weights, train_set, step)
    if jax.process_index() == 0:
      path = folder / "samples" / f"{cfg.num_steps}.txt"
      path.parent.mkdir(exist_ok=True)
      path.write_text(text + "\n", encoding="utf-8")
    logging.info("a sample that continues %r:\n%s", cfg.sample.prompt, text)


def say_scores(
  cfg: Config, train_set: Dataset, valid_set: Dataset, scores: dict[str, float]
) -> None:
  """Log validation scores, beside a bigram model's loss if asked (`eval.bigram_baseline`)."""
  logging.info("validation: %s", ", ".join(f"{k[5:]} {v:.5g}" for k, v in scores.items()))
  if cfg.eval.bigram_baseline:
    baseline = bigram_baseline(cfg, train_set, valid_set)
    word = "below" if scores["eval/loss"] < baseline else "NOT below"
    logging.info(
      "validation loss %.4f is %s that of a Witten-Bell bigram model of the same tokens, %.4f",
      scores["eval/loss"], word, baseline,
    )  # fmt: skip


def bigram_baseline(cfg: Config, train_set: Dataset, valid_set: Dataset) -> float:
  """Loss on the validation text of a bigram model of the rows trained on, each counted once."""
  steps = min(cfg.num_steps, -(-train_set.num_rows // cfg.data.batch_size))
  with train_feed(cfg, train_set, row=0) as train, eval_feed(cfg, valid_set) as valid:
    model = Bigram(itertools.islice(train, steps), train_set.tokenizer.vocab_size)
    return model.loss(valid)


def sample(program: Program, weights: Decoder, train_set: Dataset, step: int) -> str:
  """The prompt and its continuation."""
  cfg, rules, prompt = program.cfg, program.rules(step), program.cfg.sample.prompt
  pieces = generate(
    weights, train_set.tokenizer, cfg.sample, rules=rules, prompt=prompt, seed=cfg.seed
  )
  return prompt + "".join(pieces)
