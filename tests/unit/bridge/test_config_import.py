"""`config.json` of Hugging Face: what is taken, listed and refused; `ats-jax config`."""

import json
import re
from pathlib import Path

import jax
import pytest
from helpers import make_decoder
from hf_folders import fields_of
from in_process import printed_by

from ats_jax.bridge import config_import
from ats_jax.bridge.config_report import ConfigReport
from ats_jax.bridge.families import FAMILIES
from ats_jax.config import from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.file import load_file
from ats_jax.config.names import flatten

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


def write(folder: Path, name: str, content: dict | str) -> str:
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(content if isinstance(content, str) else json.dumps(content))
  return str(path)


def read(folder: Path, content: dict) -> ConfigReport:
  """Reads a config.json; its config file builds with the same settings, and no field is lost."""
  file = write(folder, "config.json", content)
  report = config_import.read(file)
  target = write(folder, "mine.py", config_import.config_file_text(report, file, "configs/mine.py"))
  settings = flatten(from_config_dict(load_file(target)))
  assert {name: settings[name] for name in report.settings} == report.settings
  listed = [line.name for line in (*report.taken, *report.same, *report.missing)]
  assert report.values.keys() <= set(listed)
  shown = report.table()
  for name in report.values:
    assert f"\n  {name} = " in shown, name
  for line in report.missing:
    assert f"  {line.name} = " in Path(target).read_text(), line.name
  return report


def missing(report: ConfigReport) -> dict[str, str]:
  return {line.name: line.text for line in report.missing}


def test_a_model_of_hugging_face_is_a_decoder(mesh, tmp_path):
  report = read(tmp_path, LLAMA | {"secret_sauce": 3})
  assert report.settings == {
    "model.vocab_size": 384, "model.num_layers": 2, "model.d_model": 64, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.d_ff": 192, "model.head_dim": 16, "model.norm_eps": 1e-5,
    "model.tie_embeddings": False, "model.init_std": 0.02, "model.rope_theta": 5e5,
    "model.rope_scaling.name": "none", "data.seq_len": 32, "data.bpe_vocab_size": 384,
    "precision.compute_dtype": "float32",
  }  # fmt: skip
  assert missing(report) == {"secret_sauce": "not understood"}
  cfg = resolve(from_config_dict(load_file(str(tmp_path / "mine.py"))), 384)
  shapes = jax.eval_shape(lambda: make_decoder(cfg))
  layer = 3 * 64 * 192 + 64 * (64 + 32 + 32 + 64) + 2 * 64
  assert sum(x.size for x in jax.tree.leaves(shapes)) == 2 * 384 * 64 + 2 * layer + 64


