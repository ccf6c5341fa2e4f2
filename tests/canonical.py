"""Six canonical tiny models, and what tests share of them: initial states and compiled programs.

A test takes the kind of model that it needs and varies the data and the state rather than the
program. Equal configs have one program for each process, and jax's cache on disk, which all workers
of a session share, has its machine code. What is returned may be donated or changed by a test.

    cfg = canonical.config("experts")
    state, metrics = canonical.step(cfg, canonical.state(cfg), canonical.rows(cfg, seed=1))
"""

import argparse
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import TRAINING, make_decoder, make_test_mesh, micro_batches, random_rows, tiny_config

from ats_jax.config import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.param import merge, trainable
from ats_jax.step.objective import LossSums, loss_sums
from ats_jax.step.program import Program, make_program
from ats_jax.step.state import StepMetrics, TrainState

EXPERTS = {"moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 16}
DEPTHS = {"mod.routing": "learned", "mod.capacity": 0.5}  # the second layer
KINDS: dict[str, dict[str, Any]] = {
  "dense": {},
  "experts": EXPERTS,
  "depths": DEPTHS,
  "hybrid": EXPERTS | DEPTHS,
  "latent": {
    "model.num_kv_heads": 4,
    "model.head_dim": 14,
    "model.kv_latent_dim": 12,
    "model.q_latent_dim": 16,
    "model.latent_rope_dim": 6,
    "model.v_head_dim": 10,
  },
  # The first layer has a window, the second has none; all options of attention are on.
  "window": {
    "model.window": 5,
    "model.full_every": 2,
    "model.window_rope_theta": 50.0,
    "model.qk_norm": True,
    "model.qkv_bias": True,
    "model.attn_out_bias": True,
    "model.attn_sinks": True,
    "model.attn_soft_cap": 2.0,
  },
}
# With the reflex in the step, and with what a supervisor may set between two steps.
STEERED = {
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 10,
  "optimizer.learning_rate": 1e-3,
  "optimizer.schedule": "constant",
}


# The dense model under a supervisor that looks every eight steps.
SUPERVISED = {
  "num_steps": 400,
  "optimizer.schedule": "constant",
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 8,
  "orchestrator.snapshot_interval": 8,
}


def config(kind: str, changes: dict[str, Any] | None = None) -> Config:
  """The config of a canonical model, with some settings (by dotted name) changed."""
  return tiny_config(KINDS[kind] | (changes or {}))


def rows(cfg: Config, seed: int = 0) -> dict[str, np.ndarray]:
  """A batch of packed rows as the train step takes it."""
  return micro_batches(random_rows(cfg, cfg.data.batch_size, seed), cfg.step.accum_steps)


@functools.cache
def _text() -> np.ndarray:
  """The bytes of a module of the standard library."""
  return np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int32)


def text_rows(cfg: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """A batch of rows without padding, as the train step takes it, cut from a text."""
  batch, seq = cfg.data.batch_size, cfg.data.seq_len
  starts = rng.integers(0, _text().size - seq - 1, batch)
  window = _text()[starts[:, None] + np.arange(seq + 1)]
  ones = np.ones((batch, seq), np.int32)
  found = {
    "tokens": window[:, :-1],
    "targets": window[:, 1:],
    "loss_mask": ones.astype(np.float32),
    "segment_ids": ones,
    "positions": np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq)),
  }
  return micro_batches(found, cfg.step.accum_steps)


@functools.cache
def mesh() -> jax.sharding.Mesh:
  """The mesh of one device, on which all that is shared is."""
  return make_test_mesh(1, 1, 1)


@functools.cache
def program(cfg: Config) -> Program:
  """The program of `cfg`; its steps compile at their first call."""
  with jax.set_mesh(mesh()):
    return make_program(cfg)


@functools.cache
def _initial(cfg: Config) -> TrainState:
  with jax.set_mesh(mesh()):
    return program(cfg).init()


def copied(tree: Any) -> Any:
  """The same tree in arrays of its own, for a step donates those that it is given."""
  return jax.tree.map(jnp.copy, tree)


def state(cfg: Config) -> TrainState:
  """The state of step 0."""
  return copied(_initial(cfg))


@functools.cache
def _decoder(cfg: Config) -> Decoder:
  with jax.set_mesh(mesh()):
    return make_decoder(cfg)


def model(cfg: Config) -> Decoder:
  """A model with random weights, those of `helpers.make_decoder`."""
  return copied(_decoder(cfg))


def step(
  cfg: Config, state: TrainState, rows: dict[str, np.ndarray], **more: Any
) -> tuple[TrainState, StepMetrics]:
  """One update with a batch; the state is donated."""
  one = program(cfg)
  with jax.set_mesh(mesh()):
    return one.train_step(state, rows, one.training_rules(1), **more)


@functools.cache
def _gradients(cfg: Config) -> Any:
  rules = program(cfg).training_rules(1)

  def objective(params, model, rows, key):
    sums = loss_sums(merge(params, model), rows, cfg.step, rules, key)[0]
    return sums.objective / jnp.sum(rows["loss_mask"]), sums

  f = jax.grad(objective, has_aux=True)
  return jax.jit(lambda model, rows, key: f(trainable(model), model, rows, key))


def gradients(
  cfg: Config, model: Decoder, rows: dict[str, np.ndarray], dropout_seed: int = 0
) -> tuple[LossSums, Decoder]:
  """The sums over rows [rows, seq], and the gradient of the objective's mean over their tokens."""
  key = jax.random.key(dropout_seed) if cfg.model.dropout else None
  with jax.set_mesh(mesh()):
    grads, sums = _gradients(cfg)(model, rows, key)
  return sums, grads


@functools.partial(jax.jit, static_argnames="rules")
def _hidden(model, tokens, segments, positions, rules):
  return model(tokens, positions_BT=positions, segment_ids_BT=segments, rules=rules)


def hidden(
  model: Decoder, tokens: Any, segments: Any, positions: Any, rules: Any = TRAINING
) -> tuple[jax.Array, Any]:
  """The last activations [rows, seq, width] of a model, and the statistics of its layers."""
  with jax.set_mesh(mesh()):
    return _hidden(model, tokens, segments, positions, rules)
