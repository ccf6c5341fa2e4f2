"""`bridge verify`: right models pass whatever their logits, and each wrong one is noticed."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import hf_gate
import hf_models
import jax
import numpy as np
import pytest
import torch
import torch_cases
from helpers import make_test_mesh
from in_process import printed_by

from ats_jax.bridge import parity
from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.families import KNOWN
from ats_jax.bridge.folder import open_model_folder
from ats_jax.config.build import with_settings
from ats_jax.pytorch import remote_code, weights
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),  # those of torch and transformers are not ours
]

SQUARE = "llama-tied-linear"  # its queries, keys, values and outputs are as wide as the model
YARN, LLAMA3 = "qwen3-odd-yarn", "llama-odd-llama3"
SCALING = "model.rope_scaling"


@dataclasses.dataclass(frozen=True)
class Changed:
  """A tensor of a folder that reads as another array."""

  own: Any
  read: Callable[[], np.ndarray]

  def __getattr__(self, name):
    return getattr(self.own, name)


def edited(part, change):
  """All tensors with a part in their name, changed."""

  def edit(tensors):
    found = {name: tensor for name, tensor in tensors.items() if part in name}
    assert found
    return {
      name: Changed(tensor, lambda tensor=tensor: np.array(change(tensor.read()), np.float32))
      for name, tensor in found.items()
    }

  return edit


def swapped(one, other):
  """Tensors that change their names."""

  def swap(tensors):
    partner = lambda name: name.replace(one, other) if one in name else name.replace(other, one)
    found = {name: tensors[partner(name)] for name in tensors if one in name or other in name}
    assert found
    return found

  return swap


def in_turns(keys):
  """Halves of each head's outputs take turns, as other programs rotate them."""
  return keys.reshape(4, 2, 6, -1).swapaxes(1, 2).reshape(keys.shape)


