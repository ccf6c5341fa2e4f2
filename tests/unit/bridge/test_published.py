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
from ats_jax.bridge.family import WRITTEN
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
# Copies of other fields, and what an export has not.
NOT_WRITTEN = {"sliding_window_size", "experts_per_token", "initial_context_length",
               "sliding_window_pattern", "auto_map", "quantization_config"}  # fmt: skip


def test_every_family_is_there():
  assert MEANS.keys() == PUBLISHED.keys()
  kinds = {fields["model_type"] for fields in PUBLISHED.values()}
  assert kinds == FAMILIES.keys() - {"glm4_moe"}, "published ones rotate half of a head"


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
  # In the same words, but for layers that an export has not.
  written = family.write_again(cfg, fields)
  differing = {k for k in written.keys() & fields.keys() if written[k] != fields[k]}
  assert differing <= {"num_nextn_predict_layers"}
  lost = {k for k in fields.keys() - written.keys() - WRITTEN if fields[k] is not None}
  assert lost <= NOT_WRITTEN | {k for k in fields if k.startswith(("_", "unsloth"))}
  # A run from scratch leaves nothing out but what trains nothing here.
  (tmp_path / "config.json").write_text(json.dumps(fields))
  report = config_import.read(str(tmp_path / "config.json"))
  assert {entry.name for entry in report.missing} <= {"num_nextn_predict_layers", "torch_dtype"}


def test_a_published_glm_lacks_a_whole_rotation_alone():
  """As the config.json of GLM-4.5-Air, written down from memory."""
  fields = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
    "attention_dropout": 0.0, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "topk_group": 1,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
  }  # fmt: skip
  family = FAMILIES["glm4_moe"]
  with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.5 .*rotates all of a head"):
    family.read(fields)
  read = family.read({**fields, "partial_rotary_factor": 1.0})
  assert read.items() >= {"model.qkv_bias": True, "moe.bias_on": "scores", "moe.top_k": 8}.items()
  del fields["partial_rotary_factor"]
  with pytest.raises(ValueError, match=r"0\.5 where it is missing"):
    family.read(fields)
  in_block = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
  assert family.read({**fields, "rope_parameters": in_block}) == read


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
    ("glm4_moe", {"first_k_dense_replace": 2}),
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
