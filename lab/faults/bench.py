"""What all arms of a suite share: the model, the data, the scoring."""

import dataclasses
import functools
import hashlib
import math
import os
import platform

import jax
import numpy as np

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.schema import Config
from ats_jax.data.batch import Batch
from ats_jax.data.rows.contract import TrainRows
from ats_jax.data.splits import open_datasets, open_split
from ats_jax.metrics.environment import environment
from ats_jax.model.decoder import Decoder
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.sharding.mesh import to_global
from ats_jax.step.state import TrainState
from lab.faults.arms import Arm
from lab.faults.domains import open_domain, prose
from lab.faults.results import Record
from lab.faults.scenarios import Rows

PROTOCOL = 1  # raise it when a scenario, an arm or the scoring changes
SCORED_ROWS, PROBE_ROWS = 1024, 64  # of the validation split
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
  "data.seq_len": 32,
  "data.batch_size": 16,
  "optimizer.learning_rate": 4e-3,
  "optimizer.warmup_steps": 50,
  "optimizer.schedule": "wsd",
  "optimizer.schedule.decay_fraction": 0.3,
  "optimizer.schedule.final_fraction": 0.05,
  "orchestrator.mode": "act",  # arms have their own
  "orchestrator.check_interval": 10,
  "orchestrator.snapshot_interval": 10,
  "precision.compute_dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Suite:
  """What is run.

  Attributes:
    arms: names in `ARMS` or `OTHER_ARMS`.
    scenarios: names in `KNOWN`.
    seeds: of the runs.
    settings: what differs from `SETTINGS`.
    pause_every: steps between two pauses, as training makes them before a checkpoint; 0 = only at
      the end.
    restarts: whether a run that stops goes on from its last checkpoint, once; else it is over, and
      without a supervisor it never stops.
    only: scenarios of an arm that does not run all of them.
    domains: names in `DOMAINS`, of minorities.
  """

  arms: tuple[str, ...]
  scenarios: tuple[str, ...]
  seeds: tuple[int, ...]
  settings: tuple[tuple[str, int | float | str], ...] = ()
  pause_every: int = 0
  restarts: bool = False
  only: tuple[tuple[str, tuple[str, ...]], ...] = ()
  domains: tuple[str, ...] = ()


class Bench:
  """Data and scoring that all arms share. Make it and use it under a mesh of one device.

  Attributes:
    cfg: resolved; arms change some of it.
    vocab_size: of the tokenizer.
    probe: held-out rows that supervisors look at; others than those that are scored.
    protocol: names what decides the figures, but for the code of the arms.
    corpus: names the text that is trained on.
    restarts: see `Suite`.
  """

  def __init__(self, suite: Suite):
    config = base_config()
    config.update_from_flattened_dict(SETTINGS | dict(suite.settings))
    cfg = from_config_dict(config)
    self._train, valid = open_datasets(cfg.data, 0)
    self._prose = open_split(cfg.data, 0, (prose(),), self._train.info.tokenizer)
    domain = lambda name: open_domain(name, cfg.data, self._train.info.tokenizer)
    self._domains = {name: domain(name) for name in suite.domains}
    self.cfg = resolve(cfg, self._train.info.tokenizer.vocab_size)
    self.vocab_size = self._train.info.tokenizer.vocab_size
    held_out = lambda data, *n: to_global(data.read_once(np.arange(*n)), jax.sharding.get_mesh())
    self._scored = {
      "main": held_out(valid, SCORED_ROWS),
      **{name: held_out(kept, SCORED_ROWS) for name, (_, kept) in self._domains.items()},
    }
    self.probe = held_out(valid, SCORED_ROWS, SCORED_ROWS + PROBE_ROWS)
    self._pause_every, self.restarts = suite.pause_every, suite.restarts
    self.corpus = self._train.info.fingerprint
    c = self.cfg
    parts = [PROTOCOL, self.corpus, self._prose.info.fingerprint,
             c.num_steps, c.model, c.data, c.optimizer, c.precision]  # fmt: skip
    parts += [c.moe, suite.pause_every] if c.moe.num_experts else []
    parts += [suite.pause_every, "restarts"] if suite.restarts else []
    parts += [d.info.fingerprint for pair in self._domains.values() for d in pair]
    self.protocol = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

  @functools.cached_property
  def made_by(self) -> Record:
    """What figures depend on beside the protocol, for the record."""
    git = environment()["git"] or {"commit": os.environ.get("ATS_COMMIT"), "dirty": None}
    return {
      "corpus": self.corpus,
      "commit": git["commit"],
      "dirty": git["dirty"],
      "python": platform.python_version(),
      "jax": jax.__version__,
    }

  def rows(self, seed: int, step: int) -> Rows:
    """The batch of a step (0-based); each seed reads rows of its own."""
    return _rows(self._train, self.cfg, seed, step)

  def other_rows(self, seed: int, domain: str, step: int) -> Rows:
    """The same of another kind of text, or other rows of the same ("main")."""
    if domain == "main":
      return _rows(self._train, self.cfg, seed + APART, step)
    dataset = self._prose if domain == "prose" else self._domains[domain][0]
    return _rows(dataset, self.cfg, seed, step)

  def pauses(self, step: int) -> bool:
    """Whether the loop waits after `step` updates."""
    return step == self.cfg.num_steps or (self._pause_every > 0 and step % self._pause_every == 0)

  def look(self, arm: Arm, state: TrainState) -> float:
    """Loss of the trained weights on the probe batch, nats."""
    return probe_loss(self._sums(arm, state.model, self.probe))

  def score(self, arm: Arm, state: TrainState, domain: str = "main") -> tuple[float, bool]:
    """Held-out loss in nats, at most ln V; and whether it was finite."""
    total, _, tokens = self._sums(arm, state.weights, self._scored[domain]).tolist()
    loss, worst = total / tokens, math.log(self.vocab_size)
    return (min(loss, worst), True) if math.isfinite(loss) else (worst, False)

  def _sums(self, arm: Arm, model: Decoder, rows: Batch) -> np.ndarray:
    return np.asarray(arm.program.eval_step(model, rows, arm.program.rules(self.cfg.num_steps)))


def _rows(dataset: TrainRows, cfg: Config, seed: int, step: int) -> Rows:
  size = cfg.data.batch_size
  first = (seed * cfg.num_steps + step) * size
  return dataset.read(np.arange(first, first + size)[None])
