"""The tables of families, without weights."""

import dataclasses

import pytest
from hf_folders import fields_of

from ats_jax.bridge.convert import abstract_parts
from ats_jax.bridge.export import choose_family
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.families.common import read_rope, write_rope
from ats_jax.bridge.family import architecture, match_weights, together
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config

BYTES = {"data.tokenizer": "bytes"}


def config(kind: str, **changes) -> Config:
  read = FAMILIES[kind].read(fields_of(kind, **changes))
  return resolve(with_settings(Config(), BYTES | read), 0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_comes_back_as_it_was(kind):
  cfg = config(kind)
  written = FAMILIES[kind].write(cfg)
  again = resolve(with_settings(Config(), BYTES | FAMILIES[kind].read(written)), 0)
  assert architecture(again) == architecture(cfg)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_array_is_in_one_row_and_every_tensor_in_one_array(kind):
  family = FAMILIES[kind].fitted(flatten(config(kind)))
  planned = match_weights(family, {n: p.shape for n, p in abstract_parts(config(kind)).items()})
  theirs = [name for item, *_ in together(planned) for name in item.theirs]
  assert len(theirs) == len(set(theirs)) > 20
  layers = [int(i.ours.split("/")[1]) for i in planned if i.ours.startswith("layers/")]
  assert layers == sorted(layers)  # a layer at a time


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_is_exported_as_its_own_family(kind):
  assert choose_family(config(kind), kind).model_type == kind


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"mod.routing": "static"}, "mod.routing=static"),
    ({"moe.num_experts": 4, "moe.null_experts": 1}, "moe.null_experts=1"),
    ({"moe.num_experts": 4, "moe.score": "sigmoid"}, "moe.score=sigmoid"),
    ({"model.qk_norm": True, "model.qkv_bias": True}, "model.qkv_bias=True"),
    ({"model.attn_sinks": True}, "gpt_oss: moe.num_experts=0: it has experts"),
    ({"moe.num_experts": 4, "moe.expert_bias": True}, "moe.expert_bias=True"),
  ],
)
def test_what_no_family_has_is_named(changes, words):
  cfg = resolve(with_settings(config("llama"), changes), 0)
  with pytest.raises(ValueError, match=words):
    choose_family(cfg)


@pytest.mark.parametrize(
  "changes",
  [
    {"model.dropout": 0.1, "moe.aux_loss": 0.5, "moe.noise": 1.0},
    {"moe.dispatch": "capacity", "moe.capacity_factor": 2.0},
    {"moe.exchange": "bins", "moe.exchange.factor": 2.0},
  ],
)
def test_what_is_for_training_alone_is_in_the_way_of_no_family(changes):
  cfg = resolve(with_settings(config("mixtral"), changes), 0)
  assert architecture(cfg) == architecture(config("mixtral"))
  assert choose_family(cfg).model_type == "mixtral"


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_of_training_are_passed_over(kind):
  """Those of experts too: the classes of `transformers` write them whatever a model has."""
  fields = {
    "initializer_range": 0.1, "attention_dropout": 0.1, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "aux_loss_alpha": 0.5, "seq_aux": False, "ep_size": 2,
  }  # fmt: skip
  family = FAMILIES[kind]
  assert family.read(fields_of(kind, **fields)) == family.read(fields_of(kind))
  assert family.carried >= fields.keys()


def test_the_first_family_that_fits_is_chosen():
  assert choose_family(config("qwen2")).model_type == "qwen2"
  assert choose_family(config("olmoe")).model_type == "olmoe"
  assert choose_family(config("gpt_oss")).model_type == "gpt_oss"
  with pytest.raises(ValueError, match="no-such is unknown"):
    choose_family(config("llama"), "no-such")


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling is 'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "new": 1}}, "new of rotary"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"hidden_size": "wide"}, "hidden_size is 'wide' in config.json, expected int"),
    ({"rope_scaling": {"rope_type": ["a"]}}, "rope_scaling of config.json cannot be read"),
  ],
)
def test_what_this_program_has_not_is_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    FAMILIES["llama"].read(fields_of("llama", **fields))


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' in config.json, and"),
    ({"attention_bias": False}, "attention_bias is False"),
    ({"num_experts_per_tok": 1}, "top_k must be more"),
    (
      {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
      r"layers \[0, 2\]",
    ),
  ],
)
def test_what_gpt_oss_may_say_and_this_program_has_not(fields, words):
  with pytest.raises(ValueError, match=words):
    FAMILIES["gpt_oss"].read(fields_of("gpt_oss", **fields))


def test_the_published_fields_of_gpt_oss():
  """As the folders of 20B and 120B have them, with copies of fields that nothing reads."""
  scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
             "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip
  fields = fields_of("gpt_oss", rope_theta=150_000, rope_scaling=scaling, swiglu_limit=7.0,
                     experts_per_token=2, initial_context_length=4096, attention_bias=True,
                     quantization_config={"quant_method": "mxfp4"})  # fmt: skip
  assert FAMILIES["gpt_oss"].read(fields) == FAMILIES["gpt_oss"].read(fields_of("gpt_oss"))


def test_older_rotary_fields_mean_the_same():
  old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
  new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
  assert FAMILIES["llama"].read(fields_of("llama", **old)) == FAMILIES["llama"].read(
    fields_of("llama", **new)
  )


@pytest.mark.parametrize(
  "fields",
  [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {
      "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    {
      "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_slow": 2.0, "beta_fast": 16.0,
      "truncate": False, "attention_factor": 1.2, "original_max_position_embeddings": 4096,
    },
  ],
)  # fmt: skip
def test_rotary_fields_come_back(fields):
  cfg = with_settings(Config(), read_rope(fields, None))
  assert write_rope(cfg) == fields


def test_windows_of_other_patterns_are_refused():
  types = ["full_attention", "sliding_attention", "sliding_attention"]
  fields = fields_of("qwen3", layer_types=types, use_sliding_window=True, sliding_window=8)
  with pytest.raises(ValueError, match=r"layers \[0\] of 3 have no sliding window"):
    FAMILIES["qwen3"].read(fields)


def test_a_model_without_a_family_names_its_array():
  cfg = config("qwen2")
  shapes = {n: p.shape for n, p in abstract_parts(cfg).items()}
  with pytest.raises(
    ValueError, match=r"Llama models have nothing like layers/0/attn/./(weight|bias)"
  ):
    match_weights(FAMILIES["llama"], shapes)


def test_dense_layers_beside_experts_keep_their_width():
  cfg = config("qwen3_moe", mlp_only_layers=[0])
  other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_ff=64))
  assert architecture(cfg) != architecture(other)
  all_sparse = config("qwen3_moe")
  other = dataclasses.replace(all_sparse, model=dataclasses.replace(cfg.model, d_ff=64))
  assert architecture(all_sparse) == architecture(other)
