"""Our models beside those of `transformers` with the same weights."""

import functools
import json
import math

import hf_gate
import hf_models
import jax
import numpy as np
import pytest
import torch
from eight_bit_blocks import dequantised, quantise
from hf_models import CASES, SEQ_LEN
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.parity import compare, divergence, our_logits
from ats_jax.bridge.safetensors_file import Slot, Writer
from ats_jax.step.objective import loss_sums
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),  # those of torch and transformers are not ours
]


# One of each family, in which what only some layers or tokens have is on.
OF_FAMILY = (
  "llama-tied-linear", "mistral-window", "qwen2-yarn-window", "qwen3-odd-yarn", "gemma2", "gemma3",
  "mixtral-odd-window", "qwen3_moe-every-second", "gpt_oss", "deepseek_v2-odd-groups-yarn",
  "deepseek_v3", "olmoe-normed",
)  # fmt: skip
# Of the ways to cut a row: by documents alone, by windows too, by the one key of all heads.
PACKED = ("olmoe-normed", "gpt_oss", "deepseek_v3")
EXPORTED = ("llama-tied-linear", "gemma3", "gpt_oss", "deepseek_v3")


def test_every_family_is_compared():
  assert {CASES[name][0] for name in OF_FAMILY} == {kind for kind, _ in CASES.values()}


@pytest.mark.parametrize("name", OF_FAMILY)
def test_logits_and_greedy_tokens_are_equal(name, cases):
  source, tokens, theirs = cases(name)
  # Logits near 0, or attention over all tokens alike, would hide a wrong weight.
  assert np.std(theirs) >= 1
  assert hf_models.attention_entropy(hf_models.load(source.folder), tokens) < math.log(SEQ_LEN) / 2
  cfg = hf_gate.settings(source)
  model = hf_gate.imported(source, cfg)
  parity = compare(model, hf_gate.rules(cfg), source.folder, seq_len=SEQ_LEN)
  print(name, *parity.lines(), sep="\n  ")
  assert parity.logits <= hf_gate.LOGITS
  assert parity.kl <= hf_gate.KL
  assert parity.greedy == parity.asked == 128


@pytest.mark.parametrize("name", PACKED)
def test_the_loss_of_packed_rows_is_that_of_the_documents(name, cases):
  source, _, _ = cases(name)
  lengths = [[40, 1, 30, 20], [96]]
  tokens = hf_models.rows(seed=1, length=SEQ_LEN + 1)
  batch, want, counted = packed(tokens, lengths, hf_models.load(source.folder))
  cfg = hf_gate.settings(source)
  step = jax.jit(
    functools.partial(loss_sums, cfg=cfg.step, rules=hf_gate.rules(cfg, training=True))
  )
  sums, _ = step(hf_gate.imported(source, cfg), batch)
  assert float(sums.cross_entropy) / counted == pytest.approx(want / counted, abs=2e-5)


def packed(tokens, lengths, theirs):
  """A batch of documents of these lengths in rows, and the sum of their losses, each by itself."""
  segments, positions = np.zeros((2, SEQ_LEN), np.int32), np.zeros((2, SEQ_LEN), np.int32)
  loss, counted = 0.0, 0
  for row, row_lengths in enumerate(lengths):
    at = 0
    for number, length in enumerate(row_lengths, 1):
      where = slice(at, at + length)
      segments[row, where], positions[row, where] = number, np.arange(length)
      logits = hf_models.logits(theirs, tokens[row : row + 1, where])[0]
      targets = torch.from_numpy(tokens[row, at + 1 : at + length + 1])
      loss += torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).double(), targets, reduction="sum"
      ).item()
      at, counted = at + length, counted + length
  batch = {
    "tokens": tokens[:, :-1].astype(np.int32),
    "targets": tokens[:, 1:].astype(np.int32),
    "loss_mask": (segments > 0).astype(np.float32),
    "segment_ids": segments,
    "positions": positions,
  }
  return batch, loss, counted


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_is_the_folder_that_was_imported(name, cases, tmp_path):
  source, tokens, theirs = cases(name)
  import_folder(source.folder, parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out", shard_bytes=60_000)
  out = open_model_folder(tmp_path / "out")
  assert out.tensors.keys() == source.tensors.keys()
  for tensor, theirs_here in source.tensors.items():
    got, want = out.tensors[tensor].read(), theirs_here.read()
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=tensor)
  assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
  np.testing.assert_array_equal(hf_models.logits(hf_models.load(tmp_path / "out"), tokens), theirs)


