"""All that is chosen and compiled once for a run: implementations, optimizer, steps."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from ats_jax.config.schema import Config
from ats_jax.data.batch import FIELDS
from ats_jax.model.count import Counts, count
from ats_jax.model.decoder import Decoder, with_head
from ats_jax.model.forward_pass import Pass, rules_at
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.numerics import Numerics, numerics, unroll_of
from ats_jax.model.param import reshard_params, trainable
from ats_jax.model.random import Purpose, fold
from ats_jax.ops import registry
from ats_jax.ops.registry import Choice
from ats_jax.ops.requirements import Device, lacks_bfloat16, this_device
from ats_jax.sharding.apply import num_hosts, num_shards
from ats_jax.sharding.mesh import batch_sharding
from ats_jax.step.compiler import Options, compiler_options, evaluation_options
from ats_jax.step.core import step_function
from ats_jax.step.objective import Objective, Pretraining, make_eval_step
from ats_jax.step.optimizers import Optimizer, build_optimizer
from ats_jax.step.parts import parts_of
from ats_jax.step.state import TrainState

FP8 = "fp8"  # where a checkpoint says that 8 bits were switched off
COMPUTE_DTYPE = "compute_dtype"  # where it says the format of matmuls, if that is float16


@dataclasses.dataclass(frozen=True)
class Program:
  """All that determines how a run computes.

  Attributes:
    cfg: the resolved config.
    device: the device that the program was made for; traced code never asks for it again.
    choices: the implementation of each op, with the reason for it.
    num: dtypes and implementations of the model.
    optimizer: turns gradients into directions.
    objective: the loss and its metrics.
    options: compiler options of the train step; the evaluation step has `evaluation_options`.
    train_step: `(state, batch, rules) -> (state, metrics)`, see `make_train_step`.
    eval_step: `(model, batch, rules) -> sums`, see `make_eval_step`.
    counts: parameters and FLOPs per token.
    fp8: whether layers meant for 8 bits still use them (`scoring.check_fp8`).
  """

  cfg: Config
  device: Device
  choices: tuple[Choice, ...]
  num: Numerics
  optimizer: Optimizer
  objective: Objective
  options: Options
  train_step: jax.stages.Wrapped
  eval_step: jax.stages.Wrapped
  counts: Counts
  fp8: bool = True

  def init(self, *, model: Decoder | None = None, abstract: bool = False) -> TrainState:
    """Build the state of step 0, as `init_state`."""
    return init_state(self.cfg, self.num, self.optimizer, model=model, abstract=abstract)

  def abstract_base(self) -> Decoder:
    """Shapes, dtypes and shardings of the weights that `init` takes."""
    make = lambda: new_base(self.cfg, self.num, jax.random.key(0))
    return jax.eval_shape(make)

  def catch_up(self, state: TrainState, made_at: int) -> TrainState:
    """Renew the moments of an earlier state if a phase has begun between its step and now.

    Args:
      state: the state, donated; its step is the one to continue with.
      made_at: the number of updates after which the state was saved.
    """
    if self.cfg.optimizer.phase_moments == "keep":
      return state
    from ats_jax.step.parts.phases import renew_moments

    renew = functools.partial(renew_moments, self.cfg, self.optimizer, since=made_at)
    return jax.jit(renew, donate_argnums=0)(state)

  def rules(self, step: int) -> Pass:
    """The rules of evaluation and generation with the weights after update `step` (1-based)."""
    return self._rules(max(0, step - 1), training=False)

  def training_rules(self, step: int) -> Pass:
    """The rules of update `step` (1-based)."""
    return self._rules(step - 1, training=True)

  def _rules(self, update: int, *, training: bool) -> Pass:
    rules = rules_at(self.cfg, update, training=training)
    return dataclasses.replace(rules, fp8=self.fp8)

  def continued(self, saved: Mapping[str, Any]) -> "Program":
    """The program with the state that `saved` returned, as a checkpoint holds it."""
    return dataclasses.replace(self, fp8=saved.get(FP8, True))

  def saved(self) -> dict[str, Any]:
    """The state of the program for a checkpoint, as JSON values."""
    compute_dtype = self.cfg.precision.compute_dtype
    return {
      **({} if self.fp8 else {FP8: False}),
      **({COMPUTE_DTYPE: compute_dtype} if compute_dtype == "float16" else {}),
    }

  def facts(self) -> dict[str, str]:
    """Describe what runs, by name, for the log and the workdir."""
    cfg = self.cfg
    p = cfg.precision
    facts = {c.op: f"{c.implementation} ({c.reason})" for c in self.choices}
    formats = dict.fromkeys(cfg.optimizer.formats().values())
    moments = f"moments {' and '.join(formats)}; " if formats else ""
    facts["optimizer"] = cfg.optimizer.name
    facts["formats"] = (
      f"parameters {p.param_dtype}, matmuls {p.compute_dtype}, "
      f"{moments}norms, softmax and loss float32"
    )
    if p.scaling is not None:
      facts["loss scale"] = p.scaling.in_words()
    if p.fp8:
      number, every = sum(fp8_layers(cfg)), cfg.eval.every_steps
      watch = f"off once they add {p.fp8_band:.2%} to a validation loss (each {every} steps)"
      watch = watch if every else "not watched (eval.every_steps=0)"
      facts["8 bits"] = f"{number} of {cfg.model.num_layers} layers; {watch}"
    facts |= self.num.stack.facts()
    is_spread = cfg.moe.num_experts and num_shards("experts") > 1
    if is_spread and cfg.moe.exchange.name == "hierarchical":
      hosts = num_hosts()
      steps = f"between {hosts} hosts, then within each" if hosts > 1 else "one host: as allgather"
      facts["exchange of tokens"] = steps
    if cfg.mesh.compress_gradients != "none":
      from ats_jax.step.parts import replicas

      facts["reduction"] = replicas.describe_compression(cfg)
    if cfg.finetune.is_on:
      from ats_jax.model import adapters

      facts |= adapters.facts(self.init(abstract=True).model)
    options = ", ".join(f"{k}={v}" for k, v in self.options.items())
    counts = self.counts
    return facts | {
      "compiler options": options or "XLA's defaults",
      "active parameters a token": f"{counts.active:,.0f} of {counts.parameters:,}",
      "FLOPs a token": f"{counts.flops_causal:.3g} (causal attention, no input embedding; "
      f"the base of train/mfu), {counts.flops_full:.3g} (6N + 12LdS)",
    }

  def flops_per_token(self, seq_len: int) -> dict[str, float]:
    """Training FLOPs per token in rows of `seq_len` tokens, by the name of the metric."""
    counts = self.counts
    if seq_len != self.cfg.data.seq_len:
      counts = count(self.cfg, self.init(abstract=True).model, seq_len)
    return {"train/mfu": counts.flops_causal, "train/mfu_6n": counts.flops_full}

  def compile_train_step(
    self, state: TrainState, rules: Pass, seq_len: int | None = None
  ) -> jax.stages.Compiled:
    """Compile the train step for `rules` ahead of its first batch; log what it will need.

    Args:
      state: shapes, dtypes and shardings suffice.
      rules: the rules of the update.
      seq_len: positions in a row, which divides `data.seq_len`; None = that. A batch has the same
        number of tokens.
    """
    began = time.perf_counter()
    data, mesh = self.cfg.data, jax.sharding.get_mesh()
    seq_len = seq_len or data.seq_len
    rows = data.batch_size // self.cfg.step.accum_steps * (data.seq_len // seq_len)
    shape = (self.cfg.step.accum_steps, rows, seq_len)
    batch = abstract_batch(shape, batch_sharding(mesh, len(shape)), self.objective)
    compiled = self.train_step.lower(state, batch, rules).compile()
    logging.info(
      "the train step was compiled for rows of %d tokens in %.1f s; it needs %.2f GiB of a device",
      seq_len, time.perf_counter() - began, predicted_bytes(compiled) / 2**30,
    )  # fmt: skip
    return compiled


def init_state(
  cfg: Config,
  num: Numerics,
  optimizer: Optimizer,
  *,
  model: Decoder | None = None,
  abstract: bool = False,
) -> TrainState:
  """Build the state of step 0, each array created in its sharding on the current mesh.

  Args:
    cfg: the resolved config.
    num: dtypes and implementations (`model.numerics.numerics`).
    optimizer: the optimizer of the run.
    model: weights to begin with, which the state takes as they are, without adapters; None =
      random ones.
    abstract: return shapes, dtypes and shardings only, without computing anything.
  """
  parts = parts_of(cfg, optimizer)

  def beside(key: jax.Array, model: Any) -> TrainState:
    opt_state = optimizer.tx.init(reshard_params("moments", trainable(model)))
    state = TrainState(jnp.zeros((), jnp.int32), model, opt_state, None, key)
    for part in parts:
      state = part.init(state)
    return state

  def tuned(key: jax.Array, model: Any) -> Any:
    if cfg.finetune.is_on:
      from ats_jax.model.adapters import fine_tuned

      model = fine_tuned(cfg, model, key)
    return with_head(cfg, num, model, key)

  def init(key: jax.Array) -> TrainState:
    return beside(key, tuned(key, new_base(cfg, num, key)))

  make_key = lambda: jax.random.key(cfg.seed)
  if abstract:  # no device is used
    return jax.eval_shape(init, jax.eval_shape(make_key))
  if model is None:
    return jax.jit(init)(make_key())
  model = tuned(make_key(), model)
  # A program that returned the weights would copy them.
  without_model = lambda key, model: dataclasses.replace(beside(key, model), model=None)
  return dataclasses.replace(jax.jit(without_model)(make_key(), model), model=model)


def new_base(cfg: Config, num: Numerics, key: jax.Array) -> Decoder:
  """A model of random weights, before fine-tuning freezes some and adds adapters."""
  return Decoder(cfg, num, nnx.Rngs(params=fold(key, Purpose.INIT)))


def make_train_step(
  cfg: Config, optimizer: Optimizer, objective: Objective, options: Options | None = None
) -> jax.stages.Wrapped:
  """Return the jitted step `(state, batch [accum, batch, seq], rules) -> (state, metrics)`.

  The state is donated. `objective` is what is minimised; `rules` are those of the update
  (`Program.training_rules`); `options` are the compiler's. Call it under the mesh.
  """
  step = step_function(cfg, optimizer, objective, parts_of(cfg, optimizer))
  return jax.jit(step, donate_argnums=0, static_argnames="rules", compiler_options=options or None)


def abstract_batch(
  shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, objective: Objective | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
  """A batch of a shape, with the fields that an objective adds."""
  fields = FIELDS | dict(objective.fields if objective is not None else {})
  return {
    name: jax.ShapeDtypeStruct(
      (*shape[:-1], shape[-1] * field.each), field.dtype, sharding=sharding
    )
    for name, field in fields.items()
  }


def predicted_bytes(compiled: jax.stages.Compiled) -> int:
  """Device memory that a compiled step needs at its peak, as its compiler planned it."""
  plan = compiled.memory_analysis()
  assert plan is not None, "every backend of jax.jit has one"
  donated = plan.alias_size_in_bytes
  return plan.argument_size_in_bytes + plan.output_size_in_bytes - donated + plan.temp_size_in_bytes


def make_program(cfg: Config, objective: Objective | None = None) -> Program:
  """Choose implementations for the devices at hand and build the steps (nothing is compiled yet).

  Call under the mesh, with a resolved config.

  Args:
    cfg: the run.
    objective: what is minimised; None = `Pretraining`.

  Raises:
    ValueError: if the mesh does not divide a dimension of the weights, if the device lacks
      bfloat16, or for `mesh.keep_gathered` with layers in a loop.
  """
  objective = Pretraining(cfg) if objective is None else objective
  device = this_device()
  kernels, choices = registry.choose(cfg, device)
  if cfg.precision.compute_dtype == "bfloat16" and (lacks := lacks_bfloat16(device)):
    raise ValueError(
      f"precision.compute_dtype=bfloat16: {lacks}, and XLA refuses attention in it. Set float16 or "
      "auto; generate and evaluate have --compute_dtype."
    )
  unroll = unroll_of(cfg, device.platform)
  if device.platform == "gpu" and cfg.step.scan_unroll > 1 and cfg.precision.deterministic:
    logging.warning(
      "step.scan_unroll=%d with precision.deterministic: such a step stopped at its first call "
      "with an IndexError inside XLA (jax 0.11.2). If this one does too, use step.scan_unroll=1.",
      cfg.step.scan_unroll,
    )
  if cfg.mesh.keep_gathered and unroll < max(2, cfg.model.num_layers):
    raise ValueError(
      f"mesh.keep_gathered=true with layers in a loop (step.scan_unroll={unroll} of "
      f"model.num_layers={cfg.model.num_layers}): a loop gathers the weights of a layer in each "
      f"pass. Set step.scan_unroll={cfg.model.num_layers}, or mesh.keep_gathered=false."
    )
  num = numerics(cfg, kernels, device.platform)
  optimizer = build_optimizer(cfg, device.platform, kernels)
  options = compiler_options(cfg, device)
  model = init_state(cfg, num, optimizer, abstract=True).model
  return Program(
    cfg=cfg,
    device=device,
    choices=choices,
    num=num,
    optimizer=optimizer,
    objective=objective,
    options=options,
    train_step=make_train_step(cfg, optimizer, objective, options),
    eval_step=make_eval_step(cfg, evaluation_options(options), objective),
    counts=count(cfg, model, cfg.data.seq_len),
  )
