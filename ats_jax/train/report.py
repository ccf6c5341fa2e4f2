"""What a run says about itself: at its start, and at its end."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from absl import logging

from ats_jax.checkpoint import workdir
from ats_jax.cluster import runtime
from ats_jax.config.names import to_dict
from ats_jax.config.schema import Config
from ats_jax.data.rows.contract import Rows, TrainRows
from ats_jax.data.rows.facts import facts_of
from ats_jax.metrics.environment import environment
from ats_jax.metrics.memory import GIB, memory_metrics
from ats_jax.metrics.peaks import describe_peak
from ats_jax.model.count import parameter_overview
from ats_jax.step.course import Course
from ats_jax.step.program import Program
from ats_jax.step.schedule import phases, warmup_steps
from ats_jax.step.state import TrainState
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.train.feed import eval_feed, train_feed

IDLE_ROWS = 0.25  # share of the vocabulary's table that may be idle without a warning
SMALLEST_BPE = 300  # as `data.bpe_vocab_size`


def opening(
  program: Program,
  folder: Path,
  state: TrainState,
  train_set: TrainRows,
  course: Course,
  length: str,
) -> None:
  """Log and store what will run: parameters, implementations, formats, mesh, data.

  Args:
    program: program of the run.
    folder: the workdir.
    state: the state at the start.
    train_set: rows of the training split.
    course: where the run begins or goes on.
    length: what decided the number of steps, in words.
  """
  cfg, mesh, start = program.cfg, jax.sharding.get_mesh(), course.first_step
  total = course.row(max(cfg.num_steps, start))
  epochs = train_set.progress(total).epochs
  before = ""
  if course.first_row != start * cfg.data.batch_size:  # of another data.batch_size
    before = f"{start:,} steps read {course.first_row:,} rows; "
  logging.info("parameters:\n%s", parameter_overview(state.model))
  facts = {
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "peak of a device": describe_peak(jax.devices()[0].device_kind, cfg.precision.compute_dtype),
    "mesh": ", ".join(f"{name}={size}" for name, size in mesh.shape.items()),
    **program.facts(),
    "training text": train_set.info.in_words(),
    "run": f"{before}{cfg.num_steps - (start if before else 0):,} "
    f"{'more ' if before else ''}steps x {cfg.data.batch_size} rows"
    + ("" if epochs is None else f" = {epochs:.2f} epochs")
    + f", {total * cfg.data.seq_len:,} tokens",
    "length by": length,
    "learning rate": "; ".join(
      f"from step {start + 1:,} on {warmup_steps(own):,} steps of warm-up to "
      f"{own.optimizer.learning_rate:g}, then {own.optimizer.schedule.name}"
      for start, own in phases(cfg)
    ).removeprefix("from step 1 on "),
    "compilation cache": runtime.cache_use(cfg),
  }
  for name, value in facts.items():
    logging.info("%s: %s", name, value)
  if start == 0:
    say_unused_rows(cfg, train_set, program.counts.parameters)
    if cfg.moe.num_experts:
      say_obstacle(cfg)
  if jax.process_index() == 0:
    shape = {name: to_dict(getattr(cfg, name)) for name in ("model", "moe", "mod")}
    run = {**shape, "parameters": program.counts.parameters, **facts}
    workdir.write_json(folder / workdir.METADATA, {**environment(), "run": run})
  if start == cfg.num_steps:
    logging.info(
      "%s is complete: step %d of %d. --config.num_steps=%d would train on.",
      folder, start, cfg.num_steps, 2 * cfg.num_steps,
    )  # fmt: skip
  elif start:
    logging.info("resuming %s from step %d of %d", folder, start, cfg.num_steps)


def keep_data_facts(folder: Path, train_set: Rows, valid_set: Rows) -> None:
  """Store what the run reads; its text may be gone when somebody asks."""
  parts = [*facts_of(train_set, "training"), *facts_of(valid_set, "validation")]
  workdir.write_json(folder / workdir.DATA, {"parts": parts})


def say_obstacle(cfg: Config) -> None:
  """Log what keeps a model with experts from a published family, before it is trained."""
  from ats_jax.bridge.export import obstacle  # here: a dense run does without

  if reason := obstacle(cfg):
    logging.info(
      "export: `bridge export` cannot write this model, as it is trained here, as one of a "
      "published family: %s. --family=ats_jax writes it with its own decoder.",
      reason,
    )


def say_unused_rows(cfg: Config, train_set: TrainRows, parameters: int) -> None:
  """Log how much of the vocabulary the text uses; warn if a good part of the table is idle.

  Args:
    cfg: with the size of the table.
    train_set: rows of the training split, for its text and tokenizer.
    parameters: number of parameters of the model.
  """
  m, size, used = cfg.model, train_set.info.tokenizer.vocab_size, train_set.info.ids_used
  unused = m.vocab_size - used
  tables = ("the embedding",) if m.tie_embeddings else ("the embedding", "the head")
  share = unused / m.vocab_size
  weights = len(tables) * unused * m.d_model / parameters
  text = (
    f"vocabulary: the text uses {used:,} of {m.vocab_size:,} rows of {' and of '.join(tables)}; "
    f"the other {unused:,} are {share:.1%} of the table and {weights:.1%} of all parameters"
  )
  if share <= IDLE_ROWS:
    logging.info("%s.", text)
    return
  fit = max(SMALLEST_BPE, 2 ** (used.bit_length() - 1))
  fix = (
    f"data.tokenizer has {size:,} ids, of which this text has few: --config.data.tokenizer=bpe "
    f"--config.data.bpe_vocab_size={fit} --config.model.vocab_size=0 makes a vocabulary for it"
  )
  if size < (1 - IDLE_ROWS) * m.vocab_size:
    fix = (
      f"data.tokenizer has only {size:,} ids: --config.model.vocab_size=0 takes that size, "
      f"--config.data.tokenizer=FILE names a tokenizer.json of the table's, and "
      f"--config.data.bpe_vocab_size={m.vocab_size} trains one on a larger text"
    )
  logging.warning("%s. For a new run: %s.", text, fix)


def scores(
  cfg: Config, train_set: TrainRows, valid_set: Rows, metrics: dict[str, float]
) -> dict[str, float]:
  """Log validation scores; return the losses of baselines if asked (`eval.bigram_baseline`)."""
  shown = {name[5:]: shorten(v) for name, v in metrics.items() if "/layer_routed/" not in name}
  logging.info("validation: %s", ", ".join(f"{name} {value}" for name, value in shown.items()))
  if cfg.eval.bigram_baseline and "eval/perplexity" in metrics and valid_set.info.num_rows:
    bigrams, unigrams = baselines(cfg, train_set, valid_set)
    word = "below" if metrics["eval/loss"] < bigrams else "NOT below"
    logging.info(
      "validation loss %.4f is %s that of a Witten-Bell bigram model of the same tokens, %.4f",
      metrics["eval/loss"], word, bigrams,
    )  # fmt: skip
    return {"eval/bigram_loss": bigrams, "eval/unigram_loss": unigrams}
  return {}


def shorten(value: float) -> str:
  """A score in five digits, a large count in full."""
  return f"{value:,.0f}" if value >= 1e4 else f"{value:.5g}"


def baselines(cfg: Config, train_set: TrainRows, valid_set: Rows) -> tuple[float, float]:
  """Losses on the validation text by bigrams and unigrams of the rows trained on, each once."""
  from ats_jax.data.look.bigram import Bigram  # here: runs without this baseline need none

  steps = min(cfg.num_steps, -(-train_set.info.num_rows // cfg.data.batch_size))
  with train_feed(cfg, train_set) as train, eval_feed(cfg, valid_set) as valid:
    model = Bigram(itertools.islice(train, steps), train_set.info.tokenizer.vocab_size)
    return model.losses(valid)


def log_sample(program: Program, folder: Path, state: TrainState, train_set: TrainRows) -> str:
  """Log, store and return the prompt and its continuation; "" if there is to be none.

  A run on conversations answers the prompt.
  """
  cfg, rules, prompt = program.cfg, program.rules(int(state.step)), program.cfg.sample.prompt
  if not cfg.sample.max_tokens or not state.weights.predicts:
    return ""
  from ats_jax.inference.generator import generate  # here: runs without a sample need none

  tokenizer = train_set.info.tokenizer
  begin = tokenizer.question(prompt)
  pieces = generate(state.weights, tokenizer, cfg.sample, rules=rules, prompt=begin, seed=cfg.seed)
  text = prompt + "".join(pieces)
  if jax.process_index() == 0:
    paths.make_folder(folder / "samples")
    paths.write(folder / "samples" / f"{cfg.num_steps}.txt", text + "\n")
  logging.info("a sample that continues %r:\n%s", prompt, text)
  return text


def performance_stats(
  summaries: Iterable[Mapping[str, float]],
  predicted_bytes: int | None,
  program: Mapping[str, Any],
) -> dict[str, Any]:
  """What this process's part of a run took, as JSON-ready numbers.

  Args:
    summaries: `Watcher.summary` of each watcher: speed, goodput.
    predicted_bytes: bytes that the largest step needs on a device; None = none was compiled.
    program: facts about the program: the last three entries of the result.

  Returns:
    `device`, `Throughput.summary` (step times are means of `log.every_steps` steps),
    `Goodput.summary`, `memory_metrics`, `memory/predicted_gib`; `kernels` (op -> implementation),
    `compiler_options`, `compilation_cache`.
  """
  predicted = {} if predicted_bytes is None else {"memory/predicted_gib": predicted_bytes / GIB}
  return {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    **{name: value for summary in summaries for name, value in summary.items()},
    **memory_metrics(),
    **predicted,
    **program,
  }


def performance(stats: dict[str, Any]) -> str:
  """The numbers of `performance_stats` as text; what is not known here is left out."""

  def say(*parts: tuple[str, str, float]) -> str:
    known = [form.format(scale * stats[name]) for form, name, scale in parts if name in stats]
    return ", ".join(known)

  lines = {
    f"speed on {stats['device']}": say(
      ("{:,.0f} tokens/s", "train/tokens_per_sec", 1),
      ("MFU {:.1%}", "train/mfu", 1),
      ("{:.1%} by 6N + 12LdS", "train/mfu_6n", 1),
      ("{:,.3g} TFLOP/s a device", "train/tflops_per_device", 1),
    )
    or "too few steps to time",
    "a step": say(
      ("median {:,.1f} ms", "train/step_secs_p50", 1e3),
      ("90th percentile {:,.1f}", "train/step_secs_p90", 1e3),
      ("slowest {:,.1f} (means of intervals)", "train/step_secs_max", 1e3),
    ),
    "gradients": say(("clipped in {:.0%} of the logged steps", "train/clipped", 1)),
    "memory of a device": say(
      ("{:.2f} GiB used at most", "memory/device_peak_gib", 1),
      ("{:.2f} GiB predicted for the step", "memory/predicted_gib", 1),
      ("{:.2f} GiB there", "memory/device_limit_gib", 1),
    ),
    "kernels": ", ".join(f"{op} {name}" for op, name in stats["kernels"].items()),
    "waited for compilation": f"{stats['goodput/compile_secs']:.1f} s",
    "compilation cache": stats["compilation_cache"],
  }
  return "\n".join(f"{title}: {text}" for title, text in lines.items() if text)
