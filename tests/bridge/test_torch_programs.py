"""Programs of the forward pass, each read back by what runs it, and compared with JAX."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import called
from in_process import printed_by
from test_torch_export import folder_of
from torch_cases import both

from ats_jax.bridge import gguf_file, programs
from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.parity import our_logits
from ats_jax.model.forward_pass import rules_at
from ats_jax.pytorch import graph
from ats_jax.store.paths import parse

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
HOW = dict(rows=2, seq_len=20, opset=20)
# Runs where nothing of ours can be imported.
READER = """
import sys
sys.modules["ats_jax"] = None
import jax, jax.export, numpy as np
from safetensors.numpy import load_file
program = jax.export.deserialize(open("program.stablehlo", "rb").read())
tokens = np.load("tokens.npy")
np.save("logits.npy", program.call(load_file("weights.safetensors"), tokens))
"""


def of_jax(name, tokens):
  cfg, ours, _ = both(name)
  rules = rules_at(cfg, 0, training=False)
  return cfg, ours, rules, our_logits(ours, rules, tokens)


@pytest.fixture
def tokens():
  return np.random.default_rng(0).integers(0, 270, (2, 20)).astype(np.int32)


@pytest.mark.usefixtures("mesh")
def test_stablehlo_runs_without_our_code(tokens, tmp_path):
  cfg, ours, rules, want = of_jax("hybrid", tokens)
  files = programs.stablehlo(cfg, ours, rules, tmp_path, **HOW)
  assert sorted(files) == sorted(p.name for p in tmp_path.iterdir())
  np.save(tmp_path / "tokens.npy", tokens)
  env = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "XLA_FLAGS")}
  command = [sys.executable, "-c", READER]
  done = subprocess.run(
    command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300
  )
  assert done.returncode == 0, done.stderr
  np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", ["dense-all-options", "moe-groups"])
def test_onnx(name, tokens, tmp_path):
  onnxruntime = pytest.importorskip("onnxruntime")
  pytest.importorskip("onnxscript")
  cfg, ours, rules, want = of_jax(name, tokens)
  assert "model.onnx" in programs.onnx(cfg, ours, rules, tmp_path, **HOW)
  session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
  (given,) = session.get_inputs()
  for rows, length in ((2, 20), (1, 7)):  # other sizes than were traced
    part, expected = tokens[:rows, :length].astype(np.int64), want[:rows, :length]
    found = session.run(["logits"], {given.name: part})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("mesh")
def test_what_no_program_has_is_named(tmp_path, monkeypatch):
  cfg, ours, theirs = both("hybrid")
  with pytest.raises(ValueError, match=r"mod\.routing=learned: a graph"):
    graph.traced(theirs)
  with pytest.raises(ValueError, match="--opset=7: 18 to 23"):
    programs.onnx(cfg, ours, rules_at(cfg, 0, training=False), tmp_path, **{**HOW, "opset": 7})
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="pip install flatbuffers"):
    programs.stablehlo(cfg, ours, rules_at(cfg, 0, training=False), tmp_path, **HOW)


@pytest.mark.usefixtures("mesh")
def test_the_command_writes_a_graph_of_pytorch(tokens, tmp_path):
  _, _, theirs = both("dense")
  folder_of(tmp_path / "first", "dense")
  import_folder(tmp_path / "first", parse(tmp_path / "run"), tokenizer="bytes")
  words = ("bridge", "export", f"--workdir={tmp_path}/run", "--format=torch")
  # A program is of one device, which the process of this has: here there are eight.
  done = called(*words, f"--folder={tmp_path}/out")
  assert done.code == 0, done.err
  assert done.out.startswith("step 0: model.pt2 ")
  module = torch.export.load(tmp_path / "out/model.pt2").module()
  for rows, length in ((2, 20), (1, 7)):  # other sizes than were traced
    part = torch.tensor(tokens[:rows, :length]).long()
    with torch.no_grad():
      want = theirs.logits(theirs(part)[0])
    torch.testing.assert_close(module(part), want, rtol=1e-4, atol=1e-4)
  with pytest.raises(ValueError, match="out exists"):
    printed_by(*words, f"--folder={tmp_path}/out")
  with pytest.raises(ValueError, match="no --dtype"):
    printed_by(*words, f"--folder={tmp_path}/other", "--dtype=bfloat16")


def test_gguf_is_read_back_and_computes_the_same(tmp_path):
  """By transformers' reader, which undoes what llama.cpp does to queries and keys."""
  gguf = pytest.importorskip("gguf")
  import hf_models
  from transformers import AutoModelForCausalLM

  model = hf_models.make("llama")
  folder = hf_models.save(model, tmp_path / "hf")
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  words = ("bridge", "export", f"--workdir={tmp_path}/run", f"--folder={tmp_path}/out")
  printed_by(*words, "--format=gguf", "--dtype=float32")
  assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.gguf"]
  reader = gguf.GGUFReader(tmp_path / "out/model.gguf")
  found = {tensor.name: tensor for tensor in reader.tensors}
  assert len(found) == len(model.state_dict())
  norm = model.model.norm.weight.detach().numpy()
  np.testing.assert_array_equal(found["output_norm.weight"].data, norm)
  assert reader.get_field("llama.block_count").contents() == model.config.num_hidden_layers
  theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
  tokens = torch.tensor(hf_models.rows())
  with torch.no_grad():
    want, got = (m(tokens).logits for m in (model.eval(), theirs))
  torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  ("name", "words"), [("qwen3", "only Llama"), ("llama-odd-llama3", "rope_scaling=llama3")]
)
def test_what_gguf_has_not_is_named(name, words, tmp_path):
  pytest.importorskip("gguf")
  import hf_models

  folder = hf_models.save(hf_models.make(name), tmp_path / "hf")
  with pytest.raises(ValueError, match=words):
    gguf_file.write(folder, tmp_path / "model.gguf")