zeros, transposed, next_one = np.zeros_like, np.transpose, lambda a: np.roll(a, 1, axis=0)
WRONG_SETTINGS = [
  ("mistral-window", {"model.window": 19}),
  ("mistral-window", {"model.window": 21}),
  ("mistral-window", {"model.window": 0}),
  ("gpt_oss-odd", {"model.full_every": 2}),  # the windows of two layers swapped
  ("gemma3", {"model.full_every": 0}),
  ("gemma3", {"model.window_rope_theta": 51.0}),
  ("gemma3", {"model.window_rope_theta": 300.0, "model.rope_theta": 50.0}),
  ("llama", {"model.rope_theta": 303.0}),
  ("llama", {"model.norm_eps": 0.0202}),
  ("llama", {"model.attn_scale": 1.01 * 12**-0.5}),
  ("llama", {"model.activation": "gelu_tanh"}),
  (SQUARE, {f"{SCALING}.factor": 3.03}),
  (LLAMA3, {f"{SCALING}.factor": 1.0}),
  (LLAMA3, {f"{SCALING}.factor": 4.04}),
  (LLAMA3, {f"{SCALING}.slow_turns": 1.01}),
  (LLAMA3, {f"{SCALING}.fast_turns": 4.04}),
  (LLAMA3, {f"{SCALING}.original_len": 33}),
  (YARN, {f"{SCALING}.concentration": 1.301}),
  (YARN, {f"{SCALING}.fast_turns": 2.02}),
  (YARN, {f"{SCALING}.slow_turns": 0.2525}),
  (YARN, {f"{SCALING}.original_len": 33}),
  (YARN, {f"{SCALING}.whole_pairs": True}),
  ("gemma2", {"model.attn_scale": 1.01 * 20**-0.5}),
  ("gemma2", {"model.attn_soft_cap": 8.08}),
  ("gemma2", {"model.logit_soft_cap": 6.06}),
  ("gemma2", {"model.logit_soft_cap": 0.0}),
  ("gemma2", {"model.scale_embeddings": False}),
  ("gemma2", {"model.norm_plus_one": False}),
  ("gemma2", {"model.activation": "silu"}),
  ("qwen3_moe", {"moe.renormalize": False}),
  ("qwen3_moe", {"moe.top_k": 2}),
  ("qwen3_moe", {"moe.top_k": 4}),
  ("deepseek_v3", {"moe.bias_on": "logits"}),
  ("glm4_moe", {"moe.bias_on": "logits"}),
  ("deepseek_v3", {"moe.route_scale": 1.515}),
  ("deepseek_v3", {"moe.score": "softmax"}),
  ("deepseek_v3", {"moe.top_groups": 3}),
  ("gpt_oss", {"model.gate_slope": 1.72}),
  ("gpt_oss", {"model.gate_limit": 0.909}),
]
WRONG_WEIGHTS = [
  (SQUARE, "q", edited("q_proj", transposed)),
  (SQUARE, "k", edited("k_proj", transposed)),
  (SQUARE, "v", edited("v_proj", transposed)),
  (SQUARE, "o", edited("o_proj", transposed)),
  (SQUARE, "heads", edited("q_proj", lambda a: np.roll(a, 12, axis=0))),
  (SQUARE, "pairs", edited("k_proj", in_turns)),
  ("llama", "gate and up", swapped("gate_proj", "up_proj")),
  ("llama", "layers", swapped("layers.0.", "layers.1.")),
  ("llama", "norms", swapped("input_layernorm", "post_attention_layernorm")),
  ("llama", "norm plus one", edited("model.norm.weight", lambda a: a + 1)),
  ("llama", "tied head", lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"]}),
  ("llama", "rows of the table", edited("embed_tokens", next_one)),
  ("gemma2", "norm minus one", edited("input_layernorm", lambda a: a - 1)),
  ("gemma2", "post-norms", swapped("post_attention_layernorm", "post_feedforward_layernorm")),
  ("qwen2", "bias of queries", edited("q_proj.bias", zeros)),
  ("qwen2", "bias of keys", edited("k_proj.bias", lambda a: 1.01 * a)),
  ("qwen2", "bias of values", edited("v_proj.bias", zeros)),
  (YARN, "norms of queries and keys", swapped("q_norm", "k_norm")),
  (YARN, "norm of keys", edited("k_norm", lambda a: 0.999 * a)),
  ("qwen3_moe", "experts", swapped("experts.0.", "experts.1.")),
  ("qwen3_moe", "router", edited("mlp.gate.weight", next_one)),
  ("deepseek_v3", "shared expert", edited("shared_experts.down_proj", lambda a: 1.01 * a)),
  ("deepseek_v3", "selection bias", edited("e_score_correction_bias", zeros)),
  ("glm4_moe", "selection bias", edited("e_score_correction_bias", zeros)),
  ("gpt_oss", "sinks", edited("sinks", zeros)),
  ("gpt_oss", "bias of outputs", edited("o_proj.bias", zeros)),
]
RIGHT = sorted({case for case, *_ in WRONG_SETTINGS + WRONG_WEIGHTS})


def verified(source, theirs, dtype="float32"):
  """The error of a model, and its bound."""
  cfg = with_settings(hf_gate.settings(source), {"precision.compute_dtype": dtype})
  ours = parity.our_logits(
    hf_gate.imported(source, cfg), hf_gate.rules(cfg), theirs.tokens_BT, theirs.positions_P
  )
  return theirs.error(ours), theirs.bound


def with_settings_of(source, changes):
  return dataclasses.replace(source, settings={**source.settings, **changes})


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_model_passes_with_room(case, cases):
  error, bound = verified(*cases(case))
  assert error <= 0.6 * bound


@pytest.mark.parametrize(("case", "changes"), WRONG_SETTINGS, ids=str)
def test_a_wrong_setting_is_noticed(case, changes, cases):
  source, theirs = cases(case)
  error, bound = verified(with_settings_of(source, changes), theirs)
  assert error > 2 * bound


@pytest.mark.parametrize(
  ("case", "what", "change"),
  WRONG_WEIGHTS,
  ids=[f"{case}-{what}" for case, what, _ in WRONG_WEIGHTS],
)
def test_a_wrong_weight_is_noticed(case, what, change, cases):
  source, theirs = cases(case)
  wrong = dataclasses.replace(source, tensors={**source.tensors, **change(source.tensors)})
  error, bound = verified(wrong, theirs)
  assert error > 2 * bound, what


@pytest.mark.parametrize("scale", [1e-3, 4.0])  # logits to 0.01 and to 40
def test_the_bound_follows_the_logits(scale, tmp_path):
  model = hf_models.make("llama")
  with torch.no_grad():
    model.lm_head.weight.mul_(scale)
  source = open_model_folder(hf_models.save(model, tmp_path / "hf"))
  theirs = parity.reference(tmp_path / "hf", seq_len=parity.SHORTEST)
  assert np.max(np.abs(theirs.logits_BPV)) == pytest.approx(10 * scale, rel=0.1)
  error, bound = verified(source, theirs)
  assert error <= 0.6 * bound
  error, bound = verified(with_settings_of(source, {"model.norm_eps": 0.0202}), theirs)
  assert error > 2 * bound


def test_bfloat16_is_compared_by_its_own_rounding(tmp_path):
  source = open_model_folder(hf_models.save(hf_models.make("qwen3"), tmp_path / "hf"))
  theirs = parity.reference(tmp_path / "hf", seq_len=parity.SHORTEST, dtype="bfloat16")
  error, bound = verified(source, theirs, "bfloat16")
  assert error <= 0.6 * bound and bound > 0.01
  wrong = with_settings_of(source, {"model.rope_theta": 450.0})
  error, bound = verified(wrong, theirs, "bfloat16")
  assert error > bound


def test_an_activation_that_no_setting_has(cases, tmp_path):
  """GELU as it is defined, beside its approximation by tanh."""
  source, _ = cases("gemma2")
  model = hf_models.make("gemma2", hidden_activation="gelu")
  hf_models.save(model, tmp_path / "hf")
  error, bound = verified(source, parity.reference(tmp_path / "hf", seq_len=hf_models.SEQ_LEN))
  assert error > bound


LONG_LLAMA3 = {**hf_models.LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 512}


# What rows of 128 tokens cannot show, or hardly.
@pytest.mark.parametrize(
  ("case", "fields", "length", "wrong"),
  [
    ("mistral-window", {"sliding_window": 160}, 224, {"model.window": 0}),
    ("mistral-window", {"sliding_window": 160}, 224, {"model.window": 161}),
    ("gpt_oss", {"sliding_window": 128}, 192, {"model.window": 0, "model.full_every": 0}),
    ("llama", {"rope_parameters": LONG_LLAMA3}, 576, {f"{SCALING}.factor": 1.0}),
    ("llama", {"rope_parameters": LONG_LLAMA3}, 576, {f"{SCALING}.slow_turns": 1.01}),
  ],
  ids=str,
)
def test_rows_go_past_windows_and_contexts(case, fields, length, wrong, tmp_path):
  """Whichever of the two has one."""
  folder = hf_models.save(hf_models.make(case, **fields), tmp_path / "hf")
  source = open_model_folder(folder)
  ours = [hf_gate.settings(s) for s in (source, with_settings_of(source, wrong))]
  points = [parity.turning_points(cfg, folder) for cfg in ours]
  assert all(parity.row_length(of_one) >= length for of_one in points)
  theirs = parity.reference(folder, seq_len=length)
  error, bound = verified(source, theirs)
  assert error <= 0.6 * bound
  error, bound = verified(with_settings_of(source, wrong), theirs)
  assert error > 2 * bound


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
  """A run, and its export in our own format."""
  root = tmp_path_factory.mktemp("own")
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    cfg, _, model = torch_cases.both("windows")
  (root / "first").mkdir()
  weights.save(model, root / "first/model.safetensors")
  (root / "first/config.json").write_text(json.dumps(KNOWN["ats_jax"].write(cfg)))
  import_folder(root / "first", parse(root / "run"), tokenizer="bytes")
  export(parse(root / "run"), root / "out", family="ats_jax")
  return root


def test_the_command_verifies_our_own_format(own_folder):
  run, folder = own_folder / "run", own_folder / "out"
  report = printed_by("bridge", "verify", f"--workdir={run}", f"--folder={folder}")
  assert "rows of 128 random tokens" in report
  assert re.search(r"bound \d.*\n.*\ngreedy tokens: (\d+) of \1 equal", report)
  assert "the same model in float32" in report and "NOT" not in report


def test_the_command_says_what_differs_and_what_is_not_compared(own_folder, tmp_path):
  folder = shutil.copytree(own_folder / "out", tmp_path / "out")
  fields = json.loads((folder / "config.json").read_text())
  fields["settings"]["model"]["norm_eps"] = 0.01
  (folder / "config.json").write_text(json.dumps(fields))
  report = printed_by(
    "bridge", "verify", f"--workdir={own_folder}/run", f"--folder={folder}", "--seq_len=5"
  )
  assert "NOT compared: model.window=5 is past the end of rows of 5 tokens" in report
  assert "NOT the same model in float32" in report


RUNS = "import pathlib; pathlib.Path({!r}).touch()\n"


@pytest.fixture
def mark(tmp_path):
  """A file that code of a folder would make."""
  path = tmp_path / "was_run"
  yield path
  assert not path.exists()


def test_code_beside_the_module_is_not_run(own_folder, tmp_path, mark):
  """`trust_remote_code` would run it."""
  folder = shutil.copytree(own_folder / "out", tmp_path / "out")
  (folder / "custom_generate").mkdir()
  (folder / "custom_generate/generate.py").write_text(RUNS.format(str(mark)))
  theirs = parity.reference(folder, seq_len=70)
  assert theirs.greedy_BT.shape == (2, 64)


@pytest.mark.parametrize("what", ["module", "other module", "other owner", "no module"])
def test_another_module_is_refused(what, own_folder, tmp_path, mark):
  folder = shutil.copytree(own_folder / "out", tmp_path / "out")
  module = folder / f"{remote_code.MODULE}.py"
  fields = json.loads((folder / "config.json").read_text())
  if what == "no module":
    module.unlink()
  elif what == "module":
    module.write_text(module.read_text() + RUNS.format(str(mark)))
  else:
    name = "other" if what == "other module" else f"somebody/else--{remote_code.MODULE}"
    (folder / "other.py").write_text(RUNS.format(str(mark)))
    fields["auto_map"]["AutoConfig"] = f"{name}.AtsJaxConfig"
    (folder / "config.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=r"the code of a folder is not run here\. Export the run"):
    parity.reference(folder, seq_len=8)


def test_a_module_of_a_known_family_is_not_run(cases, tmp_path, mark):
  source, theirs = cases("llama")
  folder = shutil.copytree(source.folder, tmp_path / "hf")
  fields = {**source.fields, "auto_map": {"AutoModelForCausalLM": "other.LlamaForCausalLM"}}
  (folder / "config.json").write_text(json.dumps(fields))
  (folder / "other.py").write_text(RUNS.format(str(mark)))
  again = parity.reference(folder, seq_len=hf_models.SEQ_LEN)
  np.testing.assert_array_equal(again.logits_BPV, theirs.logits_BPV)
