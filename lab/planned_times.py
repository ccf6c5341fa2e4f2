r"""Planned times beside steps that were measured on one to four H200s and H100s, by typical rates.

Needs no GPU. The measured ones are those of docs/lab/records.
Command: python -m lab.planned_times
"""

from typing import NamedTuple

from absl import app, flags

from ats_jax.config.schema import Config
from ats_jax.model.count import count
from ats_jax.planner.abstract import (
  abstract_mesh,
  abstract_state,
  device_bytes,
  resolve_without_data,
)
from ats_jax.planner.hardware import typical
from ats_jax.planner.seconds import step_seconds
from ats_jax.sharding.mesh import on_mesh
from ats_jax.verbs import cli

COMMON = "data.tokenizer=bytes data.max_segments=1"
SHORT = "precision.param_dtype=bfloat16 optimizer.mu_dtype=bfloat16 optimizer.nu_dtype=bfloat16"
DENSE = f"{SHORT} model.num_layers=32 model.d_model=4096 model.d_ff=14336"
SPARSE = f"{SHORT} step.remat=names model.num_layers=24 model.num_heads=16 model.num_kv_heads=4"
EIGHT = f"{SPARSE} moe.num_experts=8 moe.top_k=2 moe.d_ff=7168 model.d_ff=7168"
MANY = f"{SPARSE} moe.num_experts=64 moe.top_k=4 moe.d_ff=896 model.d_ff=1024"
SMALL = "step.remat=names model.num_layers=8 moe.num_experts=8 moe.top_k=2 moe.d_ff=4096"
LONG = f"{DENSE} step.remat=full data.seq_len=32768"
LONGEST = f"{DENSE} step.remat=full data.seq_len=131072"
SIXTEEN = EIGHT.replace("num_layers=24", "num_layers=16")
CUT, ONCE = "mesh.context=2", "mesh.context=2 step.remat=attention"
INPUTS = "mesh.context=2 step.remat=qkv"
LOOP = "step.scan_unroll=1"
STAGE = "mesh.stage=2 step.accum_steps=8"
NAMES = "step.remat=none step.remat_stages=names"
SENT = "mesh.compress_gradients=fp8"
FSDP, KEPT = "mesh.fsdp=2", "mesh.fsdp=2 mesh.keep_gathered=true"
COPIED = f"{KEPT} mesh.copy_engines=true"
HOSTS = "moe.exchange=hierarchical moe.exchange.hosts=2"
EXPERT, FEWER = "mesh.expert=2", "moe.exchange.factor=1.25"
TWENTY = f"{DENSE} model.num_layers=20"
ROUNDS = f"{STAGE} mesh.stage_rounds=2"
SUMS = "step.accum_steps=2"
EIGHT_BIT = f"{SHORT} precision.fp8=true"
# Of four GPUs.
HALF = MANY.replace("num_layers=24", "num_layers=12")
ELEVEN = "model.num_layers=40 model.d_model=5120 model.num_heads=40 model.num_kv_heads=10 "
ELEVEN += "model.d_ff=13824 model.vocab_size=50304 model.tie_embeddings=true"
THIRTY = f"{SHORT} model.num_layers=48 model.d_model=8192 model.num_heads=64 model.num_kv_heads=16 "
THIRTY += "model.d_ff=22016 model.vocab_size=50304 model.tie_embeddings=true step.remat=full "
THIRTY += "data.seq_len=1024"
FSDP4, KEPT4 = "mesh.fsdp=4", "mesh.fsdp=4 mesh.keep_gathered=true"
COPIED4 = f"{KEPT4} mesh.copy_engines=true"
HYBRID, TENSOR = "mesh.data=2 mesh.fsdp=2", "mesh.tensor=2 mesh.fsdp=2"
STAGES = "mesh.stage=4 step.accum_steps=16"
ROW = "step.remat=qkv mesh.context=4 data.seq_len=32768"
ROWS = ROW.replace("32768", "131072")
BY_COPIES = "mesh.copy_engines=true"
STAGED, EIGHT4 = f"{STAGE} mesh.fsdp=2", f"{COPIED4} precision.fp8=true"
LESS4, BOTH = f"mesh.expert=4 {FEWER}", f"mesh.expert=2 mesh.fsdp=2 {FEWER}"
SWAPPED4 = f"{LESS4} mesh.keep_gathered=true {BY_COPIES}"


