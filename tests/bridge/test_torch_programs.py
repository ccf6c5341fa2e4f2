"""Programs of the forward pass, each read back by what runs it, and compared with JAX."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import torch
from commands import called
from in_process import printed_by
from test_torch_export import folder_of
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.processors import TemplateProcessing
from torch_cases import both

from ats_jax.bridge import gguf_file, programs
from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.parity import our_logits
from ats_jax.data.tokens.tiktoken_file import ALPHABET
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
  ("name", "words"),
  [
    ("gemma2", "Gemma 2 is not written"),
    ("qwen3-odd-yarn", "rope_scaling=yarn"),
    ("mistral-window", "model.window=20"),
    ("qwen3_moe-every-second", "moe.renormalize=False, moe.every=2"),
  ],
)
def test_what_gguf_has_not_is_named(name, words, tmp_path):
  pytest.importorskip("gguf")
  import hf_models

  folder = hf_models.save(hf_models.make(name), tmp_path / "hf")
  with pytest.raises(ValueError, match=words):
    gguf_file.write(folder, tmp_path / "model.gguf")


def byte_level(*first, own=True, ignore_merges=False):
  """A tokenizer of bytes with one merge, that puts bos before a text; `first` cuts it."""
  inner = tokenizers.Tokenizer(
    BPE({**{c: b for b, c in ALPHABET.items()}, "ab": 256}, [("a", "b")],
        ignore_merges=ignore_merges)
  )  # fmt: skip
  level = ByteLevel(add_prefix_space=False, use_regex=own)
  inner.pre_tokenizer = Sequence([*first, level]) if first else level
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens(["<s>", "</s>"])
  inner.add_tokens(["<think>"])
  inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
  return inner


def split(digits, words=gguf_file._PARTS):
  return Split(tokenizers.Regex(words % digits), "isolated")


@pytest.mark.parametrize(
  ("cuts", "name"),
  [
    (lambda: byte_level(), "gpt-2"),
    (lambda: byte_level(split("{1,3}"), own=False, ignore_merges=True), "llama-bpe"),
    (lambda: byte_level(split("{1,3}"), own=False), "dbrx"),
    (lambda: byte_level(split(""), own=False), "qwen2"),
    (lambda: byte_level(Digits(individual_digits=True)), "smollm"),
    (lambda: byte_level(Digits(individual_digits=False)), None),
    (lambda: byte_level(split("{1,2}"), own=False), None),
    (lambda: byte_level(ignore_merges=True), None),
    (lambda: byte_level(own=False), None),
  ],
)
def test_gguf_names_how_text_is_cut_or_has_no_tokenizer(cuts, name, tmp_path):
  gguf = pytest.importorskip("gguf")
  import hf_models

  folder = hf_models.save(hf_models.make("llama-odd-llama3"), tmp_path / "hf")
  cuts().save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}'
  )
  (folder / "generation_config.json").write_text('{"eos_token_id": [258, 7]}')
  count, lacks = gguf_file.write(folder, tmp_path / "model.gguf")
  reader = gguf.GGUFReader(tmp_path / "model.gguf")
  read = lambda key: (f := reader.get_field(f"tokenizer.{key}")) and f.contents()
  assert len(reader.tensors) == count
  if name is None:
    assert read("ggml.model") == "none" and "no name" in lacks and read("ggml.tokens") is None
    return
  assert not lacks and read("ggml.model") == "gpt2" and read("ggml.pre") == name
  assert read("ggml.tokens")[256:261] == ["ab", "<s>", "</s>", "<think>", "[PAD260]"]
  assert read("ggml.token_type")[256:261] == [1, 3, 3, 4, 5] and len(read("ggml.tokens")) == 272
  assert read("ggml.merges") == ["a b"] and read("chat_template") == "{{ messages }}"
  ids = [read(f"ggml.{role}_token_id") for role in ("bos", "eos", "eot")]
  assert ids == [257, 258, 7] and read("ggml.add_bos_token") and not read("ggml.add_eos_token")
  factors = next(t for t in reader.tensors if t.name == "rope_freqs.weight").data
  freqs = 500.0 ** -(np.arange(8) / 8)  # by hand, as Llama 3.1's published code
  wave = 2 * np.pi / freqs
  smooth = np.clip((32 / wave - 1.0) / 3.0, 0, 1)
  np.testing.assert_allclose(factors, 1 / ((1 - smooth) / 4.0 + smooth), rtol=1e-5)
