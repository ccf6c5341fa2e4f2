"""A run that PyTorch trains: open it where it goes on, make updates, evaluate, save; repeat."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from absl import logging

from ats_jax.checkpoint import CheckpointManager, StopSignal, abstract_like, workdir
from ats_jax.config import Config
from ats_jax.config.build import CHANGES, resolve
from ats_jax.config.names import KINDS, default_of, flatten, settings, to_dict
from ats_jax.config.schema import MeshConfig, OpsConfig
from ats_jax.config.schema.setting import Kinds
from ats_jax.data.batch import POSITION
from ats_jax.data.rows.contract import Rows, TrainRows
from ats_jax.data.rows.loader import TrainBatches, eval_batches
from ats_jax.data.sources import EvalSet, open_data, open_eval_sets
from ats_jax.data.tokens.file import save_tokenizer
from ats_jax.metrics import logfile
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.environment import environment
from ats_jax.metrics.files import LayerLog
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.memory import memory_metrics
from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.progress import ProgressBar
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.writer import MetricWriter
from ats_jax.model.layout import stacks
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.kernels import ASKED, TRITON_OPS, chosen_kernels
from ats_jax.pytorch.training import device as devices
from ats_jax.pytorch.training.device import LossScale
from ats_jax.pytorch.training.lora import MERGED, Adapters, Lora
from ats_jax.pytorch.training.state import optimizer_of, to_jax, to_torch
from ats_jax.pytorch.training.step import Trainer, Update, batch_on
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.course import Course
from ats_jax.step.program import Program, make_program
from ats_jax.step.sparse_value import sparse_value_metrics
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.train import report
from ats_jax.train.evaluate import eval_metrics
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.num_steps import rows_read, with_num_steps
from ats_jax.train.open import ResumePoint, restored_or_new

SCALE = "torch/loss_scale"  # in a checkpoint
# Settings and whole sections that are about JAX, or about jobs of several processes.
_WITHOUT_EFFECT = (
  "checkpoint.local_",
  "compilation_cache",
  "data.num_workers",
  "hang_secs",
  "heartbeat_secs",
  "join_secs",
  "log.profile_",
  "mesh.",
  "moe.exchange.",
  "ops.strict",
  "step.compiler_options",
  "step.remat_stages",
  "step.scan_unroll",
)


@dataclasses.dataclass(frozen=True)
class Options:
  """How PyTorch computes; none of it is a setting of the run.

  Attributes:
    device: name of the device, as of `device.find_device`.
    dtype: dtype of activations and of the weights in a matmul.
    compiles: by `torch.compile`.
    lora: train adapters instead of the model; None = the model.
  """

  device: torch.device
  dtype: torch.dtype
  compiles: bool = False
  lora: Lora | None = None


def check(cfg: Config) -> None:
  """See that PyTorch trains what JAX would.

  Raises:
    ValueError: naming the setting that it has not.
  """
  only = {
    "optimizer.name": "adamw",
    "optimizer.ema_decay": 0.0,
    "optimizer.phase_moments": "keep",
    "orchestrator.mode": "off",
    "precision.param_dtype": "float32",
    "optimizer.mu_dtype": "float32",
    "optimizer.nu_dtype": "float32",
    "optimizer.rate_by_role": {},
    "optimizer.b1_by_role": {},
    "optimizer.b2_by_role": {},
    "precision.fp8": False,
    "step.loss.name": "cross_entropy",
    "finetune.adapter.name": "none",  # it has `--lora_rank`
    "finetune.freeze": (),
    "finetune.layers": "",
  }
  flat = flatten(cfg)
  for name, value in only.items():
    if flat.get(name, value) != value:
      raise ValueError(f"bridge train has only --config.{name}={value}, not {flat[name]}.")
  if cfg.precision.compute_dtype in ("float16", "auto"):
    raise ValueError(
      f"bridge train takes the format of matmuls by --dtype. Use --dtype=float16 in place of "
      f"precision.compute_dtype={cfg.precision.compute_dtype}."
    )
  if cfg.data.order.num_lengths > 1:
    raise ValueError(
      f"bridge train has rows of one length, and --config.data.order={cfg.data.order.name} makes "
      "several. Use shuffled or difficulty."
    )


def check_given(
  cfg: Config, given: Iterable[str], stored: Callable[[], Mapping[str, Any]] = dict
) -> None:
  """Refuse settings that a user gave and that change nothing in PyTorch.

  What a file says of them stays: the same file is for JAX too, which may go on with the run.

  Args:
    cfg: the run.
    given: dotted names of the settings that flags set.
    stored: as of `validate.check_given`.

  Raises:
    ValueError: naming the first.
  """
  flat, fields = flatten(cfg), settings(cfg)
  if "ops.kernels" in given:
    for op, kernel in cfg.ops.kernels.items():
      if op not in TRITON_OPS or kernel not in ASKED:
        raise ValueError(
          f"ops.kernels: {op}={kernel} does nothing with bridge train, which has "
          f"{' and '.join(TRITON_OPS)}: {' or '.join(ASKED)} (PyTorch's own). Leave it out."
        )
  for name in (f"{name}.{Kinds.TAG}" if name in KINDS else name for name in given):
    if (
      name.startswith(_WITHOUT_EFFECT)
      and flat[name] != default_of(name, fields[name])
      and stored().get(name) != flat[name]
    ):
      raise ValueError(
        f"{name}={flat[name]} does nothing with bridge train, whose steps PyTorch makes on one "
        "device. Leave it out, or use `ats-jax train`."
      )


@dataclasses.dataclass
class TorchRun:
  """An open run whose updates PyTorch makes.

  Attributes:
    program: its config, counts and abstract state; JAX computes nothing with it.
    folder: the workdir.
    trainer: makes updates.
    state_after: makes the state that a checkpoint holds, given the number of updates done.
    adapters: the low-rank adapters that are trained in place of the model; None = the model is.
    step: number of updates done.
    device: the device of the model.
    train_set: the training split.
    valid_set: the validation split; may have no rows.
    eval_sets: the validation split, if it has rows, and the named validation sets.
    batches: batches of the training split, from the run's position on.
    course: how far the run is.
    checkpoints: saves and restores the state.
    writer: writes metrics.
    layers: writes arrays of sparse layers; None = there are none.
    meter: measures tokens and steps a second.
    goodput: adds up where the wall time goes.
    progress: shows the newest row of metrics.
    kernels: implementations of ops, by name, where PyTorch has several.
    scores: metrics of the last evaluation, if it was of these weights; else None.
  """

  program: Program
  folder: Path
  trainer: Trainer
  state_after: Callable[[int], Any]
  adapters: Adapters | None
  step: int
  device: torch.device
  train_set: TrainRows
  valid_set: Rows
  eval_sets: tuple[EvalSet, ...]
  batches: TrainBatches
  course: Course
  checkpoints: CheckpointManager
  writer: MetricWriter
  layers: LayerLog | None
  meter: Throughput
  goodput: Goodput
  progress: ProgressBar
  kernels: Mapping[str, str]
  scores: dict[str, float] | None = None

  @property
  def cfg(self) -> Config:
    """Resolved."""
    return self.program.cfg

  def update(self) -> None:
    """Make one update, and log it if its step is one that is logged."""
    with self.goodput.timed("data_wait"):
      batch = batch_on(self.device, next(self.batches))
    with self.goodput.timed("step"):
      made = self.trainer.update(self.step, batch)
      self.step, self.scores = self.step + 1, None
      if self.step % self.cfg.log.every_steps == 0:
        self._log(made)
      else:
        self.progress.update(self.step)

  def evaluate(self) -> None:
    """Score the weights on every evaluation set, if there is one."""
    if not self.eval_sets:
      return
    with self.goodput.timed("eval"):
      self.scores = {
        name.replace("eval/", held_out.prefix, 1): value
        for held_out in self.eval_sets
        for name, value in self._score(held_out).items()
      }
      self.writer.write_scalars(self.step, self.scores)
    self.meter.start(self.step)

  def save(self) -> None:
    """Save a checkpoint that JAX restores too.

    Raises:
      FloatingPointError: for weights that are not finite; nothing is saved.
    """
    with self.goodput.timed("checkpoint"):
      trainer = self.trainer
      for name, parameter in trainer.model.named_parameters():
        if not bool(parameter.isfinite().all()):
          raise FloatingPointError(
            f"{name} is not finite after step {self.step}, which was not saved. Lower "
            "optimizer.learning_rate, or look at the data (python -m ats_jax data stats)."
          )
      self.writer.flush()
      if self.layers is not None:
        self.layers.flush()
      state = self.state_after(self.step)
      extra = {POSITION: self.batches.position(), SCALE: trainer.scale.saved()}
      loss = (self.scores or {}).get("eval/loss")
      self.checkpoints.save(self.step, state, extra, metric=loss)
      stall = {"checkpoint/stall_secs": self.checkpoints.last_save_stall_secs}
      self.writer.write_scalars(self.step, stall)
    self.meter.start(self.step)

  def finish(self) -> None:
    """Wait for the last checkpoint; say what was reached, and write what the run took."""
    found = None
    if self.scores:
      found = report.scores(self.cfg, self.train_set, self.valid_set, self.scores)
    if found:
      self.writer.write_scalars(self.step, found)
    with self.goodput.timed("checkpoint"):
      self.checkpoints.wait()
      if self.adapters is not None and self.step == self.cfg.num_steps:
        folder = pathlib.Path(self.folder)
        self.adapters.write(self.cfg, folder, self.train_set.info.tokenizer)
        logging.info("merged: ats-jax bridge import --folder=%s/%s", self.folder, MERGED)
    self.writer.write_scalars(self.step, self.goodput.summary())
    stats = {
      "device": f"1 x {devices.kind(self.device)}",
      **self.meter.summary(),
      **self.goodput.summary(),
      **memory_metrics(),
      **devices.memory(self.device),
      "kernels": self.kernels,
      "compiler_options": {},
      "compilation_cache": "off: PyTorch",
    }
    workdir.write_json(self.folder / workdir.PERFORMANCE, stats)
    logging.info("%s", self.goodput.line())

  def _log(self, made: Update) -> None:
    metrics, arrays = self.trainer.metrics(made)
    devices.synchronize(self.device)
    done = time.monotonic()
    if made.made and not math.isfinite(metrics["train/loss"]):
      raise FloatingPointError(
        f"train/loss is {metrics['train/loss']} at step {self.step}. Lower "
        "optimizer.learning_rate, or look at the data (python -m ats_jax data stats). No "
        "checkpoint holds such weights."
      )
    metrics["train/perplexity"] = math.exp(min(metrics["train/loss"], 700.0))
    rules = self.program.training_rules(self.step)
    metrics |= sparse_value_metrics(self.cfg, self.program.counts, rules, metrics, arrays)
    metrics |= self.course.metrics(self.step, metrics)
    metrics |= self.meter.read(self.step, done)
    metrics |= memory_metrics() | devices.memory(self.device)
    if self.trainer.scale.moves:
      metrics["train/loss_scale"] = self.trainer.scale.value
    self.checkpoints.check_folder()
    self.writer.write_scalars(self.step, metrics)
    if arrays and self.layers is not None:
      self.layers.write_arrays(self.step, arrays)
    self.progress.update(self.step, metrics)

  def _score(self, held_out: EvalSet) -> dict[str, float]:
    data, cfg = held_out.dataset, self.cfg
    micro = cfg.data.batch_size // cfg.step.accum_steps
    rows, most = np.arange(micro), cfg.eval.num_batches * cfg.step.accum_steps
    with eval_batches(data, batch_size=micro, local_rows=rows, num_batches=most) as batches:
      sums = [self.trainer.score(batch_on(self.device, batch), self.step) for batch in batches]
    loss, correct, tokens = np.sum(sums or [np.zeros(3)], axis=0).tolist()
    return eval_metrics(loss, correct, tokens, data)


def train(
  cfg: Config, folder: Path, options: Options, initial: InitialWeights | None = None
) -> bool:
  """Train to `cfg.num_steps`, going on from the newest checkpoint in `folder` if there is one.

  Args:
    cfg: the run, as `from_config_dict` gives it.
    folder: workdir of the run.
    options: how PyTorch computes.
    initial: weights to begin with, of another run or of Hugging Face; None = random ones.

  Returns:
    Whether it was trained to the end; False where a signal stopped it after saving.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite.
  """
  check(cfg)
  if options.lora is not None and paths.is_remote(folder):
    raise ValueError(f"--lora_rank: peft writes to a disk, and {folder} is on none.")
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(StopSignal())
    run = _open(stack, cfg, folder, options, initial)
    last, cfg = run.cfg.num_steps, run.cfg
    due = lambda every: every > 0 and run.step % every == 0
    while run.step < last and not stop.requested:
      run.update()
      ends = run.step == last or bool(stop.requested)
      if run.step == last or due(cfg.eval.every_steps):
        run.evaluate()
      if ends or due(cfg.checkpoint.every_steps):
        run.save()
    run.finish()
    if run.step < last:
      logging.info(
        "%s: saved step %d. The same command goes on from there.", stop.requested, run.step
      )
    return run.step == last


def _open(
  stack: contextlib.ExitStack,
  cfg: Config,
  folder: Path,
  options: Options,
  initial: InitialWeights | None,
) -> TorchRun:
  enter, goodput = stack.enter_context, Goodput()
  enter(logfile.verbosity(cfg.log))
  enter(devices.as_asked(cfg))
  identity = enter(workdir.claim(folder, cfg))
  enter(logfile.log_to_file(folder, 0))
  checkpoints = enter(
    CheckpointManager(folder / workdir.CHECKPOINTS, cfg.checkpoint, identity, stacks(cfg))
  )
  newest = checkpoints.newest()
  if newest is not None and newest[1].get(CHANGES):
    raise ValueError(f"{folder}: an orchestrator changed its settings. Train on in JAX.")
  if initial is not None and newest is None:
    initial.check(cfg)
    initial.keep_companions(folder)
  train_set, valid_set = open_data(cfg.data, cfg.seed)
  done = (0, 0) if newest is None else rows_read(cfg, train_set, *newest)
  cfg, length = with_num_steps(cfg, train_set, done)
  workdir.write_config(folder, cfg)
  cfg = resolve(cfg, train_set.info.tokenizer.vocab_size)
  kernels = chosen_kernels(cfg, options.device, options.dtype)
  model = Decoder(cfg, options.dtype, remat=cfg.step.remat != "none").to(options.device)
  cfg = dataclasses.replace(cfg, mesh=MeshConfig(), ops=OpsConfig())  # JAX is on the CPU
  mesh = make_mesh(cfg, jax.devices()[:1])
  enter(jax.set_mesh(mesh))
  program = make_program(cfg)
  abstract = abstract_like(program.init(abstract=True), mesh)
  origin = ResumePoint()
  if newest is not None:
    origin = ResumePoint(*newest, lambda like: checkpoints.read(newest[0], like))
  if options.lora is None:
    adapters, optimizer = None, optimizer_of(cfg, model, abstract)
    to_torch(cfg, restored_or_new(program, origin, initial, train_set), model, optimizer)
    state_after = lambda step: to_jax(cfg, abstract, model, optimizer, step)
  else:  # the model is in no checkpoint: it is what it was
    to_torch(cfg, restored_or_new(program, ResumePoint(), initial, train_set), model, None)
    adapters = Adapters(cfg, model, options.lora)
    if newest is not None:
      adapters.restore(checkpoints, newest[0])
    optimizer, state_after = adapters.optimizer, lambda step: adapters.state()
  if options.compiles:
    model.compile()
  scale = LossScale.of(options.dtype, origin.extra.get(SCALE, {}))
  micro = cfg.data.batch_size // cfg.step.accum_steps
  batches = enter(
    TrainBatches(
      train_set,
      position=origin.extra.get(POSITION),
      accum_steps=cfg.step.accum_steps,
      batch_size=cfg.data.batch_size,
      local_rows=np.arange(micro),
      num_workers=0,
      prefetch=cfg.data.prefetch,
      tells=True,
    )
  )
  save_tokenizer(train_set.info.tokenizer, folder / workdir.TOKENIZER)
  if newest is None:
    report.keep_data_facts(folder, train_set, valid_set)
  _say(program, folder, options, origin.step, length)
  rows_until = origin.step if origin.restore else None
  writer = create_writer(cfg.log, folder, resume_step=rows_until, run=identity.run)
  enter(contextlib.closing(writer))
  writer.write_hparams(flatten(cfg))
  layers = None
  if cfg.moe.num_experts or cfg.mod.routing != "none":
    layers = LayerLog(folder / workdir.LAYERS, last_step=-1 if rows_until is None else rows_until)
    enter(contextlib.closing(layers))
  progress = enter(ProgressBar(cfg.num_steps, start_step=origin.step, enabled=cfg.log.progress))
  meter = _meter(program, options)
  meter.start(origin.step)
  return TorchRun(
    program,
    folder,
    Trainer(cfg, model, optimizer, scale, sets_buffers=adapters is None),
    state_after,
    adapters,
    origin.step,
    options.device,
    train_set,
    valid_set,
    open_eval_sets(cfg.data, valid_set),
    batches,
    Course(cfg, origin.step, batches.position()["row"]),
    checkpoints,
    writer,
    layers,
    meter,
    goodput,
    progress,
    kernels,
  )


def _meter(program: Program, options: Options) -> Throughput:
  cfg = program.cfg
  return Throughput(
    num_devices=1,
    peak=peak_flops(devices.kind(options.device), str(options.dtype).removeprefix("torch.")),
    rows_per_step=cfg.data.batch_size,
    tokens_per_step=cfg.data.batch_size * cfg.data.seq_len,
    flops_per_token=program.flops_per_token(cfg.data.seq_len),
  )


def _say(program: Program, folder: Path, options: Options, start: int, length: str) -> None:
  """Log and store what will run."""
  cfg, counts = program.cfg, program.counts
  facts: dict[str, Any] = {
    "device": f"{devices.kind(options.device)}, PyTorch {torch.__version__}",
    "formats": f"parameters and moments float32, matmuls {options.dtype}; norms, routers, loss "
    "float32",
    "compiled": "by torch.compile" if options.compiles else "no",
    "active parameters a token": f"{counts.active:,.0f} of {counts.parameters:,}",
    "length by": length,
  }
  for name, value in facts.items():
    logging.info("%s: %s", name, value)
  shape = {name: to_dict(getattr(cfg, name)) for name in ("model", "moe", "mod")}
  run = {**shape, "parameters": counts.parameters, **facts}
  workdir.write_json(paths.parse(folder / workdir.METADATA), {**environment(), "run": run})
  if start:
    logging.info("resuming %s from step %d of %d", folder, start, cfg.num_steps)
