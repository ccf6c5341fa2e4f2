"""Folders that cannot be imported: each is refused in words that name what is wrong."""

import json

import numpy as np
import pytest
from hf_folders import BFLOAT16, fields_of, make_folder, random_tensors, write_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ats_jax.bridge import gguf_file
from ats_jax.bridge.convert import abstract_parts, config_of, import_folder, plan
from ats_jax.bridge.folder import copy_companions, is_model_folder, open_model_folder
from ats_jax.bridge.safetensors_file import read_header
from ats_jax.config.build import resolve
from ats_jax.data.tokens.file import load_tokenizer
from ats_jax.store.paths import parse

Q = "model.layers.1.self_attn.q_proj.weight"
FILE = "model.safetensors"


def check(folder):
  source = open_model_folder(folder)
  cfg = resolve(config_of(source, tokenizer="bytes"), 0)
  return plan(source, cfg, abstract_parts(cfg))


def refuses(folder, words):
  with pytest.raises(ValueError, match=words):
    check(folder)


@pytest.fixture
def folder(tmp_path):
  return make_folder(tmp_path / "hf")


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


def test_wrong_tensors(folder):
  assert check(folder)
  right, bias = random_tensors(fields_of("llama")), "model.layers.0.self_attn.q_proj.bias"
  for changes, words in (
    ({Q: None}, f"misses 1 tensors of a Llama model: {Q}"),
    ({bias: np.zeros(32, np.float32)}, f"holds 1 tensors that .*: {bias}"),
    ({Q: right[Q].reshape(-1, 16)}, rf"tensor {Q} is \[64, 16\], and config.json says \[32, 32\]"),
  ):
    tensors = {n: a for n, a in (right | changes).items() if a is not None}
    write_tensors(folder / FILE, tensors)
    refuses(folder, words)


def test_a_tied_head_that_is_written_out_is_the_table(tmp_path):
  folder = make_folder(tmp_path / "hf", tie_word_embeddings=True)
  tensors = random_tensors(fields_of("llama", tie_word_embeddings=True))
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  write_tensors(folder / FILE, tensors)
  assert check(folder)
  tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
  write_tensors(folder / FILE, tensors)
  refuses(folder, r"holds .* tensors that .*lm_head.weight")


def with_header(entries):
  text = json.dumps(entries).encode()
  return len(text).to_bytes(8, "little") + text + bytes(8)


def test_files_that_are_damaged(folder):
  path = folder / FILE
  data = path.read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + length])
  header[Q]["dtype"] = "I8"
  entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
  text = json.dumps(header, separators=(",", ":")).encode()
  for content, words in (
    (len(text).to_bytes(8, "little") + text + data[8 + length :], f"tensor {Q} is in I8, expected"),
    (data[:-10], r"is truncated: tensor .* ends at byte"),
    (data[:100], "is truncated or is no safetensors file"),
    (b"", "is truncated or is no safetensors file"),
    (data.replace(b'{"', b'["', 1), "has a header that cannot be read"),
    (with_header({"a": entry, "b": entry}), "the bytes of tensor b are those of another one too"),
    (with_header({"a": entry | {"dtype": ["F32"]}}), "has a header that cannot be read"),
    (with_header({"a": entry | {"shape": [-2]}}), "has a header that cannot be read"),
    (with_header({"a": entry | {"data_offsets": [0.5, 8]}}), "has a header that cannot be read"),
    ((10**5).to_bytes(8, "little") + b"[" * 10**5, "nested too deeply"),
  ):
    path.write_bytes(content)
    refuses(folder, words)
  path.rename(folder / "pytorch_model.bin")
  refuses(folder, r"pytorch_model.bin: pickles can run any program")


def test_several_files(tmp_path):
  folder = make_folder(tmp_path / "hf", shards=2)
  assert check(folder)
  index = folder / "model.safetensors.index.json"
  right = index.read_text()
  index.write_text(right.replace("q_proj", "z_proj"))
  refuses(folder, r"does not hold tensor .*z_proj")
  for by_name in ({"a": 1}, ["a"], "a"):
    index.write_text(json.dumps({"weight_map": by_name}))
    refuses(folder, "weight_map is not an object of names of files")
  index.write_text(right)
  (folder / "model-00002-of-00002.safetensors").unlink()
  refuses(folder, r"misses model-00002-of-00002.safetensors, which")


