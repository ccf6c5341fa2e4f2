"""`bridge train`: the losses of JAX's run, a kill and what follows it, and the way back to JAX."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from helpers import TINY, make_test_mesh
from safetensors.torch import load_file
from torch_cases import arrays, both

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.parity import our_logits
from ats_jax.checkpoint import integrity, reader
from ats_jax.config import Config
from ats_jax.config.build import with_settings
from ats_jax.config.text import text_of
from ats_jax.inference.load import load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.writer import is_time_key
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.settings import RoutingRules, settings_of
from ats_jax.pytorch.training import device, loop
from ats_jax.pytorch.training.lora import Lora
from ats_jax.pytorch.training.state import shared_tensors
from ats_jax.store.paths import parse
from ats_jax.train import loop as jax_train
from ats_jax.train.initial_weights import InitialWeights

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `torch_cases` sets it here
CPU = loop.Options(torch.device("cpu"), torch.float32)
RUN = TINY | {
  "num_steps": 20,
  "model.vocab_size": 272,
  "data.batch_size": 16,
  "data.seq_len": 24,
  "log.every_steps": 1,
  "log.progress": False,
  "log.writers": ("jsonl",),
  "checkpoint.every_steps": 20,
  "eval.every_steps": 10,
  "eval.num_batches": 2,
  "sample.max_tokens": 0,
  "optimizer.warmup_steps": 5,
  "optimizer.learning_rate": 3e-3,
  "step.accum_steps": 2,
  "step.z_loss": 1e-4,
}
SPARSE = {
  "moe.num_experts": 4,
  "moe.null_experts": 1,
  "moe.d_ff": 32,
  "moe.sequence_aux_loss": 1e-3,
  "mod.routing": "learned",
  "mod.capacity": 0.5,
}
KINDS = {
  "dense": {"optimizer.grad_clip": 0.5, "optimizer.schedule": "wsd", "step.remat": "full"},
  "moe": {n: v for n, v in SPARSE.items() if not n.startswith("mod.")},
  "learned": SPARSE,
}
# Of the losses. A learned router chooses tokens by scores of which some differ by no more than
# rounding: JAX is as far from itself if it adds in another order.
NEAR = {"dense": 1e-4, "learned": 1e-2}


def settings(tmp_path, kind: str, **changes):
  text = tmp_path / "text.txt"
  if not text.exists():
    rng = np.random.default_rng(0)
    words = ["ape", "bee", "cat", "dog", "emu", "fox", "gnu"]
    lines = [" ".join(rng.choice(words, 12)) for _ in range(600)]
    text.write_text("\n\n".join(lines))
  cache = {"data.cache_dir": str(tmp_path / "cache"), "data.paths": (str(text),)}
  return with_settings(Config(), RUN | KINDS[kind] | cache | changes)


def rows(folder, name="train/loss"):
  return {row["step"]: row for row in read_jsonl(parse(folder / "metrics.jsonl")) if name in row}


@pytest.mark.parametrize("kind", NEAR)
def test_the_steps_are_those_of_jax(kind, tmp_path):
  cfg = settings(tmp_path, kind)
  jax_train.train(cfg, parse(tmp_path / "jax"))
  assert loop.train(cfg, parse(tmp_path / "torch"), CPU)
  ours, theirs = rows(tmp_path / "jax"), rows(tmp_path / "torch")
  assert ours.keys() == theirs.keys() == set(range(1, 21))
  assert ours[20]["train/loss"] < 0.8 * ours[1]["train/loss"]
  far = {}
  for name in ours[1]:
    if name not in ("step", "wall_time") and not is_time_key(name):
      pairs = np.array([(ours[s][name], theirs[s][name]) for s in ours])
      far[name] = np.max(np.abs(pairs[:, 0] - pairs[:, 1]) / np.maximum(np.abs(pairs[:, 0]), 0.01))
  assert far["train/loss"] < NEAR[kind], far
  assert far["train/learning_rate"] < 1e-6
  if kind == "learned":
    for step in (1, 2, 3):
      assert theirs[step]["train/loss"] == pytest.approx(ours[step]["train/loss"], rel=1e-5)
  else:
    assert all(value < 1e-3 for value in far.values()), far
  ours, theirs = rows(tmp_path / "jax", "eval/loss"), rows(tmp_path / "torch", "eval/loss")
  assert ours.keys() == theirs.keys() == {10, 20}
  for step, row in ours.items():
    assert theirs[step]["eval/loss"] == pytest.approx(row["eval/loss"], rel=NEAR[kind])
  if kind != "dense":
    ours, theirs = (
      read_jsonl(parse(tmp_path / side / "layers.jsonl")) for side in ("jax", "torch")
    )
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]


def saved(folder: Path, step: int) -> dict[str, np.ndarray]:
  """Every array of a checkpoint."""
  import orbax.checkpoint as ocp

  names = integrity.read_manifest(parse(folder / f"checkpoints/{step}"))["leaves"]
  names = [name for name in names if name != "key"]
  with ocp.Checkpointer(reader.handler()) as orbax:
    return orbax.restore(
      folder / f"checkpoints/{step}/state",
      args=ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, np.empty(0)),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
      ),
    )


# Of the second checkpoint, that of step 6, all or nothing may be on the disk.
KILLED = """
import os, signal, sys
from ats_jax.pytorch.training.loop import TorchRun
from ats_jax.verbs import main
update = TorchRun.update
def dies(run):
  if run.step == 7:
    os.kill(os.getpid(), signal.SIGKILL)
  update(run)
