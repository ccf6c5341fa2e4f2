"""Runs in which an action on experts wins by itself, and runs in which it must not be taken.

  python -m lab.expert_actions [--cases='*'] [--seeds=0,1,2,3,4]

Both arms of a case and seed go on from one state, with the same batches, to the last step. The
model is that of `lab.faults` with experts, on the same text; the step is the production step of a
run with `orchestrator.mode=act`. Prints the held-out loss of going on, and by how much that of the
action differs, in nats, with its standard error over the seeds.
"""

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import app, flags

from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema import Config
from ats_jax.orchestrator.actions import (
  Action,
  AddExpert,
  ScaleTemperature,
  SetBalance,
  SetExpertDropout,
  SetPenalty,
)
from ats_jax.orchestrator.actions.base import carry_out
from ats_jax.orchestrator.actions.expert_view import view_experts
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import init_state, make_program
from ats_jax.step.state import TrainState
from lab.faults.bench import Bench, Suite
from lab.faults.keepers import copied
from lab.runs import markdown

_CASES = flags.DEFINE_string("cases", "*", "Only these cases; a pattern.", allow_override=True)
_SEEDS = flags.DEFINE_list(
  "seeds", list("01234"), "Seeds of data and weights.", allow_override=True
)

AT = 100  # updates before the first action
LAYERS = (0, 1)
DOMAIN = "script"  # of the text that comes later
Ask = Callable[[Config, TrainState], Sequence[Action]]
Asked = Mapping[int, Ask]  # what is done after so many updates


class Case(NamedTuple):
  """A run and what could be done to it.

  Attributes:
    action: what is done and when.
    settings: what differs from `lab.faults.bench.SETTINGS`.
    batches: so many are read again and again; 0 = each once.
    grows: half of the batches are of `DOMAIN` from `AT` on, which is scored as well.
  """

  action: Asked
  settings: Mapping[str, Any]
  batches: int = 0
  grows: bool = False


def once(*actions: Action) -> Asked:
  """All at `AT`."""
  return {AT: lambda cfg, state: actions}


def doubled(*steps: int, apart: int = 50) -> Asked:
  """All experts split at each of the steps; the halves compete after being `apart` so long."""

  def split(cfg: Config, state: TrainState) -> list[Action]:
    number = int(view_experts(cfg, state, LAYERS[0]).is_open.sum())
    return [AddExpert(layer) for layer in LAYERS for _ in range(number)]

  def release(cfg: Config, state: TrainState) -> list[Action]:
    twins = {layer: view_experts(cfg, state, layer).twin for layer in LAYERS}
    pairs = [(at, e) for at in LAYERS for e, twin in enumerate(twins[at]) if twin > e]
    return [SetPenalty(layer, expert, 0.0) for layer, expert in pairs]

  return {step: split for step in steps} | {step + apart: release for step in steps}


EXPERTS = {"moe.num_experts": 8, "moe.d_ff": 64}
MANY = {"moe.num_experts": 16, "moe.d_ff": 64}
FEW = {"moe.num_experts": 2, "moe.spare_experts": 6, "moe.top_k": 1}
# No rescue of collapsed routers, and choices beyond an expert's room are dropped.
SCORES = EXPERTS | {
  "moe.score": "sigmoid",
  "moe.bias_on": "scores",
  "moe.aux_loss": 0.0,
  "moe.dispatch": "capacity",
  "moe.capacity_factor": 1.0,
}
COOLER = once(*4 * (ScaleTemperature(0.5),))
BALANCE, DROPOUT, GROWTH = once(SetBalance(10.0)), once(SetExpertDropout(0.3)), doubled(AT, 160)
CASES: dict[str, Case] = {
  "temperature of 20": Case(COOLER, EXPERTS | {"moe.temperature": 20.0}),
  "temperature of 1": Case(COOLER, EXPERTS),
  "balance at 0.0005": Case(BALANCE, SCORES | {"moe.bias_rate": 0.0005}),
  "balance at 0.005": Case(BALANCE, SCORES | {"moe.bias_rate": 0.005}),
  "text read 40 times": Case(DROPOUT, MANY, batches=10),
  "text read 20 times": Case(DROPOUT, MANY, batches=20),
  "text read 10 times": Case(DROPOUT, MANY, batches=40),
  "text read once": Case(DROPOUT, MANY),
  "narrow experts, more text": Case(GROWTH, FEW | {"moe.d_ff": 8, "num_steps": 1200}, grows=True),
  "wide experts, short run": Case(GROWTH, FEW | {"moe.d_ff": 64}, grows=True),
}


def compare(case: Case, seeds: Sequence[int]) -> list[tuple[float, float]]:
  """Held-out losses at the end of going on and of the action, by seed; under a mesh."""
  scenario = "script_row_10" if case.grows else "clean"  # only its text is used
  settings = tuple(case.settings.items())
  bench = Bench(Suite(("ours",), (scenario,), tuple(seeds), settings))
  cfg, program, mesh = bench.cfg, make_program(bench.cfg), jax.sharding.get_mesh()
  domains = ("main", DOMAIN) if case.grows else ("main",)

  def train(state: TrainState, seed: int, begin: int, end: int, asked: Asked) -> TrainState:
    for step in range(begin, end):
      for action in asked[step](cfg, state) if step in asked else ():
        state = carry_out(action, state, cfg)
      domain = DOMAIN if case.grows and step >= AT and step % 2 else "main"
      rows = bench.rows(seed, step % case.batches if case.batches else step, domain)
      rules = program.training_rules(step + 1)
      state, _ = program.train_step(state, to_global(rows, mesh), rules)
    return state

  def score(state: TrainState) -> float:
    return statistics.mean(bench.score(program, state, domain)[0] for domain in domains)

  found = []
  for seed in seeds:
    of_seed = dataclasses.replace(cfg, seed=seed)
    first = train(init_state(of_seed, program.num, program.optimizer), seed, 0, AT, {})
    ends = [train(copied(first), seed, AT, cfg.num_steps, asked) for asked in ({}, case.action)]
    goes_on, acts = map(score, ends)
    found.append((goes_on, acts))
  return found


def row(name: str, found: Sequence[tuple[float, float]]) -> list[str]:
  """Of the table: means, the standard error, and each seed."""
  gaps = [acts - goes_on for goes_on, acts in found]
  error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
  each = " ".join(f"{gap:+.4f}" for gap in gaps)
  loss = statistics.mean(goes_on for goes_on, _ in found)
  return [name, f"{loss:.4f}", f"{statistics.mean(gaps):+.4f}", f"{error:.4f}", each]


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  runtime.configure(cfg := from_config_dict(base_config()))
  seeds = [int(seed) for seed in _SEEDS.value]
  with jax.set_mesh(make_mesh(cfg, jax.devices()[:1])):
    rows = [row(name, compare(CASES[name], seeds)) for name in fnmatch.filter(CASES, _CASES.value)]
  print(markdown(["case", "goes on", "the action", "standard error", "each seed"], rows))


if __name__ == "__main__":
  app.run(main)
