"""config.json as it is published, of every family.

The names and values are those of files on the Hub. Those of Llama 2, 3.1 and 3.2, TinyLlama,
Mistral, Qwen3-0.6B and DeepSeek-V3 were written down from memory, without a copy at hand.
"""

import json
from pathlib import Path

import pytest
from hf_folders import fields_of

from ats_jax.bridge import config_import
from ats_jax.bridge.families import FAMILIES
from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config

PUBLISHED = json.loads((Path(__file__).parents[2] / "data/published_configs.json").read_text())
QWEN3 = {"model.qk_norm": True, "model.head_dim": 128}
YARN = {"model.rope_scaling.name": "yarn", "model.rope_scaling.original_len": 4096}
# What a field stands for that a family could easily pass over, or take for something else.
MEANS = {
  "Llama-2-7b": {"model.num_kv_heads": 32, "model.rope_theta": 1e4, "model.norm_eps": 1e-5},
  "Llama-3.1-8B": {"model.rope_scaling.name": "llama3", "model.rope_scaling.original_len": 8192},
  "Llama-3.2-1B": {"model.rope_scaling.factor": 32.0, "model.tie_embeddings": True},
  "TinyLlama-1.1B": {"model.head_dim": 64, "model.num_kv_heads": 4},
  "SmolLM2-135M": {"model.rope_theta": 1e5, "model.tie_embeddings": True},
  "unsloth/Llama-3.2-1B": {"model.rope_scaling.factor": 32.0},
  "DeepSeek-R1-Distill-Llama-8B": {"model.rope_scaling.factor": 8.0},
  "Mistral-7B-v0.1": {"model.window": 4096, "model.full_every": 0},
  "Mistral-7B-v0.3": {"model.window": 0, "model.rope_theta": 1e6},
  "Mixtral-8x7B-v0.1": {"model.window": 0, "moe.top_k": 2, "moe.renormalize": True},
  "Qwen2.5-0.5B": {"model.window": 0, "model.qkv_bias": True, "model.tie_embeddings": True},
  "DeepSeek-R1-Distill-Qwen-7B": {"model.window": 0, "model.rope_theta": 1e4},
  "Qwen3-0.6B": QWEN3,
  "Qwen3-30B-A3B": {**QWEN3, "moe.num_experts": 128, "moe.renormalize": True},
  "gemma-2-9b-it": {"model.window": 4096, "model.full_every": 2, "model.attn_soft_cap": 50.0},
  "gemma-3-1b-it": {"model.window": 512, "model.full_every": 6, "model.window_rope_theta": 1e4},
  "OLMoE-1B-7B-0924": {"model.qk_norm_scope": "all", "moe.renormalize": False, "moe.top_k": 8},
  "gpt-oss-20b": {**YARN, "model.window": 128, "model.full_every": 2, "model.gate_limit": 7.0},
  "DeepSeek-V2-Lite": {**YARN, "model.q_latent_dim": 0, "moe.num_groups": 1, "moe.dense_first": 1},
  "DeepSeek-V3": {**YARN, "moe.num_groups": 8, "moe.bias_on": "scores", "moe.route_scale": 2.5},
}


def test_every_family_is_there():
  assert MEANS.keys() == PUBLISHED.keys()
  assert {fields["model_type"] for fields in PUBLISHED.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_whole(name, tmp_path):
  fields = PUBLISHED[name]
  family = FAMILIES[fields["model_type"]]
  settings = family.read(fields)
  assert settings.items() >= MEANS[name].items()
  cfg = with_settings(Config(), {"data.tokenizer": "bytes", **settings})
  # An export of the import says the same again.
  again = family.read(family.write(cfg))
  assert settings.items() >= {k: again[k] for k in MEANS[name]}.items()
  # A run from scratch leaves nothing out but what trains nothing here.
  (tmp_path / "config.json").write_text(json.dumps(fields))
  report = config_import.read(str(tmp_path / "config.json"))
  assert {entry.name for entry in report.missing} <= {"num_nextn_predict_layers", "torch_dtype"}


@pytest.mark.parametrize(
  ("ignored", "words"),
  [
    ((), r"new_a is 1 in .*--ignore_fields=new_a,new_b imports the model as if it did not"),
    (("new_a",), r"new_b is 2 in .*--ignore_fields=new_b"),
    (("new_a", "new_c"), r"--ignore_fields=new_c: new_c is not in config.json"),
    (("new_a", "hidden_act"), r"--ignore_fields=hidden_act: hidden_act decides what the model"),
  ],
)
def test_unknown_fields_are_named_with_the_flag(ignored, words):
  fields = fields_of("llama", new_a=1, new_b=2, hidden_act="silu")
  with pytest.raises(ValueError, match=words):
    FAMILIES["llama"].read(fields, ignored)
  read = FAMILIES["llama"].read(fields, ("new_a", "new_b"))
  assert read == FAMILIES["llama"].read(fields_of("llama"))


@pytest.mark.parametrize(
  ("kind", "fields"),
  [
    ("deepseek_v2", {"first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 5}),
    ("qwen3_moe", {"num_hidden_layers": 1, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
  ],
)
def test_a_model_in_which_no_layer_has_experts_is_dense(kind, fields):
  settings = FAMILIES[kind].read(fields_of(kind, **fields))
  assert {k: v for k, v in settings.items() if k.startswith("moe.")} == {"moe.num_experts": 0}
  assert settings["model.d_ff"] == 48


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
  ("kind", "types", "window"),
  [
    ("mistral", [SLIDING, FULL], (8, 2)),
    ("mistral", [SLIDING, SLIDING], (8, 0)),
    ("mistral", [FULL, FULL], (0, 0)),
    ("mixtral", None, (8, 0)),
  ],
)
def test_windows_of_layers_come_back(kind, types, window):
  family = FAMILIES[kind]
  settings = family.read(
    fields_of(kind, sliding_window=8, **({"layer_types": types} if types else {}))
  )
  assert (settings["model.window"], settings["model.full_every"]) == window
  written = family.write(with_settings(Config(), {"data.tokenizer": "bytes", **settings}))
  assert ("layer_types" in written) == (types is not None and len(set(types)) == 2)
  back = family.read(written)
  assert (back["model.window"], back["model.full_every"]) == window
  with pytest.raises(ValueError, match=r"layer_types is .*--ignore_fields=layer_types"):
    FAMILIES["mixtral"].read(fields_of("mixtral", layer_types=[SLIDING, FULL]))
