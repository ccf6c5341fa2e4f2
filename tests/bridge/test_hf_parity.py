"""Our models beside those of `transformers`: tokens, packed rows, exports and quantised weights."""

import functools
import json

import hf_gate
import hf_models
import jax
import numpy as np
import pytest
import torch
from eight_bit_blocks import dequantised, quantise
from helpers import pack
from hf_models import SEQ_LEN
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.parity import compare
from ats_jax.bridge.safetensors_file import Slot, Writer
from ats_jax.step.objective import loss_sums
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),  # those of torch and transformers are not ours
]


# Of the kinds of caches: with windows and sinks, with two bases, of latents.
# `test_hf_mutations` compares the logits of every family.
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "deepseek_v2-odd-groups-yarn"])
def test_greedy_tokens_are_equal(name, cases):
  source, _, _ = cases(name)
  cfg = hf_gate.settings(source)
  model = hf_gate.imported(source, cfg)
  parity = compare(model, hf_gate.rules(cfg), source.folder, seq_len=SEQ_LEN)
  assert parity.logits <= hf_gate.LOGITS and parity.kl <= hf_gate.KL
  assert parity.std >= 1, "logits near 0 would hide a wrong weight"
  assert parity.greedy == parity.asked == 128


# Of the ways to cut a row: by windows too, by the one key of all heads.
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_the_loss_of_packed_rows_is_that_of_the_documents(name, cases):
  source, _, _ = cases(name)
  lengths = [[40, 1, 30, 20], [96]]
  tokens = hf_models.rows(seed=1, length=SEQ_LEN + 1)
  theirs, losses = hf_models.load(source.folder), []
  for row, row_lengths in enumerate(lengths):
    for end, length in zip(np.cumsum(row_lengths), row_lengths, strict=True):
      where = slice(end - length, end)
      logits = torch.from_numpy(hf_models.logits(theirs, tokens[row : row + 1, where])[0])
      targets = torch.from_numpy(tokens[row, where.start + 1 : end + 1])
      losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
  segments, positions = pack(lengths, SEQ_LEN)
  batch = {
    "tokens": tokens[:, :-1].astype(np.int32),
    "targets": tokens[:, 1:].astype(np.int32),
    "loss_mask": (segments > 0).astype(np.float32),
    "segment_ids": segments,
    "positions": positions,
  }
  cfg = hf_gate.settings(source)
  step = jax.jit(
    functools.partial(loss_sums, cfg=cfg.step, rules=hf_gate.rules(cfg, training=True))
  )
  sums, _ = step(hf_gate.imported(source, cfg), batch)
  assert float(sums.cross_entropy) / len(losses) == pytest.approx(np.mean(losses), abs=2e-5)


def test_an_export_is_the_folder_that_was_imported(tmp_path):
  """In bfloat16 and several files, and as `transformers` reads it."""
  model = hf_models.make("gpt_oss").to(torch.bfloat16)
  hf_models.save(model, tmp_path / "hf", max_shard_size="60KB")
  assert (tmp_path / "hf/model.safetensors.index.json").exists()
  import_folder(tmp_path / "hf", parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out", shard_bytes=60_000)
  source, out = open_model_folder(tmp_path / "hf"), open_model_folder(tmp_path / "out")
  assert out.tensors.keys() == source.tensors.keys()
  for tensor, theirs in source.tensors.items():
    got, want = out.tensors[tensor].read(), theirs.read()
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=tensor)
  tokens = hf_models.rows()
  got, want = (hf_models.logits(hf_models.load(tmp_path / name), tokens) for name in ("out", "hf"))
  np.testing.assert_array_equal(got, want)


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
