"""What all arms of a suite share: the model, the data, the programs, the scoring."""

import dataclasses
import functools
import hashlib
import math
import os
import platform
from typing import Any, NamedTuple

import jax
import numpy as np

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.schema.orchestrator import PROBE_POSITIONS
from ats_jax.data.batch import Batch
from ats_jax.data.splits import open_datasets
from ats_jax.metrics.environment import environment
from ats_jax.model.decoder import Decoder
from ats_jax.orchestrator.signals.probe import num_blocks
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import Program, init_state
from ats_jax.step.state import TrainState
from lab.faults.arms import How, build
from lab.faults.domains import DOMAINS, open_domain
from lab.faults.results import Record
from lab.faults.scenarios import RATE, SCENARIOS, Rows

SCHEMA = 1  # of a record; docs/lab/faults.md has it
PROTOCOL = 2  # raise it when a scenario, an arm or the scoring changes
SCORED_ROWS, PROBE_ROWS = 1024, 64  # of held-out text, each of `SHORT` tokens
LEAST_SCORED = 256  # rows, however long they are
SHORT = 32
PAUSE = 100  # steps between two checkpoints, at least
APART = 5000  # added to a seed: rows of the corpus that no suite's seed trains on at that step

# A byte-level model that trains in seconds on one core.
SETTINGS = {
  "num_steps": 400,
  "model.num_layers": 2,
  "model.d_model": 48,
  "model.num_heads": 4,
  "model.num_kv_heads": 4,
  "model.d_ff": 128,
  "data.tokenizer": "bytes",
  "data.seq_len": SHORT,
  "data.batch_size": 16,
  "optimizer.learning_rate": RATE,
  "optimizer.warmup_steps": 50,
  "optimizer.schedule": "wsd",
  "optimizer.schedule.decay_fraction": 0.3,
  "optimizer.schedule.final_fraction": 0.05,
  "orchestrator.mode": "act",  # programs have their own
  "orchestrator.check_interval": 10,
  "orchestrator.snapshot_interval": 10,
  "precision.compute_dtype": "float32",
}


class Suite(NamedTuple):
  """What is run."""

  arms: tuple[str, ...]  # in `ARMS`, or `module:Class`
  scenarios: tuple[str, ...]
  seeds: tuple[int, ...]
  # What differs from `SETTINGS`; None = it is not set.
  settings: tuple[tuple[str, int | float | str | None], ...] = ()
  # Steps that are computed wrongly have a program of their own: in one for all, a GPU's host waits
  # at each condition.
  splits: bool = False


class Bench:
  """Data, programs and scoring. Make it and use it under a mesh of one device.

  `protocol` names what decides the figures, but for the code; `made_by` has what else does.
  """

  def __init__(self, suite: Suite):
    config = base_config()
    given = (SETTINGS | dict(suite.settings)).items()
    config.update_from_flattened_dict({name: x for name, x in given if x is not None})
    cfg = from_config_dict(config)
    train, valid = open_datasets(cfg.data, 0)
    tokenizer, corpus = train.info.tokenizer, train.info.fingerprint
    self.vocab_size = tokenizer.vocab_size
    self.cfg = c = resolve(cfg, self.vocab_size)
    needed = {SCENARIOS[name].domain for name in suite.scenarios} & DOMAINS.keys()
    domains = {name: open_domain(name, cfg.data, tokenizer) for name in sorted(needed)}
    self._texts = {"main": (train, valid), **domains}
    self.splits, self.pause = suite.splits, max(PAUSE, c.num_steps // 4)
    parts = [PROTOCOL, corpus, c.num_steps, c.model, c.data, c.optimizer, c.precision]
    self.protocol = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    git = environment()["git"] or {"commit": os.environ.get("ATS_COMMIT"), "dirty": None}
    self.made_by: Record = {
      "schema": SCHEMA,
      "corpus": corpus,
      "commit": git["commit"],
      "dirty": git["dirty"],
      "python": platform.python_version(),
      "jax": jax.__version__,
    }

  @functools.cache  # noqa: B019  a process has one bench
  def program(self, how: How, settings: tuple[tuple[str, Any], ...] = ()) -> Program:
    """A program with a scenario's settings; all score with the same one."""
    program = build(how, self.cfg, settings)
    is_first = (how, settings) == (How(), ())
    scores = program if is_first else self.program(How())
    return dataclasses.replace(program, eval_step=scores.eval_step)

  @functools.lru_cache(maxsize=2)  # noqa: B019
  def first(self, how: How, seed: int) -> TrainState:
    """The state of step 0; not to be donated."""
    program = self.program(how)
    cfg = dataclasses.replace(program.cfg, seed=seed)
    return init_state(cfg, program.num, program.optimizer)

  def rows(self, seed: int, step: int, domain: str = "main") -> Rows:
    """The batch of a step (0-based); each seed reads rows of its own."""
    size = self.cfg.data.batch_size
    first = (seed * self.cfg.num_steps + step) * size
    return self._texts[domain][0].read(np.arange(first, first + size)[None])

  def other_rows(self, seed: int, domain: str, step: int) -> Rows:
    """The same of another kind of text, or other rows of the same ("main")."""
    return self.rows(seed + APART * (domain == "main"), step, domain)

  @functools.cache  # noqa: B019
  def probe(self, domain: str) -> Batch:
    """Held-out rows that guards look at, not those that are scored; half of another domain, if any.

    As the probe of training, which has an equal share of each evaluation set and is not smaller.
    """
    sets = [self._texts[name][1] for name in ("main", domain) if name]
    length = min(self.cfg.data.seq_len, PROBE_POSITIONS)
    rows = max(PROBE_ROWS * SHORT // length, num_blocks(self.cfg, length))
    share = rows // len(sets)
    last = lambda data: data.read_once(np.arange(data.info.num_rows - share, data.info.num_rows))
    blocks = [last(data) for data in sets]
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    rows = {name: x[:, :length] for name, x in whole.items()}
    return to_global(rows, jax.sharding.get_mesh())

  @functools.cache  # noqa: B019
  def _scored(self, domain: str) -> Batch:
    held_out = self._texts[domain][1]
    size = max(SCORED_ROWS * SHORT // self.cfg.data.seq_len, LEAST_SCORED)
    rows = np.arange(size) % (held_out.info.num_rows - PROBE_ROWS)
    return to_global(held_out.read_once(rows), jax.sharding.get_mesh())

  def look(self, program: Program, state: TrainState, domain: str) -> float:
    """Loss of the trained weights on the probe, nats."""
    return self._loss(program, state.model, self.probe(domain))

  def score(self, program: Program, state: TrainState, domain: str) -> tuple[float, bool]:
    """Held-out loss in nats, at most ln V; and whether it was finite."""
    loss, worst = (
      self._loss(program, state.weights, self._scored(domain)),
      math.log(self.vocab_size),
    )
    return (min(loss, worst), True) if math.isfinite(loss) else (worst, False)

  def _loss(self, program: Program, model: Decoder, rows: Batch) -> float:
    total, _, tokens = np.asarray(program.eval_step(model, rows, program.rules(1))).tolist()
    return total / tokens