def test_a_folder_in_bfloat16_keeps_its_bits(tmp_path):
  model = hf_models.make("llama").to(torch.bfloat16)
  hf_models.save(model, tmp_path / "hf", max_shard_size="60KB")
  assert (tmp_path / "hf/model.safetensors.index.json").exists()
  import_folder(tmp_path / "hf", parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out")
  one, other = open_model_folder(tmp_path / "hf"), open_model_folder(tmp_path / "out")
  assert {t.dtype for t in other.tensors.values()} == {"BF16"}
  for tensor in one.tensors:
    got, want = other.tensors[tensor].read(), one.tensors[tensor].read()
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=tensor)


def random_mxfp4(weights):
  """Random MXFP4 in the shapes of experts' matrices [experts, inputs, outputs]."""
  experts, inputs, outputs = weights.shape
  shape = (experts, outputs, inputs // 32)
  blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
  # Powers from 2^-8 to 2^-4: larger weights make logits that float32 rounds by more than 1e-4.
  return blocks, torch.randint(119, 124, shape, dtype=torch.uint8)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
  """Bit for bit, and the logits of the folder are those of the model that it stands for."""
  sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
  model = hf_models.make("gpt_oss", **sizes)
  plain, packed = dict(model.state_dict()), {}
  for name in [n for n in plain if n.endswith(("gate_up_proj", "down_proj"))]:
    blocks, scales = random_mxfp4(plain[name])
    packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    plain[name] = convert_moe_packed_tensors(blocks, scales)
  model.load_state_dict({n: t.float() for n, t in plain.items()})
  folder = hf_models.save(model, tmp_path / "hf")
  kept = {n: t for n, t in plain.items() if f"{n}_blocks" not in packed}
  save_file(
    {n: t.contiguous() for n, t in (kept | packed).items()},
    folder / "model.safetensors",
    {"format": "pt"},
  )
  fields = json.loads((folder / "config.json").read_text())
  fields["quantization_config"] = {"quant_method": "mxfp4"}
  (folder / "config.json").write_text(json.dumps(fields))

  source = open_model_folder(folder)
  for name in (n.removesuffix("_blocks") for n in packed if n.endswith("_blocks")):
    want = plain[name].view(torch.int16).numpy()
    np.testing.assert_array_equal(source.tensors[name].read().view(np.int16), want, err_msg=name)
  tokens = hf_models.rows()
  assert hf_gate.passes(source, tokens, hf_models.logits(model, tokens))


def test_a_folder_in_8_bits_is_the_model_of_its_dequantised_weights(cases, tmp_path):
  source, tokens, before = cases("deepseek_v3")
  block, narrow, wide = (8, 16), {}, {}
  for name, tensor in source.tensors.items():
    narrow[name] = wide[name] = array = tensor.read()
    if array.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
      narrow[name], scales = quantise(array, block)
      narrow[f"{name}_scale_inv"], wide[name] = scales, dequantised(narrow[name], scales, block)
  quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
  write(tmp_path / "wide", dict(source.fields), wide)
  write(tmp_path / "fp8", {**source.fields, "quantization_config": quantisation}, narrow)
  theirs = hf_models.logits(hf_models.load(tmp_path / "wide"), tokens)
  assert np.max(np.abs(theirs - before)) > 0.1  # 8 bits show
  assert hf_gate.passes(open_model_folder(tmp_path / "fp8"), tokens, theirs)


def write(folder, fields, tensors):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(fields))
  slots = [Slot(name, array.dtype, array.shape) for name, array in tensors.items()]
  with Writer(folder / "model.safetensors", slots) as writer:
    for name, array in tensors.items():
      writer.write(name, array)


def test_the_report_tells_a_wrong_weight(cases):
  source, tokens, theirs = cases("llama")
  cfg = hf_gate.settings(source)
  model = hf_gate.imported(source, cfg)
  wrong = jax.tree.map(lambda leaf: leaf * 1.001, model)
  ours = our_logits(wrong, hf_gate.rules(cfg), tokens)
  assert np.max(divergence(theirs, ours)) > hf_gate.KL
