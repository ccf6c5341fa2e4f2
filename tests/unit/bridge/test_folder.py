"""Folders that cannot be imported: each is refused in words that name what is wrong."""

import json

import numpy as np
import pytest
from hf_folders import BFLOAT16, fields_of, make_folder, random_tensors, write_tensors

from ats_jax.bridge.convert import abstract_parts, config_of, import_folder, plan
from ats_jax.bridge.folder import is_model_folder, open_model_folder
from ats_jax.bridge.safetensors_file import read_header
from ats_jax.config.build import resolve
from ats_jax.store.paths import parse

Q = "model.layers.1.self_attn.q_proj.weight"


def check(folder):
  source = open_model_folder(folder)
  cfg = resolve(config_of(source, tokenizer="bytes"), 0)
  return plan(source, cfg, abstract_parts(cfg))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_tensors_come_back_as_they_were_written(dtype, tmp_path):
  tensors = random_tensors(fields_of("llama"), dtype) | {"scalar": np.ones((), dtype)}
  write_tensors(tmp_path / "a.safetensors", tensors)
  found = read_header(tmp_path / "a.safetensors")
  assert found.keys() == tensors.keys()
  for name, array in tensors.items():
    got = found[name].read()
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def test_a_whole_folder_passes(tmp_path):
  assert check(make_folder(tmp_path / "one"))
  assert check(make_folder(tmp_path / "many", shards=3))


def test_a_missing_shard(tmp_path):
  folder = make_folder(tmp_path / "hf", shards=3)
  (folder / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(ValueError, match=r"misses model-00002-of-00003.safetensors, which"):
    check(folder)


def test_a_missing_tensor(tmp_path):
  folder = make_folder(tmp_path / "hf")
  tensors = random_tensors(fields_of("llama"))
  del tensors[Q]
  write_tensors(folder / "model.safetensors", tensors)
  with pytest.raises(ValueError, match=f"misses 1 tensors of a Llama model: {Q}"):
    check(folder)


def test_an_extra_tensor(tmp_path):
  folder = make_folder(tmp_path / "hf")
  tensors = random_tensors(fields_of("llama"))
  tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
  write_tensors(folder / "model.safetensors", tensors)
  with pytest.raises(
    ValueError, match=r"holds 1 tensors that .*: model.layers.0.self_attn.q_proj.b"
  ):
    check(folder)


def test_a_tied_head_that_is_written_out_is_the_table(tmp_path):
  folder = make_folder(tmp_path / "hf", tie_word_embeddings=True)
  tensors = random_tensors(fields_of("llama", tie_word_embeddings=True))
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  write_tensors(folder / "model.safetensors", tensors)
  assert check(folder)
  tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
  write_tensors(folder / "model.safetensors", tensors)
  with pytest.raises(ValueError, match=r"holds .* tensors that .*lm_head.weight"):
    check(folder)


def test_a_wrong_dtype(tmp_path):
  folder = make_folder(tmp_path / "hf")
  data = bytearray((folder / "model.safetensors").read_bytes())
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + length])
  header[Q]["dtype"] = "I8"
  text = json.dumps(header, separators=(",", ":")).encode()
  (folder / "model.safetensors").write_bytes(
    len(text).to_bytes(8, "little") + text + data[8 + length :]
  )
  with pytest.raises(ValueError, match=f"tensor {Q} is in I8, expected one of F32, F16, BF16"):
    check(folder)


def test_a_wrong_shape(tmp_path):
  folder = make_folder(tmp_path / "hf")
  tensors = random_tensors(fields_of("llama"))
  tensors[Q] = tensors[Q].reshape(-1, 16)
  write_tensors(folder / "model.safetensors", tensors)
  with pytest.raises(
    ValueError, match=rf"tensor {Q} is \[64, 16\], and config.json says \[32, 32\]"
  ):
    check(folder)


def test_a_truncated_file(tmp_path):
  folder = make_folder(tmp_path / "hf")
  path = folder / "model.safetensors"
  data = path.read_bytes()
  path.write_bytes(data[:-10])
  with pytest.raises(ValueError, match=r"is truncated: tensor .* ends at byte"):
    check(folder)
  path.write_bytes(data[:100])
  with pytest.raises(ValueError, match="is truncated or is no safetensors file"):
    check(folder)
  path.write_bytes(b"")
  with pytest.raises(ValueError, match="is truncated or is no safetensors file"):
    check(folder)


def test_a_header_that_is_no_json(tmp_path):
  folder = make_folder(tmp_path / "hf")
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes().replace(b'{"', b'["', 1))
  with pytest.raises(ValueError, match="has a header that cannot be read"):
    check(folder)


def test_pickles_are_refused(tmp_path):
  folder = make_folder(tmp_path / "hf")
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"pytorch_model.bin: pickles can run any program"):
    check(folder)


def test_an_unknown_architecture(tmp_path):
  folder = make_folder(tmp_path / "hf")
  (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
  with pytest.raises(ValueError, match="model_type is 'gpt2', and the families here are llama"):
    check(folder)


def test_a_field_that_is_missing(tmp_path):
  folder = make_folder(tmp_path / "hf")
  fields = fields_of("llama")
  del fields["hidden_size"]
  (folder / "config.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match="hidden_size is missing"):
    check(folder)


def test_no_folder(tmp_path):
  with pytest.raises(ValueError, match=r"config.json cannot be read"):
    check(tmp_path)
  assert not is_model_folder(tmp_path)


def test_an_index_that_lies(tmp_path):
  folder = make_folder(tmp_path / "hf", shards=2)
  path = folder / "model.safetensors.index.json"
  path.write_text(path.read_text().replace("q_proj", "z_proj"))
  with pytest.raises(ValueError, match=r"does not hold tensor .*z_proj"):
    check(folder)


def test_a_tokenizer_that_has_more_tokens(tmp_path):
  folder = make_folder(tmp_path / "hf", vocab_size=200)
  with pytest.raises(ValueError, match="bytes has 259 tokens"):
    import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  with pytest.raises(ValueError, match=r"holds no tokenizer.json"):
    import_folder(folder, parse(tmp_path / "run"))
