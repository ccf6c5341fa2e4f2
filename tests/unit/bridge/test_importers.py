"""Configs of other trainers: what is taken, what is listed, what is refused; `ats-jax config`."""

import json
import re
from pathlib import Path

import pytest
from commands import forked

from ats_jax.bridge import configs
from ats_jax.bridge.families import FAMILIES
from ats_jax.config import from_config_dict
from ats_jax.config.build import flatten, with_settings
from ats_jax.config.file import load_file
from ats_jax.train.loop import train

LLAMA = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 384,
  "hidden_size": 64,
  "intermediate_size": 192,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-05,
  "rope_theta": 500000.0,
  "max_position_embeddings": 32,
  "hidden_act": "silu",
  "torch_dtype": "float32",
  "use_cache": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

TITAN = """
[job]
description = "a test"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 300
decay_ratio = 0.1
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
context_parallel_degree = 2
pipeline_parallel_degree = 4
[activation_checkpoint]
mode = "full"
[model.telepathy]
range = 3
"""

REGISTRY = '''
from torchtitan.trainer import Trainer
from . import model_registry

raise SystemExit("this file was run")


def debug() -> Trainer.Config:
  """A small one."""
  spec = model_registry("debugmodel")
  return Trainer.Config(
    model_spec=spec,
    optimizer=default_adamw(lr=8e-4),
    training=TrainingConfig(
      num_tokens_per_microbatch_per_dp_rank=8 * 2048, max_context_length=2048, steps=10
    ),
    dataloader=Loader.Config(dataset=DATASETS["c4"]),
    activation_checkpoint=FullAC.Config(),
  )


def longer() -> Trainer.Config:
  config = debug()
  config.training.steps = 20
  config.parallelism.tensor_parallel_degree = 2
  config.model_spec = model_registry("8B")
  return config


def unreadable() -> Trainer.Config:
  config = debug()
  for _ in range(3):
    config.training.steps += 1
  return config


def endless() -> Trainer.Config:
  return endless()
'''

DEEPSPEED = {
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5,
  "steps_per_print": 7,
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": "auto", "weight_decay": 0.05},
  },
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 50, "total_num_steps": 900, "warmup_max_lr": 3e-4},
  },
  "bf16": {"enabled": True},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": True,
    "offload_optimizer": {"device": "cpu"},
  },
  "curriculum_learning": {"enabled": False},
}


def write(folder: Path, name: str, content: dict | str) -> str:
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(content if isinstance(content, str) else json.dumps(content))
  return str(path)


def read(folder: Path, name: str, content: dict | str, function: str = "") -> configs.Found:
  """What a file says; its config file builds and says the same, and no name is lost."""
  file = write(folder, name, content) + (f":{function}" if function else "")
  found = configs.read(file)
  target = write(folder, "mine.py", configs.source(found, file, "configs/mine.py"))
  settings = flatten(from_config_dict(load_file(target)))
  assert {name: settings[name] for name in found.settings} == found.settings
  listed = [line.name for line in (*found.taken, *found.same, *found.missing)]
  assert found.values.keys() <= set(listed)
  shown = configs.table(found)
  for name in found.values:
    assert f"\n  {name} = " in shown, name
  for line in found.missing:
    assert f"  {line.name} = " in Path(target).read_text(), line.name
  return found


def missing(found: configs.Found) -> dict[str, str]:
  return {line.name: line.text for line in found.missing}


def test_a_model_of_hugging_face_trains(tmp_path):
  found = read(tmp_path, "config.json", LLAMA | {"secret_sauce": 3})
  assert found.settings == {
    "model.vocab_size": 384, "model.num_layers": 2, "model.d_model": 64, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.d_ff": 192, "model.head_dim": 16, "model.norm_eps": 1e-5,
    "model.tie_embeddings": False, "model.init_std": 0.02, "model.rope_theta": 5e5,
    "model.rope_scaling": "none", "data.seq_len": 32, "data.bpe_vocab_size": 384,
    "precision.compute_dtype": "float32",
  }  # fmt: skip
  assert missing(found) == {"secret_sauce": "not understood"}
  for i in range(8):
    write(tmp_path, f"text/{i}.txt", f"the quick brown fox number {i} jumps over a lazy dog\n" * 9)
  small = {
    "num_steps": 1, "data.paths": str(tmp_path / "text"), "data.tokenizer": "bytes",
    "data.batch_size": 8, "data.cache_dir": str(tmp_path / "cache"), "log.writers": "",
    "log.progress": False, "sample.max_tokens": 0, "data.validation_fraction": 0.0,
  }  # fmt: skip
  cfg = with_settings(from_config_dict(load_file(str(tmp_path / "mine.py"))), small)
  assert train(cfg, tmp_path / "run").step == 1


