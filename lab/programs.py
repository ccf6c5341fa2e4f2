"""The programs of small training steps, written to files, to compare two commits.

  python -m lab.programs write before        # in one checkout
  python -m lab.programs write after         # in the other one
  python -m lab.programs compare before after

A file for each config holds the StableHLO of its train step and its evaluation step, without
locations and with functions numbered in order; with --sizes also the FLOPs and bytes of the train
step, compiled for the CPU (some minutes). Configs of meshes use eight fake devices. `compare` ends
with 1 if a program differs. Programs whose lines are the same in another order are told apart: a
metric that is computed earlier or later gives such a pair.
"""

import argparse
import collections
import functools
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
  f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.sharding.mesh import batch_sharding, make_mesh, on_mesh
from ats_jax.step.program import Program, abstract_batch, make_program

TINY = {
  "num_steps": 1000,
  "model.vocab_size": 64,
  "model.num_layers": 4,
  "model.d_model": 32,
  "model.num_heads": 4,
  "model.num_kv_heads": 4,
  "model.d_ff": 64,
  "data.tokenizer": "bytes",
  "data.seq_len": 16,
  "data.batch_size": 16,
  "data.max_segments": 1,
  "step.loss_chunk_tokens": 48,
  "orchestrator.mode": "off",
}
MOE = {"moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 32, "moe.aux_loss": 0.01}
MOD = {"mod.routing": "learned", "mod.capacity": 0.5}
CASES: dict[str, dict[str, Any]] = {
  "dense": {},
  "moe": MOE,
  "mod": MOD,
  "hybrid": MOE | MOD,
  "packed": {"data.max_segments": 4},
  "accumulated": {"step.accum_steps": 2},
  "act": {"orchestrator.mode": "act"},
  "act_experts": MOE | {"orchestrator.mode": "act", "moe.spare_experts": 1},
  "options": {
    "model.qk_norm": True,
    "model.dropout": 0.1,
    "model.tie_embeddings": True,
    "optimizer.ema_decay": 0.99,
    "step.z_loss": 1e-3,
    "step.label_smoothing": 0.05,
    "step.remat": "full",
  },
  "latent": {"model.num_kv_heads": 4, "model.kv_latent_dim": 8, "model.latent_rope_dim": 4},
  "window": {"model.window": 8, "model.attn_sinks": True},
  "capacity": MOE | {"moe.dispatch": "capacity"},
  "fp8": {"precision.fp8": True},
  "unrolled": {"step.scan_unroll": 4},
  "mesh_fsdp_tensor": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
  "mesh_replicas": {"mesh.data": 4, "mesh.fsdp": 2, "mesh.zero": 1},
  "mesh_expert": MOE | {"mesh.data": 2, "mesh.expert": 4},
  "mesh_context": {"mesh.data": 2, "mesh.context": 2, "mesh.fsdp": 2},
  "mesh_stage": {"mesh.data": 4, "mesh.stage": 2, "step.accum_steps": 2},
  "mesh_rounds": {"mesh.data": 4, "mesh.stage": 2, "step.accum_steps": 2, "mesh.stage_rounds": 2},
  "mesh_copies": {
    "mesh.data": 2,
    "mesh.fsdp": 4,
    "mesh.copy_engines": True,
    "mesh.keep_gathered": True,
    "step.scan_unroll": 4,
  },
  "mesh_compressed": {"mesh.data": 8, "mesh.compress_gradients": "fp8"},
}


def config_of(settings: dict[str, Any]) -> Any:
  """The resolved config of a case."""
  config = base_config()
  config.update_from_flattened_dict(TINY | settings)
  cfg = from_config_dict(config)
  return resolve(cfg, cfg.model.vocab_size)


def normal(text: str) -> str:
  """StableHLO with functions numbered in the order of their definitions, without result names."""
  text = re.sub(r"jax\.result_info = \"[^\"]*\",? ?", "", text)
  names = dict.fromkeys(re.findall(r"func\.func (?:public |private )?@([\w.\"$<>]+)", text))
  numbers = {name: f"f{number}" for number, name in enumerate(names)}
  text = re.sub(r"@([\w.\"$<>]+)", lambda m: "@" + numbers.get(m[1], m[1]), text)
  return re.sub(r"module @\S+", "module", text)


def lowered(program: Program, cfg: Any) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
  """The train step and the evaluation step, of shapes alone."""
  mesh = jax.sharding.get_mesh()
  state = program.init(abstract=True)
  rows = cfg.data.batch_size // cfg.step.accum_steps
  shape = (cfg.step.accum_steps, rows, cfg.data.seq_len)
  batch = abstract_batch(shape, batch_sharding(mesh, 3), program.objective)
  train = program.train_step.lower(state, batch, program.training_rules(1))
  batch = abstract_batch(shape[1:], batch_sharding(mesh, 2))
  return train, program.eval_step.lower(state.model, batch, program.rules(1))


def sizes_of(train: jax.stages.Lowered) -> dict[str, float]:
  """FLOPs and bytes of a compiled step."""
  compiled = train.compile()
  cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
  assert cost is not None and memory is not None
  return {
    "flops": cost["flops"],
    "temporary": memory.temp_size_in_bytes,
    "arguments": memory.argument_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
  }


def write(folder: Path, only: list[str], *, sizes: bool) -> None:
  """Write the programs of the cases named, or of all."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, settings in CASES.items():
    if only and name not in only:
      continue
    cfg = config_of(settings)
    devices = jax.devices() if name.startswith("mesh_") else jax.devices()[:1]
    with on_mesh(cfg, mesh := make_mesh(cfg, devices)), jax.set_mesh(mesh):
      train, evaluate = lowered(make_program(cfg), cfg)
      size = sizes_of(train) if sizes else {}
    text = f"{size}\n{normal(train.as_text())}\n{normal(evaluate.as_text())}"
    (folder / f"{name}.txt").write_text(text)
    print(f"{name}: {size or 'written'}", flush=True)


def multiset(text: str) -> collections.Counter[str]:
  """The lines of a program without the numbers of its values, functions named by their content."""
  programs = re.split(r"^(?=module )", text, flags=re.MULTILINE)
  lines = [line for program in programs for line in named_by_content(program).splitlines()]
  return collections.Counter(re.sub(r"%[\w#:]+", "%", line).strip() for line in lines)


def named_by_content(text: str) -> str:
  """A program in which equal functions have equal names, wherever they are defined."""
  private = re.findall(r"^  func\.func private .*?^  }$", text, flags=re.MULTILINE | re.DOTALL)
  by_name = {re.findall(r"@f\d+", body)[0]: body for body in private}

  @functools.cache
  def content(name: str) -> str:
    if name not in by_name:  # the program itself
      return name
    body = re.sub(r"@f\d+", lambda m: "" if m[0] == name else content(m[0]), by_name[name])
    return "@" + hashlib.sha256(body.encode()).hexdigest()[:16]

  return re.sub(r"@f\d+", lambda m: content(m[0]), text)


def compare(before: Path, after: Path) -> int:
  """Print a line for each case; how many differ."""
  different = 0
  names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
  for name in names:
    if not ((before / name).exists() and (after / name).exists()):
      print(f"{name}: only on one side")
      different += 1
      continue
    one, other = ((folder / name).read_text() for folder in (before, after))
    sizes = one.partition("\n")[0] == other.partition("\n")[0]
    if one == other:
      verdict = "the same"
    elif multiset(one) == multiset(other) and sizes:
      verdict = "the same operations in another order"
    else:
      lines = (multiset(one) - multiset(other)).total(), (multiset(other) - multiset(one)).total()
      verdict = f"DIFFERENT: {lines[0]} lines gone, {lines[1]} new"
      verdict += "" if sizes else f"; {one.partition(chr(10))[0]} -> {other.partition(chr(10))[0]}"
      different += 1
    print(f"{name.removesuffix('.txt')}: {verdict}")
  return different


def main() -> int:
  """Run one of the two commands."""
  parser = argparse.ArgumentParser(description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  writes = commands.add_parser("write")
  writes.add_argument("folder", type=Path)
  writes.add_argument("--sizes", action="store_true")
  writes.add_argument("--only", nargs="*", default=[])
  compares = commands.add_parser("compare")
  compares.add_argument("before", type=Path)
  compares.add_argument("after", type=Path)
  given = parser.parse_args()
  if given.command == "compare":
    return int(compare(given.before, given.after) > 0)
  write(given.folder, given.only, sizes=given.sizes)
  return 0


if __name__ == "__main__":
  sys.exit(main())