class Measured(NamedTuple):
  """A step: on how many of which GPUs, of what, with which settings; and how long it took."""

  gpu: str
  devices: int
  name: str
  settings: str
  ms: float
  config: str = "dense_1_5b"


STEPS = (
  Measured("H200", 1, "1.5B, float32 weights", "data.batch_size=8", 514),
  Measured("H200", 1, "1.5B", f"{SHORT} data.batch_size=8", 507),
  Measured("H200", 1, "8.03B", f"{DENSE} data.batch_size=4", 1357),
  Measured("H200", 1, "8 experts", f"{EIGHT} data.batch_size=4", 569),
  Measured("H200", 1, "64 experts", f"{MANY} data.batch_size=4", 343),
  Measured("H200", 1, "8.03B, a row of 32,768", f"{LONG} data.batch_size=1", 5398),
  Measured("H200", 2, "1.5B, fsdp", f"{SHORT} {FSDP} data.batch_size=16", 536),
  Measured("H200", 2, "1.5B, fsdp, kept", f"{SHORT} {KEPT} data.batch_size=16", 521),
  Measured("H200", 2, "8.03B, fsdp", f"{DENSE} {FSDP} data.batch_size=8", 1457),
  Measured("H200", 2, "8.03B, fsdp, kept", f"{DENSE} {KEPT} data.batch_size=8", 1420),
  Measured("H200", 2, "8 experts, fsdp", f"{EIGHT} {FSDP} data.batch_size=8", 618),
  Measured("H200", 2, "8 experts, fsdp, kept", f"{EIGHT} {KEPT} data.batch_size=8", 592),
  Measured("H200", 2, "8 experts, expert", f"{EIGHT} mesh.expert=2 data.batch_size=8", 603),
  Measured("H200", 2, "two rows, context", f"{LONG} mesh.context=2 data.batch_size=2", 5740),
  Measured("H100", 1, "1.5B, float32 weights", "data.batch_size=8", 536),
  Measured("H100", 1, "360M", "data.batch_size=16 step.accum_steps=1", 281, "gpt_350m"),
  Measured("H100", 1, "8 experts, 8 layers", f"{SMALL} data.batch_size=8", 372),
  Measured("H100", 2, "1.5B, fsdp", f"{FSDP} data.batch_size=16", 563),
  Measured("H100", 2, "1.5B, tensor", "mesh.tensor=2 data.batch_size=16", 613),
  Measured("H100", 2, "1.5B, stage", f"{STAGE} {LOOP} data.batch_size=16", 867),
  Measured("H100", 2, "8 experts, 8 layers, fsdp", f"{SMALL} {FSDP} data.batch_size=16", 386),
  Measured("H100", 1, "1.5B", f"{SHORT} data.batch_size=8", 522),
  Measured("H100", 2, "1.5B, fsdp, kept", f"{SHORT} {KEPT} data.batch_size=16", 541),
  Measured("H100", 1, "8 experts, 16 layers", f"{SIXTEEN} data.batch_size=4", 410),
  Measured("H100", 2, "the same, fsdp", f"{SIXTEEN} {FSDP} data.batch_size=8", 457),
  Measured("H100", 2, "the same, fsdp, kept", f"{SIXTEEN} {KEPT} data.batch_size=8", 437),
  Measured("H100", 2, "8.03B, two long rows, context", f"{LONG} {CUT} data.batch_size=2", 5778),
  Measured("H100", 2, "the same, remat=attention", f"{LONG} {ONCE} data.batch_size=2", 5156),
  Measured("H100", 2, "the same, tensor", f"{LONG} mesh.tensor=2 data.batch_size=2", 5888),
  Measured("H100", 2, "a row of 131,072, context", f"{LONGEST} {CUT} data.batch_size=1", 26636),
  Measured("H100", 2, "8.03B, stage, loop", f"{DENSE} {STAGE} {LOOP} data.batch_size=16", 4415),
  Measured("H100", 2, "two rounds, loop", f"{DENSE} {ROUNDS} {LOOP} data.batch_size=16", 4430),
  Measured("H100", 2, "1.5B, stage, loop", f"{SHORT} {STAGE} {LOOP} data.batch_size=16", 845),
  Measured("H100", 2, "two rounds, loop", f"{SHORT} {ROUNDS} {LOOP} data.batch_size=16", 852),
  Measured(
    "H100", 2, "names kept, loop", f"{SHORT} {ROUNDS} {NAMES} {LOOP} data.batch_size=16", 810
  ),
  Measured("H100", 2, "1.5B, copied", f"{SHORT} {COPIED} data.batch_size=16", 539),
  Measured("H100", 2, "1.5B, replicas", f"{SHORT} data.batch_size=16", 547),
  Measured("H100", 2, "the same, in 8 bits", f"{SHORT} {SENT} data.batch_size=16", 546),
  Measured("H100", 1, "1.5B in 8 bits", f"{EIGHT_BIT} data.batch_size=8", 445),
  Measured("H100", 2, "the same, fsdp, kept", f"{EIGHT_BIT} {KEPT} data.batch_size=16", 467),
  Measured("H100", 1, "5.41B", f"{TWENTY} data.batch_size=4", 893),
  Measured("H100", 2, "5.41B, fsdp, kept", f"{TWENTY} {KEPT} data.batch_size=8", 930),
  Measured("H100", 2, "5.41B, copied", f"{TWENTY} {COPIED} data.batch_size=8", 920),
  Measured("H100", 2, "16 layers, copied", f"{SIXTEEN} {COPIED} data.batch_size=8", 429),
  Measured("H100", 2, "16 layers, expert", f"{SIXTEEN} {EXPERT} data.batch_size=8", 446),
  Measured("H100", 2, "the same, less room", f"{SIXTEEN} {EXPERT} {FEWER} data.batch_size=8", 442),
  Measured("H100", 2, "131,072, attention", f"{LONGEST} {ONCE} data.batch_size=1", 22629),
  Measured("H200", 2, "1.5B, copied", f"{SHORT} {COPIED} data.batch_size=16", 518),
  Measured("H200", 2, "8.03B, copied", f"{DENSE} {COPIED} data.batch_size=8", 1373),
  Measured("H200", 2, "8 experts, copied", f"{EIGHT} {COPIED} data.batch_size=8", 583),
  Measured("H200", 2, "8 experts, less room", f"{EIGHT} {EXPERT} {FEWER} data.batch_size=8", 599),
  Measured("H200", 2, "8.03B, stage, loop", f"{DENSE} {STAGE} {LOOP} data.batch_size=16", 4225),
  Measured("H200", 2, "8.03B, stage", f"{DENSE} {STAGE} data.batch_size=16", 3991),
  Measured("H200", 2, "the same, two rounds", f"{DENSE} {ROUNDS} data.batch_size=16", 3938),
  Measured("H200", 2, "1.5B, stage, loop", f"{SHORT} {STAGE} {LOOP} data.batch_size=16", 801),
  Measured("H200", 2, "1.5B, stage", f"{SHORT} {STAGE} data.batch_size=16", 752),
  Measured("H200", 2, "the same, two rounds", f"{SHORT} {ROUNDS} data.batch_size=16", 730),
  Measured("H200", 2, "the same, names kept", f"{SHORT} {ROUNDS} {NAMES} data.batch_size=16", 651),
  Measured("H200", 1, "1.5B, two sums, loop", f"{SHORT} {SUMS} {LOOP} data.batch_size=16", 1098),
  Measured("H200", 1, "1.5B, two sums", f"{SHORT} {SUMS} data.batch_size=16", 1030),
  Measured("H200", 2, "the same, fsdp", f"{SHORT} {SUMS} {FSDP} data.batch_size=32", 1068),
  Measured("H200", 1, "16 layers, two sums", f"{SIXTEEN} {SUMS} data.batch_size=8", 788),
  Measured("H200", 2, "two long rows, attention", f"{LONG} {ONCE} data.batch_size=2", 5184),
  Measured("H200", 2, "the same, qkv", f"{LONG} {INPUTS} data.batch_size=2", 5014),
  Measured("H200", 2, "131,072, attention", f"{LONGEST} {ONCE} data.batch_size=1", 22168),
  Measured("H200", 2, "the same, qkv", f"{LONGEST} {INPUTS} data.batch_size=1", 21452),
  Measured("H100", 2, "16 layers, two hosts", f"{SIXTEEN} {EXPERT} {HOSTS} data.batch_size=8", 466),
  Measured("H100", 4, "1.5B, float32 weights, fsdp", f"{FSDP4} data.batch_size=32", 556),
  Measured("H100", 4, "1.5B, fsdp", f"{SHORT} {FSDP4} data.batch_size=32", 555),
  Measured("H100", 4, "1.5B, fsdp, kept", f"{SHORT} {KEPT4} data.batch_size=32", 549),
  Measured("H100", 4, "1.5B, copied", f"{SHORT} {COPIED4} data.batch_size=32", 543),
  Measured("H100", 4, "1.5B, two replicas, fsdp", f"{SHORT} {HYBRID} data.batch_size=32", 566),
  Measured("H100", 4, "1.5B, tensor, fsdp", f"{SHORT} {TENSOR} data.batch_size=32", 627),
  Measured("H100", 4, "1.5B, two stages, fsdp", f"{SHORT} {STAGED} data.batch_size=32", 864),
  Measured("H100", 4, "1.5B, four stages", f"{SHORT} {STAGES} data.batch_size=32", 843),
  Measured("H100", 4, "1.5B, long rows, context", f"{SHORT} {ROW} data.batch_size=4", 1215),
  Measured("H100", 4, "the same, copied", f"{SHORT} {ROW} {BY_COPIES} data.batch_size=4", 1195),
  Measured("H100", 4, "1.5B, a row of 131,072", f"{SHORT} {ROWS} data.batch_size=1", 3082),
  Measured("H100", 4, "the same, copied", f"{SHORT} {ROWS} {BY_COPIES} data.batch_size=1", 3074),
  Measured("H100", 4, "8.03B, fsdp", f"{DENSE} {FSDP4} data.batch_size=8", 806),
  Measured("H100", 4, "8.03B, copied", f"{DENSE} {COPIED4} data.batch_size=8", 755),
  Measured("H100", 4, "the same, in 8 bits", f"{DENSE} {EIGHT4} data.batch_size=8", 590),
  Measured("H100", 4, "8.03B, two replicas, fsdp", f"{DENSE} {HYBRID} data.batch_size=8", 838),
  Measured("H100", 4, "8.03B, tensor, fsdp", f"{DENSE} {TENSOR} data.batch_size=8", 830),
  Measured("H100", 4, "8.03B, two stages, fsdp", f"{DENSE} {STAGED} data.batch_size=32", 4636),
  Measured("H100", 4, "8.03B, four stages", f"{DENSE} {STAGES} data.batch_size=32", 4356),
  Measured("H100", 4, "8.03B, long rows, context", f"{DENSE} {ROW} data.batch_size=4", 5076),
  Measured("H100", 4, "the same, copied", f"{DENSE} {ROW} {BY_COPIES} data.batch_size=4", 5126),
  Measured("H100", 4, "8.03B, a row of 131,072", f"{DENSE} {ROWS} data.batch_size=1", 11278),
  Measured("H100", 4, "16 layers, fsdp", f"{SIXTEEN} {FSDP4} data.batch_size=16", 460),
  Measured("H100", 4, "16 layers, fsdp, kept", f"{SIXTEEN} {KEPT4} data.batch_size=16", 438),
  Measured("H100", 4, "16 layers, copied", f"{SIXTEEN} {COPIED4} data.batch_size=16", 431),
  Measured(
    "H100",
    4,
    "16 layers, expert, less room",
    f"{SIXTEEN} {LESS4} data.batch_size=16",
    452,
  ),
  Measured("H100", 4, "the same, copied", f"{SIXTEEN} {SWAPPED4} data.batch_size=16", 447),
  Measured("H100", 4, "16 layers, expert=2, fsdp=2", f"{SIXTEEN} {BOTH} data.batch_size=16", 455),
  Measured("H100", 4, "64 experts, 12 layers, fsdp", f"{HALF} {FSDP4} data.batch_size=16", 237),
  Measured("H100", 4, "64 experts, 12 layers, copied", f"{HALF} {COPIED4} data.batch_size=16", 214),
  Measured("H100", 4, "64 experts, 12 layers, expert", f"{HALF} {LESS4} data.batch_size=16", 229),
  Measured("H100", 4, "the same, copied", f"{HALF} {SWAPPED4} data.batch_size=16", 228),
  Measured(
    "H100",
    4,
    "the same, expert=2, fsdp=2",
    f"{HALF} {BOTH} data.batch_size=16",
    234,
  ),
  Measured("H100", 4, "64 experts, fsdp", f"{MANY} {FSDP4} data.batch_size=16", 424),
  Measured("H100", 4, "64 experts, fsdp, kept", f"{MANY} {KEPT4} data.batch_size=16", 378),
  Measured("H100", 4, "64 experts, copied", f"{MANY} {COPIED4} data.batch_size=16", 381),
  Measured("H100", 4, "64 experts, expert", f"{MANY} {LESS4} data.batch_size=16", 411),
  Measured("H100", 4, "the same, copied", f"{MANY} {SWAPPED4} data.batch_size=16", 410),
  Measured("H100", 4, "64 experts, expert=2, fsdp=2", f"{MANY} {BOTH} data.batch_size=16", 419),
  Measured("H100", 4, "8 experts, fsdp", f"{EIGHT} {FSDP4} data.batch_size=16", 668),
  Measured("H100", 4, "8 experts, fsdp, kept", f"{EIGHT} {KEPT4} data.batch_size=16", 635),
  Measured("H100", 4, "8 experts, copied", f"{EIGHT} {COPIED4} data.batch_size=16", 626),
  Measured("H100", 4, "8 experts, expert", f"{EIGHT} {LESS4} data.batch_size=16", 655),
  Measured("H100", 4, "the same, copied", f"{EIGHT} {SWAPPED4} data.batch_size=16", 648),
  Measured("H100", 4, "8 experts, expert=2, fsdp=2", f"{EIGHT} {BOTH} data.batch_size=16", 660),
  Measured("H100", 4, "11.4B, float32 weights, fsdp", f"{ELEVEN} {FSDP4} data.batch_size=4", 744),
  Measured("H100", 4, "34.4B, rows of 1,024, fsdp", f"{THIRTY} {FSDP4} data.batch_size=4", 955),
  Measured("H100", 1, "64 experts, 12 layers", f"{HALF} data.batch_size=4", 204),
)


def resolved(config: str, settings: str) -> Config:
  """The config of a step."""
  values = flags.FlagValues()
  flag = cli.ConfigFlag(values)
  words = [*COMMON.split(), *settings.split()]
  values(["step", f"--config={config}", *(f"--config.{word}" for word in words)])
  return resolve_without_data(flag.value)


def planned(step: Measured) -> float:
  """Milliseconds by the planner."""
  cfg = resolved(step.config, step.settings)
  with on_mesh(cfg, abstract_mesh(cfg, step.devices)):
    state = abstract_state(cfg)
    counts = count(cfg, state.model, cfg.data.seq_len)
    found = step_seconds(cfg, state.model, device_bytes(state), counts, typical(step.gpu))
  return 1e3 * found["likely"]


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  print("| ms | planned | measured | |\n|---|--:|--:|--:|")
  for step in STEPS:
    found = planned(step)
    devices = {1: step.gpu, 2: f"two {step.gpu}s", 4: f"four {step.gpu}s"}[step.devices]
    gap = f"{100 * (found / step.ms - 1):+.0f} %"
    print(f"| {devices}: {step.name} | {found:,.0f} | {step.ms:,.0f} | {gap} |")


if __name__ == "__main__":
  app.run(main)