@pytest.mark.parametrize(
  ("values", "settings", "lacks"),
  [
    ({"model_type": "mistral", "sliding_window": None}, {"model.num_kv_heads": 2}, {}),
    ({"model_type": "mistral"}, {"model.window": 4096}, {}),
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
    (
      {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1,
       "sliding_window": 8},
      {"model.window": 0, "model.qk_norm": False, "model.qkv_bias": True},
      {"use_sliding_window": "every n-th"},
    ),
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
      {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
       "num_key_value_heads": None, "aux_loss_alpha": 1e-4, "seq_aux": True},
      {"moe.dense_first": 1, "model.head_dim": 192, "moe.bias_update": "sign",
       "moe.sequence_aux_loss": 1e-4, "moe.aux_loss": 0.0},
      {"num_nextn_predict_layers": "predict further tokens"},
    ),
    (
      {"model_type": "deepseek_v3", "num_key_value_heads": None, "first_k_dense_replace": 1,
       "aux_loss_alpha": 1e-4, "seq_aux": False, "ep_size": 1, "auto_map": {"AutoConfig": "x"},
       "num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "fp8"}},
      {"moe.aux_loss": 1e-4, "moe.sequence_aux_loss": False},
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
      {"model.rope_theta": 5e5, "model.rope_scaling.name": "linear",
       "model.rope_scaling.factor": 8.0},
      {},
    ),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
      {"model.rope_theta": 5e5, "model.rope_scaling.name": "none"},
      {"rope_scaling": "is 'dynamic'"},
    ),
    (
      {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}, "rope_theta": None},
      {"model.rope_theta": 2e4},
      {},
    ),
    ({"torch_dtype": "float16"}, {}, {"torch_dtype": "bfloat16 is used"}),
  ],
)  # fmt: skip
def test_families_of_hugging_face(tmp_path, values, settings, lacks):
  report = read(tmp_path, LLAMA | values)
  assert {name: report.settings.get(name, False) for name in settings} == settings
  assert missing(report).keys() == lacks.keys()
  for name, words in lacks.items():
    assert any(words in line.text for line in report.missing if line.name == name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_read_as_the_bridge_reads_it(tmp_path, kind):
  fields = {
    "rms_norm_eps": 1e-3, "rope_theta": 7e5, "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "attn_logit_softcapping": 20.0 if kind == "gemma2" else None, "query_pre_attn_scalar": 64,
    "layer_types": ["sliding_attention", "full_attention"],
  }  # fmt: skip
  known = {key for row in FAMILIES[kind].fields for key in row.keys}
  own = {"model.init_std", "moe.aux_loss", "moe.sequence_aux_loss", "data.seq_len"}
  own |= {"data.bpe_vocab_size"}
  for values in (
    fields_of(kind),
    fields_of(kind, max_position_embeddings=64, **{k: fields[k] for k in fields.keys() & known}),
  ):
    report, of_bridge = read(tmp_path, values), FAMILIES[kind].read(values)
    assert not report.missing
    assert {name: report.settings[name] for name in of_bridge} == of_bridge
    assert report.settings.keys() - of_bridge.keys() <= own


def test_defaults_and_the_tokenizer_are_taken_and_shown(tmp_path):
  tokenizer = write(tmp_path, "tokenizer.json", "{}")
  report = read(tmp_path, {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"})
  assert report.settings["data.tokenizer"] == tokenizer
  assert report.settings["model.norm_eps"] == 1e-6
  assert [line.name for line in report.defaults] == ["head_dim"]  # of rms_norm_eps they agree
  assert "model.head_dim = 16 (ours: 0)" in report.table()
  # A block that is refused still says its base.
  rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4}
  values = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"rope_parameters": rope}
  report = read(tmp_path, values)
  assert report.settings["model.rope_theta"] == 3e4
  assert missing(report).keys() == {"rope_parameters"}


def test_what_is_wrong_is_said_with_the_file(tmp_path):
  for content, words in (
    ("{", r"is not JSON \(.*\)\. Expected the config\.json of a Hugging Face model\.$"),
    ("[1]", "not an object of names and values"),
    ("[" * 100_000, "nested too deeply"),
    ({"lr": 1}, r"has no model_type \(it has lr\)\. Expected the config\.json"),
    (LLAMA | {"model_type": "gpt2"}, "model_type='gpt2' is not a model that can be"),
    (LLAMA | {"model_type": ["llama"]}, "is not a model that can be"),
    (LLAMA | {"hidden_size": None}, "hidden_size is missing in config.json"),
    (LLAMA | {"vocab_size": [1]}, r"vocab_size is \[1\] .*expected int"),
    (LLAMA | {"num_attention_heads": 0}, "head_dim of config.json cannot be read"),
    (LLAMA | {"model_type": "mistral", "sliding_window": "far"}, "model.window must"),
    (LLAMA | {"num_key_value_heads": 3}, "model.num_kv_heads=3 does not divide"),
    (LLAMA | {"max_position_embeddings": "far"}, "is 'far'; expected a whole number"),
  ):
    file = write(tmp_path, "config.json", content)
    with pytest.raises(ValueError, match=f"^{re.escape(file)}: .*{words}"):
      config_import.read(file)


def test_a_name_in_the_file_cannot_end_the_text_it_is_written_in(tmp_path):
  hostile = {'"""\nraise SystemExit\n"""': '"""\\', "\\N{oops}": 1, "\0": 2}
  file = write(tmp_path, "config.json", LLAMA | hostile)
  source = config_import.config_file_text(config_import.read(file), file, "configs/mine.py")
  assert load_file(write(tmp_path, "mine.py", source)).model.d_model == 64


def test_the_command_writes_a_config_and_no_other_file(tmp_path):
  file, target = write(tmp_path, "config.json", LLAMA), tmp_path / "new" / "mine.py"
  assert "def get_config():" in printed_by("config", "import", file)
  result = printed_by("config", "import", file, f"--to={target}")
  assert "hidden_size = 64" in result and f"wrote {target}" in result
  text = target.read_text()
  with pytest.raises(ValueError, match="there already"):
    printed_by("config", "import", file, f"--to={target}")
  assert target.read_text() == text
  with pytest.raises(ValueError, match=r"ends in \.py"):
    printed_by("config", "import", file, "--to=mine.json")
  shown = printed_by("config", "show", str(target))
  assert "model.d_model = 64 (default 128)" in shown and "num_steps" not in shown
  changed = printed_by("config", "diff", "debug", str(target))
  assert "model.d_model: 128 -> 64 (fixed for a workdir)" in changed
  assert "num_steps" not in changed  # 400 in both
  assert printed_by("config", "diff", "debug", "debug") == "no setting differs\n"
  with pytest.raises(ValueError, match="expected one config and one config, got debug"):
    printed_by("config", "diff", "debug")
