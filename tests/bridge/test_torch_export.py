"""Our own format: a folder that JAX, PyTorch and `transformers` read, and what it refuses."""

import ast
import json
import subprocess
import sys

import hf_gate
import jax
import numpy as np
import pytest
import torch
import torch_cases
import transformers
from helpers import make_test_mesh, tiny_config

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.families import KNOWN
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.parity import our_greedy, our_logits, reference
from ats_jax.pytorch import remote_code, weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.settings import settings_of
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),
]


def folder_of(path, name):
  """A folder as an export writes it, of a model of PyTorch's."""
  cfg, _, theirs = torch_cases.both(name)
  path.mkdir()
  weights.save(theirs, path / "model.safetensors")
  fields = KNOWN["ats_jax"].write(cfg)
  (path / "config.json").write_text(json.dumps(fields))
  return path


# What no family of Hugging Face's has, and what changes the names of arrays.
@pytest.fixture(scope="module", params=["hybrid", "moe-null"])
def exported(request, tmp_path_factory):
  """A folder that was imported as a run and exported from that, and transformers' model of it."""
  root = tmp_path_factory.mktemp("own")
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    folder_of(root / "first", request.param)
  import_folder(root / "first", parse(root / "run"), tokenizer="bytes")
  report = export(parse(root / "run"), root / "out", family="ats_jax")
  assert report["family"] == "ats_jax"
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    root / "out", trust_remote_code=True, local_files_only=True
  ).eval()
  assert type(theirs).__module__.endswith(remote_code.MODULE)
  theirs.generation_config.eos_token_id = None  # ours goes on behind it too
  return root, theirs


def greedy(model, prompt, count, **more):
  found = model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0, **more)
  return found[:, prompt.shape[1] :].numpy()


# Prints tokens. The files of the package that it needs import no jax.
IN_TORCH = """
import sys
sys.modules["jax"] = sys.modules["flax"] = None
import json, torch
from ats_jax.pytorch import generation, weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.settings import settings_of
folder, prompt = sys.argv[1], json.loads(sys.argv[2])
fields = json.load(open(f"{folder}/config.json"))
model = Decoder(settings_of(fields["settings"]))
weights.load(model, f"{folder}/model.safetensors")
print(generation.generate(model.eval(), torch.tensor(prompt), 12).tolist())
"""


def test_all_three_compute_the_same_and_generate_the_same(exported):
  root, theirs = exported
  first, source = open_model_folder(root / "first"), open_model_folder(root / "out")
  assert first.settings == source.settings and first.tensors.keys() == source.tensors.keys()
  for name, tensor in first.tensors.items():
    np.testing.assert_array_equal(tensor.read(), source.tensors[name].read(), err_msg=name)

  cfg = hf_gate.settings(source)
  ours, rules = hf_gate.imported(source, cfg), hf_gate.rules(cfg)
  tokens = np.random.default_rng(3).integers(0, cfg.model.vocab_size, (2, 20))
  prompt = tokens[:, :8]
  want, tokens_of_ours = our_logits(ours, rules, tokens), our_greedy(ours, rules, prompt, 12)
  with torch.no_grad():
    got = theirs(torch.tensor(tokens)).logits.numpy()
  np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
  np.testing.assert_array_equal(greedy(theirs, torch.tensor(prompt), 12), tokens_of_ours)
  # `bridge verify` computes it in float64 too.
  found = reference(root / "out", seq_len=20)
  assert found.error(our_logits(ours, rules, found.tokens_BT)) <= found.bound

  command = [sys.executable, "-c", IN_TORCH, f"{root}/out", json.dumps(prompt.tolist())]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
  assert done.returncode == 0, done.stderr
  np.testing.assert_array_equal(json.loads(done.stdout), tokens_of_ours)


def test_padding_in_front_changes_nothing(exported):
  root, theirs = exported
  if open_model_folder(root / "out").settings["mod.routing"] != "none":
    pytest.skip("a padded row has more places")
  prompt = torch.tensor(np.random.default_rng(4).integers(0, 60, (1, 7)))
  padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
  mask = (torch.arange(11) >= 4).long()[None]
  behind = greedy(theirs, padded, 6, attention_mask=mask)
  np.testing.assert_array_equal(behind, greedy(theirs, prompt, 6))


def test_what_a_folder_of_another_version_says_is_named(tmp_path):
  folder = folder_of(tmp_path / "first", "dense")
  fields = json.loads((folder / "config.json").read_text())
  Decoder(settings_of(fields["settings"]))
  del fields["settings"]["model"]["window"]
  (folder / "config.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=r"another version.*model\.window"):
    open_model_folder(folder)
  with pytest.raises(ValueError, match=r"mod\.routing=random"):
    Decoder(tiny_config({"mod.routing": "random"}))


def test_the_parts_of_the_module_share_no_name():
  found = []
  for node in ast.parse(remote_code.source()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.append(node.name)
    elif isinstance(node, ast.Assign):
      found += [target.id for target in node.targets]
  assert sorted(found) == sorted(set(found))
  assert {"Decoder", "Router", "AtsJaxForCausalLM"} <= set(found)
