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
from ats_jax.bridge.parity import our_greedy, our_logits
from ats_jax.pytorch import remote_code, weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.generation import generate
from ats_jax.pytorch.settings import settings_of
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),
]
# What no family of Hugging Face's has, and what changes the names of arrays.
NAMES = ("hybrid", "moe-null", "dense-all-options", "latent")


def folder_of(path, name):
  """A folder as an export writes it, of a model of PyTorch's."""
  cfg, _, theirs = torch_cases.both(name)
  path.mkdir()
  weights.save(theirs, path / "model.safetensors")
  fields = KNOWN["ats_jax"].write(cfg)
  (path / "config.json").write_text(json.dumps(fields))
  return cfg, theirs, path


@pytest.fixture(scope="module", params=NAMES)
def exported(request, tmp_path_factory):
  """The name of a case, and its folder: imported as a run, and exported from that."""
  root = tmp_path_factory.mktemp("own")
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    folder_of(root / "first", request.param)
  import_folder(root / "first", parse(root / "run"), tokenizer="bytes")
  report = export(parse(root / "run"), root / "out", family="ats_jax")
  assert report["family"] == "ats_jax"
  return request.param, root


def test_an_export_is_what_was_imported(exported):
  _, root = exported
  one, other = open_model_folder(root / "first"), open_model_folder(root / "out")
  assert one.tensors.keys() == other.tensors.keys()
  for name, tensor in one.tensors.items():
    np.testing.assert_array_equal(tensor.read(), other.tensors[name].read(), err_msg=name)
  assert one.settings == other.settings


def test_all_three_compute_the_same_and_generate_the_same(exported):
  name, root = exported
  source = open_model_folder(root / "out")
  cfg = hf_gate.settings(source)
  ours, rules = hf_gate.imported(source, cfg), hf_gate.rules(cfg)
  tokens = np.random.default_rng(3).integers(0, cfg.model.vocab_size, (2, 20))
  prompt = torch.tensor(tokens[:, :8])
  want, greedy = our_logits(ours, rules, tokens), our_greedy(ours, rules, tokens[:, :8], 12)

  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    root / "out", trust_remote_code=True, local_files_only=True
  ).eval()
  assert type(theirs).__module__.endswith(remote_code.MODULE)
  with torch.no_grad():
    got = theirs(torch.tensor(tokens)).logits.numpy()
  np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4, err_msg=name)
  found = theirs.generate(
    prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
  )
  np.testing.assert_array_equal(found[:, 8:].numpy(), greedy)

  fields = json.loads((root / "out/config.json").read_text())
  plain = Decoder(settings_of(fields["settings"]))
  weights.load(plain, root / "out/model.safetensors")
  np.testing.assert_array_equal(generate(plain.eval(), prompt, 12).numpy(), greedy)


def test_padding_in_front_changes_nothing(exported):
  name, root = exported
  if name.startswith("mod") or name == "hybrid":
    pytest.skip("a padded row has more places")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    root / "out", trust_remote_code=True, local_files_only=True
  ).eval()
  prompt = torch.tensor(np.random.default_rng(4).integers(0, 60, (1, 7)))
  how = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
  alone = theirs.generate(prompt, **how)[:, 7:]
  padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
  mask = (torch.arange(11) >= 4).long()[None]
  behind = theirs.generate(padded, attention_mask=mask, **how)[:, 11:]
  torch.testing.assert_close(behind, alone)


def test_the_decoder_needs_no_jax(exported):
  name, root = exported
  if name != "hybrid":
    pytest.skip("the files are the same for all")
  program = f"""
import sys
sys.modules["jax"] = sys.modules["flax"] = None
import json, torch
from ats_jax.pytorch import generation, weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.settings import settings_of
fields = json.load(open({str(root / "out/config.json")!r}))
model = Decoder(settings_of(fields["settings"]))
weights.load(model, {str(root / "out/model.safetensors")!r})
print(generation.generate(model.eval(), torch.ones(1, 3, dtype=torch.long), 4).shape)
"""
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
  )
  assert done.stdout == "torch.Size([1, 4])\n", done.stderr


def test_what_a_folder_of_another_version_says_is_named(tmp_path):
  _, _, folder = folder_of(tmp_path / "first", "dense")
  fields = json.loads((folder / "config.json").read_text())
  del fields["settings"]["model"]["window"]
  (folder / "config.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=r"another version.*model\.window"):
    open_model_folder(folder)
  with pytest.raises(ValueError, match=r"mod\.routing=random"):
    Decoder(tiny_config({"mod.routing": "random"}))


def test_the_parts_of_the_module_share_no_name():
  found = [name for node in ast.parse(remote_code.source()).body for name in defined(node)]
  assert sorted(found) == sorted(set(found))
  assert {"Decoder", "Router", "AtsJaxForCausalLM"} <= set(found)


def defined(node):
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    return [node.name]
  if isinstance(node, ast.Assign):
    return [target.id for target in node.targets]
  return []
