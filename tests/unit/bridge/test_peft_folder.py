"""Adapters of an embedding that is the head too, from and to folders of peft."""

import json

import canonical
import jax
import numpy as np
import pytest

from ats_jax.bridge import peft_folder
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.safetensors_file import Slot, Writer, read_header
from ats_jax.config.names import flatten
from ats_jax.model.param import params_of

TIED = {
  "finetune.adapter.name": "lora",
  "finetune.adapter.rank": 3,
  "finetune.adapter.targets": ("embedding", "q"),
  "model.tie_embeddings": True,
}
PREFIX = "base_model.model."
TABLE = f"{PREFIX}model.embed_tokens.base_layer.weight"


@pytest.fixture
def written(tmp_path):
  """A folder, and a function that reads it again."""
  cfg = canonical.config("dense", TIED)
  model = canonical.state(cfg).model
  family = FAMILIES["llama"].fitted(flatten(cfg))
  with jax.set_mesh(canonical.mesh()):
    peft_folder.write(tmp_path / "peft", cfg, family, model, base="base")
    yield (
      tmp_path / "peft",
      model,
      lambda: peft_folder.read(tmp_path / "peft", cfg, family, canonical.state(cfg).model),
    )


def rewrite(folder, changes):
  """The same file with other tensors or more."""
  path = folder / "adapter_model.safetensors"
  tensors = {name: tensor.read() for name, tensor in read_header(path).items()} | changes
  slots = [Slot(name, array.dtype, array.shape) for name, array in tensors.items()]
  with Writer(path, slots) as writer:
    for name, array in tensors.items():
      writer.write(name, array)
  return tensors


def test_it_is_read_again_with_the_table_that_peft_adds(written):
  folder, model, read = written
  tensors = rewrite(folder, {TABLE: np.asarray(model.embed.weight[...])})
  assert tensors[f"{PREFIX}lm_head.lora_A.weight"].shape == (3, 32)
  jax.tree.map(np.testing.assert_array_equal, params_of(read()), params_of(model))


def test_an_adapter_of_the_embedding_alone_is_refused(written):
  folder, _, read = written
  path = folder / "adapter_config.json"
  fields = json.loads(path.read_text())
  assert fields.pop("ensure_weight_tying")
  path.write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=r"one table for both .*ensure_weight_tying=true"):
    read()


def test_another_adapter_of_the_head_is_refused(written):
  folder, _, read = written
  rewrite(folder, {f"{PREFIX}lm_head.lora_A.weight": np.ones((3, 32), np.float32)})
  with pytest.raises(ValueError, match=r"lm_head\.lora_A\.weight is not the transpose of "):
    read()


@pytest.mark.parametrize("more", [0, 1])
def test_the_adapters_of_another_table_are_refused(written, more):
  folder, model, read = written
  table = np.zeros((model.embed.weight.shape[0] + more, 32), np.float32)
  rewrite(folder, {TABLE: table})
  with pytest.raises(ValueError, match=r"base_layer\.weight .* is not the table of this model"):
    read()


@pytest.mark.parametrize("train", [("norm",), ("bias",)])
def test_what_trains_itself_is_saved_whole_or_refused(train, tmp_path):
  settings = {name: value for name, value in TIED.items() if name.startswith("finetune")}
  settings |= {"finetune.adapter.train": train, "model.qkv_bias": True}
  cfg = canonical.config("dense", settings)
  state, family = canonical.state(cfg), FAMILIES["qwen2"].fitted(flatten(cfg))
  with jax.set_mesh(canonical.mesh()):
    model = jax.tree.map(lambda x: x + 1, state.model)
    args = (tmp_path / "peft", cfg, family, model)
    if train == ("bias",):
      with pytest.raises(ValueError, match=r"attn/q/bias trains itself .* Export the merged"):
        peft_folder.write(*args, base="base")
      return
    peft_folder.write(*args, base="base")
    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "model.layers.0.input_layernorm" in fields["modules_to_save"]
    back = peft_folder.read(*args[:3], canonical.state(cfg).model)
    jax.tree.map(np.testing.assert_array_equal, params_of(back), params_of(model))