def test_the_tokenizer_beside_the_file_is_taken(tmp_path):
  tokenizer = write(tmp_path, "tokenizer.json", "{}")
  assert read(tmp_path, "config.json", LLAMA).settings["data.tokenizer"] == tokenizer


@pytest.mark.parametrize(
  ("values", "settings", "lacks"),
  [
    ({"model_type": "mistral", "sliding_window": None}, {"model.num_kv_heads": 2}, {}),
    ({"model_type": "mistral"}, {"model.window": 4096}, {}),
    ({"model_type": "mistral", "sliding_window": 16}, {"model.window": 16}, {}),
    (
      {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
       "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.1},
      {"moe.num_experts": 4, "moe.top_k": 2, "moe.aux_loss": 0.02, "moe.renormalize": True},
      {"router_jitter_noise": "has only 0.0"},
    ),
    (
      {"model_type": "mixtral", "num_experts_per_tok": 1},
      {"moe.aux_loss": 0.001},
      {"model_type": "top_k must be more"},
    ),
    ({"model_type": "qwen2"}, {"model.qk_norm": False, "model.qkv_bias": True}, {}),
    (
      {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1,
       "sliding_window": 8},
      {"model.window": 0},
      {"use_sliding_window": "every n-th"},
    ),
    (
      {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
      {"model.qk_norm": True, "model.head_dim": 32, "model.tie_embeddings": True},
      {},
    ),
    ({"model_type": "qwen3"}, {"model.head_dim": 128}, {}),
    (
      EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2},
      {"moe.num_experts": 8, "moe.d_ff": 96, "moe.renormalize": True, "moe.every": 2},
      {},
    ),
    (
      EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
      {"moe.renormalize": False, "moe.dense_first": 1},
      {},
    ),
    (EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1]}, {}, {"mlp_only_layers": ""}),
    (
      {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0},
      {"moe.aux_loss": 0.01, "moe.renormalize": False, "model.qk_norm_scope": "all"},
      {"clip_qkv": "has only None"},
    ),
    (
      {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
       "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "v_head_dim": 16,
       "moe_intermediate_size": 32, "routed_scaling_factor": 2.5, "kv_lora_rank": 8,
       "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
       "num_key_value_heads": None, "aux_loss_alpha": 1e-4, "seq_aux": True},
      {"moe.num_groups": 4, "moe.top_groups": 2, "moe.dense_first": 1, "moe.num_shared": 1,
       "moe.route_scale": 2.5, "moe.score": "sigmoid", "model.v_head_dim": 16,
       "model.head_dim": 192, "model.latent_rope_dim": 64, "model.kv_latent_dim": 8,
       "model.q_latent_dim": 1536, "moe.bias_on": "scores", "moe.bias_update": "sign",
       "moe.sequence_aux_loss": 1e-4, "moe.aux_loss": 0.0},
      {"num_nextn_predict_layers": "predict further tokens"},
    ),
    (
      {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
       "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True},
      {"moe.router_bias": True, "moe.renormalize": True, "model.head_dim": 64,
       "model.window": 128, "model.full_every": 2, "model.qkv_bias": True,
       "model.attn_sinks": True, "moe.expert_bias": True, "model.activation": "clamped",
       "model.rope_scaling": "yarn", "model.rope_whole_pairs": False},
      {},
    ),
    (
      {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
      {"model.tie_embeddings": True, "model.head_dim": 256, "model.activation": "gelu_tanh",
       "model.norm_plus_one": True, "model.post_norms": False},
      {},
    ),
    (
      {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
      {"model.rope_theta": 5e5, "model.rope_scaling": "linear", "model.rope_factor": 8.0},
      {},
    ),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
      {"model.rope_theta": 5e5, "model.rope_scaling": "none"},
      {"rope_scaling": "is 'dynamic'"},
    ),
    (
      {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}, "rope_theta": None},
      {"model.rope_theta": 2e4},
      {},
    ),
    ({"rope_scaling": {"rope_type": ["a"]}}, {}, {"rope_scaling": "cannot be read"}),
    ({"attention_bias": True, "attention_dropout": 0.1}, {},
     {"attention_bias": "has only False", "attention_dropout": "has only 0.0"}),
    ({"torch_dtype": "float16"}, {}, {"torch_dtype": "bfloat16 is used"}),
  ],
)  # fmt: skip
def test_families_of_hugging_face(tmp_path, values, settings, lacks):
  found = read(tmp_path, "config.json", LLAMA | values)
  assert {name: found.settings.get(name, False) for name in settings} == settings
  assert missing(found).keys() == lacks.keys()
  for name, words in lacks.items():
    assert any(words in line.text for line in found.missing if line.name == name)


