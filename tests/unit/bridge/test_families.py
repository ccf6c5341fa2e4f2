"""The tables of families, without folders."""

import dataclasses

import numpy as np
import pytest
from hf_folders import fields_of, shapes_of

from ats_jax.bridge.export import choose_family, obstacle
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.families.common import read_rope, write_rope
from ats_jax.bridge.family import (
  OwnWeight,
  architecture,
  match_weights,
  to_ours,
  to_theirs,
  together,
)
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config

BYTES = {"data.tokenizer": "bytes"}


def config(kind: str, **changes) -> Config:
  read = FAMILIES[kind].read(fields_of(kind, **changes))
  return resolve(with_settings(Config(), BYTES | read), 0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_comes_back_as_it_was(kind):
  cfg, family = config(kind), FAMILIES[kind]
  again = resolve(with_settings(Config(), BYTES | family.read(family.write(cfg))), 0)
  assert architecture(again) == architecture(cfg)
  assert choose_family(cfg, kind).model_type == kind
  # Fields of training change nothing. The classes of `transformers` write those of experts too.
  fields = {
    "initializer_range": 0.1, "attention_dropout": 0.1, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "aux_loss_alpha": 0.5, "seq_aux": False, "ep_size": 2,
  }  # fmt: skip
  assert family.read(fields_of(kind, **fields)) == family.read(fields_of(kind))
  assert family.carried >= fields.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_array_comes_back_from_its_tensors(kind):
  cfg, rng = config(kind), np.random.default_rng(0)
  planned = match_weights(FAMILIES[kind].fitted(flatten(cfg)), shapes_of(cfg))
  arrays = {
    item.ours: item.row.value(item.shape)
    if isinstance(item.row, OwnWeight)
    else rng.normal(size=item.shape)
    for item in planned
  }
  read = lambda item: arrays[item.ours]
  tensors = [pair for group in together(planned) for pair in to_theirs(group, read)]
  theirs = dict(tensors)
  assert len(theirs) == len(tensors) > 15
  for item in planned:
    got = to_ours(item, theirs.__getitem__, np.dtype(np.float64))
    np.testing.assert_array_equal(got, arrays[item.ours], err_msg=item.ours)
    assert all(theirs[name].shape == item.their_shape for name in item.theirs)
  layers = [int(i.ours.split("/")[1]) for i in planned if i.ours.startswith("layers/")]
  assert layers == sorted(layers)  # a layer at a time


def test_what_no_family_has_is_named():
  for changes, words in (
    ({"mod.routing": "static"}, "mod.routing=static"),
    ({"moe.num_experts": 4, "moe.null_experts": 1}, "moe.null_experts=1"),
    ({"moe.num_experts": 4, "moe.score": "sigmoid"}, "moe.score=sigmoid"),
    ({"model.qk_norm": True, "model.qkv_bias": True}, "qwen2 lacks: model.qk_norm=True"),
    ({"model.attn_sinks": True}, "llama lacks: model.attn_sinks=True.* or more: .*gpt_oss"),
    ({"moe.num_experts": 4, "moe.expert_bias": True}, "moe.expert_bias=True"),
  ):
    cfg = resolve(with_settings(config("llama"), changes), 0)
    with pytest.raises(ValueError, match=words):
      choose_family(cfg)
  with pytest.raises(
    ValueError, match=r"Llama models have nothing like layers/0/attn/./(weight|bias)"
  ):
    match_weights(FAMILIES["llama"], shapes_of(config("qwen2")))


def test_the_nearest_family_is_named_in_one_line():
  changes = {"moe.num_experts": 4, "moe.expert_bias": True, "moe.score": "sigmoid"}
  with pytest.raises(ValueError) as found:
    choose_family(resolve(with_settings(config("llama"), changes), 0))
  message = str(found.value)
  assert "\n" not in message and len(message) < 700
  nearest, rest = message.split(" lacks: ", 1)
  assert nearest.rsplit(" ", 1)[1] in FAMILIES and "--family=ats_jax" in rest


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"moe.bias_update": "none", "moe.route_scale": 1.0}, ""),
    ({"moe.bias_update": "sign", "moe.route_scale": 1.0}, "moe.bias_update=sign trains it"),
    ({"moe.bias_update": "sign"}, r"glm4_moe has one, and lacks moe.score=softmax"),
    ({"moe.score": "sigmoid", "moe.bias_on": "scores", "moe.bias_update": "proportional"}, ""),
    (
      {"moe.score": "sigmoid", "moe.bias_on": "scores", "model.window": 8},
      "glm4_moe is nearest, and lacks model.window=8",
    ),
  ],
)
def test_a_run_says_at_its_start_what_will_be_in_the_way_of_an_export(changes, words):
  cfg = resolve(with_settings(config("mixtral"), changes), 0)
  found = obstacle(cfg)
  assert words in found and bool(words) == bool(found)


