"""DeepSeek's folders: published fields, matrices in 8-bit blocks, layers that are left aside."""

import json
import math
import re

import jax
import numpy as np
import pytest
from eight_bit_blocks import dequantised, quantise
from helpers import make_decoder
from hf_folders import fields_of, random_tensors, write_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import arrays

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import choose_family, export
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.fp8_blocks import joined
from ats_jax.bridge.safetensors_file import read_header
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.schema import Config
from ats_jax.model.count import count
from ats_jax.planner.memory import kv_cache_bytes
from ats_jax.store.paths import parse

QUANTISED = {
  "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [8, 8],
}  # fmt: skip
# config.json of deepseek-ai/DeepSeek-V3, and what differs in DeepSeek-V2-Lite's.
V3 = {
  "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0,
  "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0,
  "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
  "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
  "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "quantization_config": {**QUANTISED, "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-6,
  "rope_scaling": {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
  },
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
  "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
  "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
LITE = {
  "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": True, "hidden_size": 2048,
  "first_k_dense_replace": 1, "intermediate_size": 10944, "moe_intermediate_size": 1408,
  "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
  "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
  "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
  "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
  "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
  "topk_method": "greedy", "vocab_size": 102400,
}  # fmt: skip


def config(fields) -> Config:
  read = FAMILIES[fields["model_type"]].read(fields)
  return resolve(with_settings(Config(), {"data.tokenizer": "bytes", **read}), 0)


def test_published_fields_are_settings():
  cfg = config(V3)
  m, moe = cfg.model, cfg.moe
  assert (m.head_dim, m.v_head_dim, m.latent_rope_dim) == (192, 128, 64)
  assert (m.q_latent_dim, m.kv_latent_dim, m.num_kv_heads) == (1536, 512, 128)
  assert m.attn_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
  assert m.rope_scaling.concentration == 1.0
  assert (moe.num_groups, moe.top_groups, moe.group_score, moe.top_k) == (8, 4, "top2", 8)
  assert (moe.score, moe.bias_on, moe.route_scale, moe.dense_first) == ("sigmoid", "scores", 2.5, 3)
  lite = config({**V3, **LITE})
  assert (lite.model.q_latent_dim, lite.moe.num_groups, lite.moe.score) == (0, 1, "softmax")
  assert (lite.moe.num_shared, lite.moe.renormalize, lite.moe.bias_on) == (2, False, "logits")


def test_published_sizes(mesh):
  """671B parameters, 37B of them active (arXiv:2412.19437, abstract); V2-Lite has 15.7B."""
  cfg = config(V3)
  model = jax.eval_shape(lambda: make_decoder(cfg))
  counts = count(cfg, model, 4096)
  assert counts.parameters == pytest.approx(671e9, rel=1e-3)
  table = cfg.model.vocab_size * cfg.model.d_model
  assert counts.active - table == pytest.approx(37e9, rel=0.015)  # those that are multiplied with
  # A token and layer is 512 + 64 numbers in bfloat16.
  assert kv_cache_bytes(cfg, model) == cfg.data.seq_len * 61 * 576 * 2
  lite = config({**V3, **LITE})
  small = count(lite, jax.eval_shape(lambda: make_decoder(lite)), 4096)
  assert small.parameters == pytest.approx(15.7e9, rel=1e-3)


def test_fields_come_back():
  beside = {"num_nextn_predict_layers", "rope_scaling", "auto_map", "quantization_config"}
  plain = {k: v for k, v in V3["rope_scaling"].items() if not k.startswith("mscale")}
  for kind, scales in (
    (V3, {"mscale": 1.0, "mscale_all_dim": 1.0}),
    ({**V3, **LITE}, {"mscale": 0.8, "mscale_all_dim": 0.6}),
    (V3, {"mscale_all_dim": 0.5}),
    ({**V3, **LITE}, {}),
  ):
    rope = plain | scales
    fields = {**kind, "rope_scaling": rope}
    written = FAMILIES[kind["model_type"]].write(config(fields))
    for key in (written.keys() & fields.keys()) - beside:
      assert written[key] == fields[key], key
    assert written["num_nextn_predict_layers"] == 0
    assert {k: v for k, v in rope.items() if k != "type"}.items() <= written["rope_scaling"].items()


def own(**changes) -> Config:
  """A model of ours that was never theirs."""
  latent = {
    "model.num_kv_heads": 4, "model.kv_latent_dim": 16, "model.latent_rope_dim": 8,
    "moe.num_experts": 8, "moe.score": "sigmoid", "moe.bias_on": "scores",
  }  # fmt: skip
  named = {name.replace("__", "."): value for name, value in changes.items()}
  return resolve(with_settings(Config(), {"data.tokenizer": "bytes", **latent, **named}), 272)


def test_a_model_of_ours_is_a_deepseek():
  groups = {"moe__num_groups": 4, "moe__top_groups": 2, "moe__num_shared": 1, "moe__dense_first": 1}
  assert choose_family(own(**groups)).model_type == "deepseek_v3"
  v2 = {"moe__score": "softmax", "moe__bias_on": "logits", "moe__renormalize": False}
  best = {"moe__num_groups": 4, "moe__top_groups": 2, "moe__group_score": "max"}
  for more in ({}, best):
    assert choose_family(own(**v2, **more), "deepseek_v2").model_type == "deepseek_v2"
  for changes, words in (
    ({"moe__null_experts": 2}, "moe.null_experts=2"),
    ({"moe__bias_on": "logits"}, "moe.bias_on=logits"),
    ({"moe__every": 2}, "moe.every=2"),
    ({"model__attn_scale": 0.5}, "model.attn_scale=0.5"),
    ({"mod__routing": "static"}, "mod.routing=static"),
  ):
    with pytest.raises(ValueError, match=f"deepseek_v3 lacks: .*{words}"):
      choose_family(own(**changes), "deepseek_v3")


@settings(max_examples=30)
@given(
  shape=st.tuples(st.integers(1, 21), st.integers(1, 21)),
  block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_blocks_are_read_exactly(shape, block, tmp_path_factory):
  path = tmp_path_factory.mktemp("blocks") / "a.safetensors"
  matrix = np.random.default_rng(0).normal(size=shape)
  values, scales = quantise(matrix, block)
  write_tensors(path, {"w": values, "w_scale_inv": scales, "norm": np.ones(3, np.float32)})
  config = {"quantization_config": {**QUANTISED, "weight_block_size": list(block)}}
  found = joined(read_header(path), config)
  assert found.keys() == {"w", "norm"}
  got = found["w"].read()
  assert got.dtype == np.float32 and found["w"].dtype == "F32" and found["w"].shape == shape
  np.testing.assert_array_equal(got, dequantised(values, scales, block))
  largest = np.abs(matrix).max()
  np.testing.assert_allclose(got, matrix, rtol=2**-4, atol=largest * 2**-9)


def quantised_folder(folder):
  """All matrices of the layers in 8 bits, but for routers, as published."""
  fields = fields_of("deepseek_v3", quantization_config=QUANTISED)
  tensors, want = {}, {}
  for name, array in random_tensors(fields).items():
    tensors[name] = want[name] = array
    if array.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
      tensors[name], tensors[name + "_scale_inv"] = quantise(array, (8, 8))
      want[name] = dequantised(tensors[name], tensors[name + "_scale_inv"], (8, 8))
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(fields))
  write_tensors(folder / "model.safetensors", tensors)
  return fields, tensors, want


def test_a_quantised_folder_is_imported(tmp_path):
  _, _, want = quantised_folder(tmp_path / "hf")
  source = open_model_folder(tmp_path / "hf")
  assert source.tensors.keys() == want.keys()
  assert sum(t.nbytes for t in source.tensors.values()) < sum(a.nbytes for a in want.values())
  import_folder(tmp_path / "hf", parse(tmp_path / "run"), tokenizer="bytes")
  got = {re.sub(r"[\[\]']+", "/", k).strip("/"): v for k, v in arrays(tmp_path / "run", 0).items()}
  gate = want["model.layers.1.mlp.experts.2.gate_proj.weight"]
  np.testing.assert_array_equal(got["model/layers/1/mlp/gate"][2], gate.T)
  bias = want["model.layers.1.mlp.gate.e_score_correction_bias"]
  np.testing.assert_array_equal(got["model/layers/1/mlp/router/bias_E"], bias)


def test_other_quantised_weights_are_refused(tmp_path):
  folder, down = tmp_path / "hf", "model.layers.0.mlp.down_proj.weight"
  fields, tensors, _ = quantised_folder(folder)

  def refused(words):
    with pytest.raises(ValueError, match=words):
      import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")

  for quantisation, words in (
    ({"quant_method": "gptq"}, "quantization_config is .*gptq"),
    ({**QUANTISED, "fmt": "e5m2"}, "quantization_config is .*e5m2"),
    (
      {**QUANTISED, "weight_block_size": [16, 8]},
      r"_scale_inv is F32 \[\d+, \d+\], and .* in blocks of \[16, 8\] needs F32",
    ),
    (None, "is in F8_E4M3|_scale_inv"),
  ):
    changed = {**fields, "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(changed))
    refused(words)
  (folder / "config.json").write_text(json.dumps(fields))
  del tensors[f"{down}_scale_inv"]
  write_tensors(folder / "model.safetensors", tensors)
  refused(f"tensor {down} is in F8_E4M3")


def test_layers_that_predict_further_tokens_are_left_aside_and_named(tmp_path):
  fields = fields_of("deepseek_v3", num_nextn_predict_layers=1)
  tensors = random_tensors(fields)
  more = {"model.layers.2.enorm.weight", "model.layers.2.self_attn.o_proj.weight"}
  folder, run = tmp_path / "hf", parse(tmp_path / "run")
  folder.mkdir()
  write_tensors(
    folder / "model.safetensors", tensors | dict.fromkeys(more, np.ones((4, 4), np.float32))
  )
  (folder / "config.json").write_text(json.dumps(fields))
  report = import_folder(folder, run, tokenizer="bytes")
  assert set(report["aside"]) == more
  kept = json.loads((tmp_path / "run/huggingface/aside.json").read_text())
  assert set(kept["tensors"]) == more and kept["folder"] == str(folder)
  assert set(export(run, tmp_path / "out")["aside"]) == more
  assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
  # Without a field that says so they are tensors too many.
  (folder / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))
  with pytest.raises(ValueError, match=r"holds 2 tensors that .*model.layers.2.enorm"):
    import_folder(folder, parse(tmp_path / "other"), tokenizer="bytes")