def test_a_block_that_is_refused_still_says_its_base(tmp_path):
  rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4}
  values = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"rope_parameters": rope}
  found = read(tmp_path, "config.json", values)
  assert found.settings["model.rope_theta"] == 3e4 and missing(found).keys() == {"rope_parameters"}


# What a small model of a family needs beside, or does not take.
OF_KIND = {
  "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
  "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 1},
}
MORE_OF_KIND = {
  "deepseek_v2": {"head_dim": 64, "norm_topk_prob": False},
  "deepseek_v3": {"head_dim": 64},
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("more", [False, True])
def test_a_family_is_read_as_the_bridge_reads_it(tmp_path, kind, more):
  sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads")  # fmt: skip
  values = {"model_type": kind} | {name: LLAMA[name] for name in sizes} | OF_KIND.get(kind, {})
  if more:
    scaled = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    fields = EXPERTS | {
      "head_dim": 32, "rms_norm_eps": 1e-3, "rope_theta": 7e5,
      "rope_scaling": scaled, "tie_word_embeddings": True, "norm_topk_prob": True,
      "num_local_experts": 4, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64,
      "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
    } | MORE_OF_KIND.get(kind, {})  # fmt: skip
    known = {key for row in FAMILIES[kind].fields for key in row.keys}
    values |= {k: v for k, v in fields.items() if k in {*known, "max_position_embeddings"}}
  found = read(tmp_path, "config.json", values)
  of_bridge = FAMILIES[kind].read(values)
  assert not found.missing
  assert {name: found.settings[name] for name in of_bridge} == of_bridge
  own = {"model.init_std", "moe.aux_loss", "moe.sequence_aux_loss", "data.seq_len"}
  own |= {"data.bpe_vocab_size"}
  assert found.settings.keys() - of_bridge.keys() <= own


def test_defaults_of_theirs_are_taken_and_shown(tmp_path):
  found = read(tmp_path, "config.json", {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"})
  assert found.settings["model.norm_eps"] == 1e-6
  assert [line.name for line in found.defaults] == ["head_dim"]  # of rms_norm_eps they agree
  found = read(tmp_path, "a.toml", "[model]\nname = 'qwen3'\nflavor = '0.6B'\n[optimizer]\n")
  assert found.settings["optimizer.learning_rate"] == 8e-4
  text = configs.table(found)
  assert "optimizer.lr = 0.0008" in text and "(ours: 0.0003)" in text


def test_torchtitan_toml(tmp_path):
  found = read(tmp_path, "a.toml", TITAN)
  wanted = {
    "model.d_model": 4096, "model.num_layers": 32, "model.d_ff": 14_336,
    "model.vocab_size": 128_256, "model.num_kv_heads": 8, "model.norm_eps": 1e-5,
    "model.rope_scaling": "llama3", "model.rope_factor": 8.0, "model.rope_fast_turns": 4.0,
    "num_steps": 1000, "step.remat": "full", "step.accum_steps": 4, "optimizer.schedule": "wsd",
    "optimizer.learning_rate": 3e-4, "optimizer.decay_fraction": 0.1,
    "optimizer.warmup_steps": 300, "optimizer.final_lr_fraction": 0.0, "data.batch_size": 64,
    "data.seq_len": 8192, "mesh.fsdp": 8, "mesh.tensor": 2, "mesh.context": 2,
  }  # fmt: skip
  assert {name: found.settings[name] for name in wanted} == wanted
  assert missing(found) == {
    "model.telepathy.range": "not understood",
    "parallelism.pipeline_parallel_degree": "there is no pipeline",
  }


def test_a_warm_up_longer_than_the_run_is_cut_as_torchtitan_does(tmp_path):
  found = read(tmp_path, "a.toml", TITAN.replace("steps = 1000", "steps = 100"))
  assert found.settings["optimizer.warmup_steps"] == 100


def test_a_flavor_that_is_not_known_is_said(tmp_path):
  found = read(tmp_path, "a.toml", TITAN.replace("llama3", "flux"))
  assert "Import the model's config.json" in missing(found)["model.flavor"]
  assert "model.d_model" not in found.settings
  assert "config.model is the default one, not flux 8B." in found.notes


def test_a_registry_of_torchtitan_is_read_and_not_run(tmp_path):
  found = read(tmp_path, "llama3/config_registry.py", REGISTRY, "debug")
  assert (found.settings["num_steps"], found.settings["model.d_model"]) == (10, 256)
  assert (found.settings["data.batch_size"], found.settings["step.remat"]) == (8, "full")
  assert "`DATASETS['c4']`" in configs.table(found)
  longer = read(tmp_path, "llama3/config_registry.py", REGISTRY, "longer")
  assert (longer.settings["num_steps"], longer.settings["model.d_model"]) == (20, 4096)
  assert longer.settings["mesh.tensor"] == 2
  other = REGISTRY.replace("default_adamw", "Muon")
  found = read(tmp_path, "llama3/config_registry.py", other, "debug")
  assert missing(found)["optimizer"] == "the optimizer here is AdamW"


@pytest.mark.parametrize(
  ("function", "words"),
  [
    ("", "several functions. Say which after a colon: debug, longer, unreadable, endless"),
    ("debig", "there is no function 'debig'. Say which"),
    ("unreadable", r"line \d+: `for _ in range\(3\):` cannot be read without running it"),
    ("endless", r"line \d+: endless\(\) calls itself"),
  ],
)
def test_a_registry_that_cannot_be_read(tmp_path, function, words):
  file = write(tmp_path, "llama3/config_registry.py", REGISTRY)
  with pytest.raises(ValueError, match=words):
    configs.read(f"{file}:{function}")


def test_deepspeed(tmp_path):
  found = read(tmp_path, "ds.json", DEEPSPEED)
  assert found.settings == {
    "data.batch_size": 64, "step.accum_steps": 2, "optimizer.grad_clip": 0.5, "log.every_steps": 7,
    "optimizer.learning_rate": 3e-4, "optimizer.b1": 0.9, "optimizer.b2": 0.98,
    "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.05, "optimizer.schedule": "linear",
    "optimizer.final_lr_fraction": 0.0, "optimizer.warmup_steps": 50, "num_steps": 900,
    "precision.compute_dtype": "bfloat16",
  }  # fmt: skip
  assert missing(found) == {
    "optimizer.params.eps": "'auto' is filled in by the program that starts DeepSpeed",
    "scheduler.params.warmup_type": "warm-up is linear here",
    "zero_optimization.offload_optimizer.device":
      "nothing is kept in host memory or on a disk during a step",
    "curriculum_learning.enabled": "not understood",
  }  # fmt: skip
  shown = configs.table(found)
  assert "on 8 devices" in shown and "--config.mesh.fsdp=DEVICES" in shown


def test_deepspeed_without_a_batch_of_all_devices_and_in_fp16(tmp_path):
  small = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
           "fp16": {"enabled": True, "loss_scale": 0}}  # fmt: skip
  found = read(tmp_path, "ds.json", small)
  assert (found.settings["data.batch_size"], found.settings["step.accum_steps"]) == (8, 2)
  assert "bfloat16 is used" in missing(found)["fp16.enabled"]
  assert found.settings["optimizer.grad_clip"] == 0.0  # theirs clips nothing unless told to


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("a.json", "{", "is no JSON"),
    ("a.json", "[1]", "no object of names and values"),
    ("a.json", {"lr": 1}, r"of no known format \(it has lr\)\. What can be read: a config\.json"),
    ("a.toml", "x", "is no TOML"),
    ("a.toml", "[tool]\nx = 1", r"of no known format \(it has tool\)"),
    ("a.yaml", "x: 1", r"ends in neither \.json, \.toml nor \.py"),
    ("a.py", "x = 1", "no config registry of torchtitan"),
    ("config.json", LLAMA | {"model_type": "gpt2"}, "model_type='gpt2' is no model that can be"),
    ("config.json", LLAMA | {"model_type": ["llama"]}, "is no model that can be"),
    ("config.json", LLAMA | {"hidden_size": None}, "hidden_size is missing in config.json"),
    (
      "config.json",
      LLAMA | {"hidden_size": "wide"},
      "hidden_size is 'wide' .*expected int",
    ),
    (
      "config.json",
      LLAMA | {"vocab_size": "many"},
      "vocab_size is 'many' .*expected int",
    ),
    (
      "config.json",
      LLAMA | {"vocab_size": [1]},
      r"vocab_size is \[1\] .*expected int",
    ),
    ("config.json", LLAMA | {"num_attention_heads": 0}, "head_dim of config.json cannot be read"),
    (
      "config.json",
      LLAMA | {"model_type": "mistral", "sliding_window": "far"},
      "model.window must",
    ),
    ("config.json", LLAMA | {"num_key_value_heads": 3}, "model.num_kv_heads=3 does not divide"),
    ("config.json", LLAMA | {"max_position_embeddings": "far"}, "is no value for data.seq_len"),
    ("ds.json", {"train_batch_size": "many"}, "train_batch_size='many' is no whole number"),
    ("ds.json", {"train_batch_size": 0}, "train_batch_size=0 is below 1"),
    ("a.toml", TITAN.replace("8192", "'long'"), "training.seq_len='long' is no whole number"),
    ("a.toml", TITAN.replace("lr = 3e-4", "lr = 'hot'"), "is no value for optimizer.learning_rate"),
  ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path, name, content, words):
  file = write(tmp_path, name, content)
  with pytest.raises(ValueError, match=f"^{re.escape(file)}: .*{words}"):
    configs.read(file)


def test_a_name_in_the_file_cannot_end_the_text_it_is_written_in(tmp_path):
  hostile = {'"""\nraise SystemExit\n"""': '"""\\', "\\N{oops}": 1, "\0": 2}
  file = write(tmp_path, "config.json", LLAMA | hostile)
  source = configs.source(configs.read(file), file, "configs/mine.py")
  assert load_file(write(tmp_path, "mine.py", source)).model.d_model == 64


def test_the_command_writes_a_config_and_no_other_file(tmp_path):
  file, target = write(tmp_path, "config.json", LLAMA), tmp_path / "new" / "mine.py"
  printed = forked("ats_jax", "config", "import", file)
  assert printed.code == 0 and "def get_config():" in printed.out
  result = forked("ats_jax", "config", "import", file, f"--to={target}")
  assert result.code == 0, result.err
  assert "hidden_size = 64" in result.out and f"wrote {target}" in result.out
  text = target.read_text()
  assert "there already" in forked("ats_jax", "config", "import", file, f"--to={target}").error()
  assert target.read_text() == text
  assert "ends in .py" in forked("ats_jax", "config", "import", file, "--to=mine.json").error()
  shown = forked("ats_jax", "config", "show", str(target)).out
  assert "model.d_model = 64 (default 128)" in shown and "num_steps" not in shown
  changed = forked("ats_jax", "config", "diff", "debug", str(target)).out
  assert "model.d_model: 128 -> 64 (fixed for a workdir)" in changed
  assert "num_steps" not in changed  # 400 in both
  assert forked("ats_jax", "config", "diff", "debug", "debug").out == "no setting differs\n"
  assert (
    "expected one config and one config, got debug"
    in forked("ats_jax", "config", "diff", "debug").error()
  )