def test_a_bias_that_all_experts_share_is_in_nobodys_way():
  item = match_weights(FAMILIES["mixtral"], shapes_of(config("mixtral")))
  (bias, *_) = [i for i in item if i.ours.endswith("bias_E")]
  assert list(to_theirs([bias], lambda item: np.full(item.shape, 0.25, np.float32))) == []
  uneven = np.full(bias.shape, 0.25, np.float32)
  uneven[..., 0] = 0.5
  with pytest.raises(ValueError, match="bias_update=none"):
    list(to_theirs([bias], lambda item: uneven))


def test_the_first_family_that_fits_is_chosen():
  for kind in ("qwen2", "olmoe", "gpt_oss"):
    assert choose_family(config(kind)).model_type == kind
  # Of those that fit, that of the import.
  plain = config("mistral", sliding_window=None)
  for imported, chosen in (("", "llama"), ("mistral", "mistral"), ("qwen2", "llama")):
    assert choose_family(plain, imported=imported).model_type == chosen
  with pytest.raises(ValueError, match="no-such is unknown"):
    choose_family(config("llama"), "no-such")
  # What is for training alone is in the way of no family.
  for changes in (
    {"model.dropout": 0.1, "moe.aux_loss": 0.5, "moe.noise": 1.0},
    {"moe.dispatch": "capacity", "moe.capacity_factor": 2.0},
    {"moe.exchange": "hierarchical", "moe.exchange.factor": 2.0},
  ):
    cfg = resolve(with_settings(config("mixtral"), changes), 0)
    assert choose_family(cfg).model_type == "mixtral"


@pytest.mark.parametrize(
  ("kind", "fields", "words"),
  [
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling is 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "new": 1}}, "new of rotary"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' in config"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False"),
    (
      "gpt_oss",
      {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
      r"layers \[0, 2\]",
    ),
    (
      "qwen3",
      {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 8,
      },
      r"layers \[0\] of 3 have no sliding window",
    ),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2 in config.json; 4 follo"),
    ("deepseek_v3", {"qk_head_dim": 20}, "qk_head_dim is 20 in config.json; 18 follows"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
  ],
)
def test_what_this_program_has_not_is_refused(kind, fields, words):
  with pytest.raises(ValueError, match=words):
    FAMILIES[kind].read(fields_of(kind, num_hidden_layers=3, **fields))


def test_the_published_fields_of_gpt_oss():
  """As the folders of 20B and 120B have them, with copies of fields that nothing reads."""
  scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
             "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip
  fields = fields_of("gpt_oss", rope_theta=150_000, rope_scaling=scaling, swiglu_limit=7.0,
                     experts_per_token=2, initial_context_length=4096, attention_bias=True,
                     quantization_config={"quant_method": "mxfp4"})  # fmt: skip
  assert FAMILIES["gpt_oss"].read(fields) == FAMILIES["gpt_oss"].read(fields_of("gpt_oss"))


def test_rotary_fields_come_back():
  for fields in (
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
  ):  # fmt: skip
    assert write_rope(with_settings(Config(), read_rope(fields, None))) == fields
  old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
  new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
  older, newer = (FAMILIES["llama"].read(fields_of("llama", **fields)) for fields in (old, new))
  assert older == newer


def test_dense_layers_beside_experts_keep_their_width():
  for dense_layers in ([0], []):
    cfg = config("qwen3_moe", mlp_only_layers=dense_layers)
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_ff=64))
    assert (architecture(cfg) != architecture(other)) == bool(dense_layers)