def test_a_whole_file_goes_before_the_index_of_an_older_save(tmp_path, caplog):
  folder = make_folder(tmp_path / "hf", shards=2)
  tensors = random_tensors(fields_of("llama"))
  write_tensors(folder / FILE, tensors)
  for shard in folder.glob("model-0*"):
    shard.unlink()
  assert {item.ours for item in check(folder)}
  assert {t.path.name for t in open_model_folder(folder).tensors.values()} == {FILE}
  assert "model.safetensors is read, and model.safetensors.index.json" in caplog.text
  index = {"weight_map": dict.fromkeys(tensors, FILE) | {Q: "other.safetensors"}}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  refuses(folder, "misses other.safetensors, which")  # the index names the file, and others


def test_doubles_are_named(folder):
  path = folder / FILE
  data = path.read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + length])
  entries = {
    name: {"dtype": "F64", "shape": e["shape"], "data_offsets": [2 * o for o in e["data_offsets"]]}
    for name, e in header.items()
    if name != "__metadata__"
  }
  text = json.dumps(entries).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 * (len(data) - 8 - length)))
  refuses(folder, r"is in F64, expected one of F32, F16, BF16. Save the model in one of them first")


def test_a_config_that_is_wrong(folder, tmp_path):
  fields = fields_of("llama")
  del fields["hidden_size"]
  for content, words in (
    ({"model_type": "gpt2"}, "model_type is 'gpt2', and the families here are llama"),
    (fields, "hidden_size is missing"),
  ):
    (folder / "config.json").write_text(json.dumps(content))
    refuses(folder, words)
  refuses(tmp_path, r"config.json cannot be read")
  assert not is_model_folder(tmp_path)


def test_fields_of_published_models(folder):
  """What is beside the computation is passed over, and what is not known is named."""
  right = fields_of("llama")
  for more in (
    {"is_llama_config": True, "rope_interleaved": False, "use_mrope": False},
    {"unsloth_fixed": True, "auto_map": {"AutoModel": "a.B"}, "_attn_implementation": "sdpa"},
    {"max_window_layers": 48, "_flash_attn_2_enabled": True},
  ):
    (folder / "config.json").write_text(json.dumps(right | more))
    assert check(folder)
  llama3 = {"rope_type": "llama3", "rope_theta": 1e4}
  for more, words in (
    ({"use_mrope": True}, "use_mrope is True in config.json, and this program does not know"),
    ({"rope_scaling": llama3}, "the rotary scaling 'llama3' has no factor"),
  ):
    (folder / "config.json").write_text(json.dumps(right | more))
    refuses(folder, words)
  fields = fields_of("gemma2", tie_word_embeddings=False)
  (folder / "config.json").write_text(json.dumps(fields))
  refuses(folder, "tie_word_embeddings is False .*: its output layer is the embedding")


@pytest.mark.parametrize(
  ("text", "words"),
  [("[1]", r"holds \[1\], not a JSON object"), ("[" * 100_000, "nested too deep")],
)
def test_a_file_beside_the_weights_that_is_no_object_is_named(tmp_path, text, words):
  (tmp_path / "generation_config.json").write_text(text)
  with pytest.raises(ValueError, match=f"generation_config.json .*{words}"):
    gguf_file._further_ends(tmp_path, eos=2)


def test_companions_are_no_links_to_elsewhere(tmp_path):
  folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
  folder.mkdir(parents=True)
  blobs.mkdir()
  (blobs / "2").write_text("{}")
  (folder / "config.json").symlink_to(blobs / "2")  # as in the cache of the Hub
  copy_companions(folder, tmp_path / "kept")
  assert (tmp_path / "kept" / "config.json").read_text() == "{}"
  (folder / "chat_template.jinja").symlink_to("/etc/passwd")
  with pytest.raises(ValueError, match=r"chat_template.jinja is a link out of its folder"):
    copy_companions(folder, tmp_path / "kept")


def test_a_full_vocabulary_needs_no_token_for_padding(tmp_path):
  """As Llama 2 is published: 32,000 ids, all of them tokens, and none that pads."""
  folder = make_folder(tmp_path / "hf", vocab_size=258)
  symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
  inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  inner.add_special_tokens(["<s>", "</s>"])
  inner.save(str(folder / "tokenizer.json"))
  import_folder(folder, parse(tmp_path / "run"))
  tokenizer = load_tokenizer(parse(tmp_path / "run" / "tokenizer.json"))
  assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (258, 257, 257)


def test_a_tokenizer_that_has_more_tokens(tmp_path):
  folder = make_folder(tmp_path / "hf", vocab_size=200)
  with pytest.raises(ValueError, match="bytes has 259 tokens"):
    import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  with pytest.raises(ValueError, match=r"holds no tokenizer.json"):
    import_folder(folder, parse(tmp_path / "run"))
