"""Our models beside those of `transformers`: tokens, packed rows, exports and quantised weights."""

import functools

import hf_gate
import hf_models
import jax
import numpy as np
import pytest
import torch
from helpers import pack
from hf_models import SEQ_LEN
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.mxfp4 import dequantise
from ats_jax.bridge.parity import compare
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
  source, theirs = cases(name)
  cfg = hf_gate.settings(source)
  parity = compare(hf_gate.imported(source, cfg), hf_gate.rules(cfg), theirs)
  assert parity.same and parity.kl <= 1e-9
  assert parity.std >= 1, "logits near 0 would hide a wrong weight"
  assert parity.greedy == parity.asked == 128


# Of the ways to cut a row: by windows too, by the one key of all heads.
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_the_loss_of_packed_rows_is_that_of_the_documents(name, cases):
  source, _ = cases(name)
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


def test_mxfp4_is_read_as_transformers_reads_it():
  rng = np.random.default_rng(0)
  blocks = rng.integers(0, 256, (3, 10, 2, 16), np.uint8)  # experts, outputs, groups of inputs
  scales = rng.integers(110, 140, (3, 10, 2)).astype(np.uint8)
  want = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
  got = np.stack([dequantise(*pair) for pair in zip(blocks, scales, strict=True)])
  np.testing.assert_array_equal(got, want.float().numpy())