TorchRun.update = dies
main()
"""


def test_a_killed_run_goes_on_bit_for_bit_and_back_into_jax(tmp_path):
  changes = {"num_steps": 8, "checkpoint.every_steps": 3, "model.dropout": 0.1}
  changes["eval.every_steps"] = 0
  cfg = settings(tmp_path, "learned", **changes)
  assert loop.train(cfg, parse(tmp_path / "whole"), CPU)

  flags = {**RUN, **KINDS["learned"], **changes}
  flags.pop("compilation_cache", None)  # a flag that would do nothing
  flags |= {"data.cache_dir": tmp_path / "cache", "data.paths": tmp_path / "text.txt"}
  (tmp_path / "plain.py").write_text("from ats_jax.config import base_config as get_config\n")
  command = [sys.executable, "-c", KILLED, "bridge", "train", "--device=cpu"]
  command += [f"--workdir={tmp_path}/killed", f"--config={tmp_path}/plain.py"]
  command += [f"--config.{name}={text_of(value)}" for name, value in flags.items()]
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, timeout=300, env=ONE_THREAD
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert (tmp_path / "killed/checkpoints/3").exists()
  assert loop.train(cfg, parse(tmp_path / "killed"), CPU)
  assert rows(tmp_path / "killed").keys() == set(range(1, 9))
  one, other = rows(tmp_path / "whole"), rows(tmp_path / "killed")
  for step, row in one.items():
    same = {n: v for n, v in row.items() if n != "wall_time" and not is_time_key(n)}
    assert {n: other[step][n] for n in same} == same, step
  whole, killed = saved(tmp_path / "whole", 8), saved(tmp_path / "killed", 8)
  assert whole.keys() == killed.keys()
  for name, array in whole.items():
    np.testing.assert_array_equal(array, killed[name], err_msg=name)

  theirs = Decoder(cfg := with_settings(cfg, {"model.head_dim": 8, "model.d_ff": 64}))
  part = {n.removeprefix("model/"): torch.tensor(a) for n, a in killed.items() if "model/" in n[:6]}
  weights.put(theirs, part)
  tokens = np.random.default_rng(0).integers(0, 250, (8, 24))
  with load_run(parse(tmp_path / "killed")) as run:
    rules = run.program.rules(run.step)
    want = our_logits(run.model, rules, tokens)
    restored = arrays(run.program.cfg, run.model)
  for name, array in part.items():
    np.testing.assert_array_equal(restored[name], array, err_msg=name)
  with torch.no_grad():
    x_BTD, _, _ = theirs.eval()(
      torch.tensor(tokens), rules=RoutingRules(False, rules.capacity, rules.horizon)
    )
    got = theirs.logits(x_BTD).numpy()
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

  longer = with_settings(cfg, {"num_steps": 9, "model.head_dim": 0, "model.d_ff": 64})
  assert jax_train.train(longer, parse(tmp_path / "killed")).step == 9  # JAX goes on with it


def test_adapters_go_on_and_merge_into_jax(tmp_path):
  pytest.importorskip("peft")
  few = {"optimizer.warmup_steps": 1, "checkpoint.every_steps": 3, "eval.every_steps": 0}
  jax_train.train(settings(tmp_path, "dense", num_steps=2, **few), parse(tmp_path / "base"))
  cfg = settings(tmp_path, "dense", num_steps=6, **few)
  options = loop.Options(torch.device("cpu"), torch.float32, lora=Lora(4, 8.0, ("q", "down")))
  init = InitialWeights(parse(tmp_path / "base"))
  run = lambda: loop.train(cfg, parse(tmp_path / "run"), options, init)
  assert run()
  first = rows(tmp_path / "run")
  merged = {f.name: f.read_bytes() for f in (tmp_path / "run/merged").iterdir()}
  shutil.rmtree(tmp_path / "run/checkpoints/6")
  shutil.rmtree(tmp_path / "run/merged")
  assert run()  # from step 3 on
  again = rows(tmp_path / "run")
  for step in (4, 5, 6):
    assert again[step]["train/loss"] == first[step]["train/loss"]
  assert {f.name: f.read_bytes() for f in (tmp_path / "run/merged").iterdir()} == merged
  adapter = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
  assert {n.split(".")[-3] for n in adapter} == {"q", "down"}
  assert all(bool(a.any()) for a in adapter.values())

  fields = json.loads(merged["config.json"])
  theirs = Decoder(settings_of(fields["settings"])).eval()
  weights.load(theirs, tmp_path / "run/merged/model.safetensors")
  base = load_run(parse(tmp_path / "base"))
  import_folder(tmp_path / "run/merged", parse(tmp_path / "back"))
  tokens = np.random.default_rng(0).integers(0, 250, (8, 24))
  found = []
  for opened in (base, load_run(parse(tmp_path / "back"))):
    with opened as run:
      found.append(our_logits(run.model, run.program.rules(run.step), tokens))
  with torch.no_grad():
    got = theirs.logits(theirs(torch.tensor(tokens))[0]).numpy()
  np.testing.assert_allclose(got, found[1], rtol=1e-4, atol=1e-4)
  assert np.abs(got - found[0]).max() > 1e-3  # the adapters do something

  wrong = dataclasses.replace(options, lora=Lora(4, 8.0, ("query",)))
  with pytest.raises(ValueError, match=r"--lora_targets: no \['query'\]"):
    loop.train(cfg, parse(tmp_path / "wrong"), wrong, init)


def test_float16_skips_what_overflows():
  scale = device.LossScale.of(torch.float16, {})
  first = scale.value
  assert not scale.took(torch.tensor(torch.inf)) and scale.value == first / 2
  for _ in range(device.GOOD_STEPS):
    assert scale.took(torch.tensor(1.0))
  assert scale.value == first
  again = device.LossScale.of(torch.float16, scale.saved())
  assert again == scale
  plain = device.LossScale.of(torch.float32, {})
  assert plain.took(torch.tensor(torch.nan)) and plain.value == 1.0 and plain.saved() == {}


def test_a_run_in_float16(tmp_path):
  # As of a file that is for JAX on a GPU too: here JAX is on the CPU, and makes no step.
  changes = {"num_steps": 12, "ops.kernels": {"attention": "cudnn"}}
  cfg = settings(tmp_path, "moe", **changes)
  options = loop.Options(torch.device("cpu"), torch.float16)
  assert loop.train(cfg, parse(tmp_path / "run"), options)
  found = rows(tmp_path / "run")
  assert found[12]["train/loss"] < found[1]["train/loss"]
  assert found[12]["train/loss_scale"] >= 1.0


def test_what_pytorch_has_not_is_named(tmp_path):
  for changes, words in (
    ({"orchestrator.mode": "act"}, "orchestrator.mode=off"),
    ({"optimizer.ema_decay": 0.9}, r"optimizer.ema_decay=0\.0"),
    ({"precision.param_dtype": "bfloat16"}, "param_dtype=float32"),
    ({"precision.compute_dtype": "float16"}, "Use --dtype=float16 in place of"),
    ({**SPARSE, "mod.routing": "random"}, "mod.routing=random"),
  ):
    with pytest.raises(ValueError, match=words):
      loop.train(settings(tmp_path, "dense", **changes), parse(tmp_path / "run"), CPU)


def test_flags_of_jax_alone_are_refused_and_a_file_may_have_them():
  changes = {"mesh.fsdp": 4, "log.profile_step": 2}
  changes |= {"moe.exchange": "hierarchical", "moe.num_experts": 4}
  cfg = with_settings(Config(), changes)
  for name in ("mesh.fsdp", "log.profile_step", "moe.exchange", "moe.exchange.name"):
    with pytest.raises(ValueError, match=rf"^{name}\S*=\w+ does nothing with bridge train"):
      loop.check_given(cfg, [name])
  loop.check_given(cfg, ["moe.num_experts", "seed", "mesh.tensor"])
  loop.check_given(cfg, ["mesh.fsdp"], lambda: {"mesh.fsdp": 4})
  of_kernels = lambda table: with_settings(Config(), {"ops.kernels": table})
  loop.check_given(of_kernels({"attention": "triton", "grouped_matmul": "xla"}), ["ops.kernels"])
  for table in ({"attention": "cudnn"}, {"rms_norm": "cuda"}):
    loop.check_given(of_kernels(table), [])
    with pytest.raises(ValueError, match=r"^ops.kernels: \w+=\w+ does nothing with bridge train"):
      loop.check_given(of_kernels(table), ["ops.kernels"])


def test_devices_and_formats_that_are_not_there():
  with pytest.raises(ValueError, match="--device=tpu is unknown"):
    device.find_device("tpu")
  if not torch.backends.mps.is_available():
    with pytest.raises(ValueError, match="--device=mps: this PyTorch finds no such device"):
      device.find_device("mps")
  cfg, mps = with_settings(Config(), {"data.seq_len": 4096}), torch.device("mps")
  assert device.format_of(cfg, mps, "") == torch.float16
  assert device.format_of(cfg, mps, "float32") == torch.float32
  assert device.fit_device(cfg, mps, frozenset()).data.seq_len == device.MPS_SEQ_LEN
  assert device.fit_device(cfg, mps, frozenset({"data.seq_len"})).data.seq_len == 4096
  with pytest.raises(ValueError, match="--dtype=int8 is unknown"):
    device.format_of(cfg, mps, "int8")


def test_weights_without_a_copy():
  """One device, one memory: PyTorch reads what JAX wrote, at the same addresses."""
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    cfg, ours, theirs = both("hybrid")
    copied = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    weights.put(theirs, shared_tensors(cfg, ours), share=True)
    held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(ours)}
  for name, tensor in theirs.state_dict().items():
    assert tensor.untyped_storage().data_ptr() in held, name
    torch.testing.assert_close(tensor, copied[name], rtol=0, atol=0)
