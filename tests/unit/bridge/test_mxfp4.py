"""MXFP4: each value against the definition of the format, and folders that hold it."""

import json

import numpy as np
import pytest
from hf_folders import BFLOAT16, make_folder, write_tensors
from runs import arrays

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.mxfp4 import MOST, Mxfp4Weight, dequantise
from ats_jax.bridge.safetensors_file import read_header
from ats_jax.store.paths import parse

EXPERTS = ("gate_up_proj", "down_proj")


def e2m1(code):
  """One sign, two bits of exponent with bias 1, one of mantissa (OCP MX 1.0, 5.3.3)."""
  sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
  value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
  return -value if sign else value


def plainly(blocks, scales):
  """A value at a time."""
  *shape, inside = blocks.shape
  values = np.zeros((*shape, 2 * inside))
  for at in np.ndindex(*blocks.shape):
    *where, byte = at
    scale = 2.0 ** (int(scales[tuple(where)]) - 127)
    values[(*where, 2 * byte)] = scale * e2m1(int(blocks[at]) & 15)
    values[(*where, 2 * byte + 1)] = scale * e2m1(int(blocks[at]) >> 4)
  return values.reshape(shape[0], -1).T


def test_all_codes_and_all_scales():
  blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (MOST + 1, 1, 1))
  scales = np.repeat(np.arange(MOST + 1, dtype=np.uint8)[:, None], 16, axis=1)
  got = dequantise(blocks, scales)
  assert got.dtype == np.float32
  of_byte = np.array([[e2m1(b & 15), e2m1(b >> 4)] for b in range(256)]).reshape(-1)
  np.testing.assert_array_equal(got.T, of_byte * 2.0 ** (np.arange(MOST + 1) - 127.0)[:, None])
  assert np.all(np.isfinite(got.astype(BFLOAT16).astype(np.float32)))


def quantised(folder, kept):
  """Put random blocks and scales in place of a folder's experts; `kept` gets their values."""
  path = folder / "model.safetensors"
  tensors = {n: t.read() for n, t in read_header(path).items()}
  rng, raw = np.random.default_rng(0), {}
  for name in [n for n in tensors if n.endswith(EXPERTS)]:
    experts, inputs, outputs = tensors.pop(name).shape
    groups = inputs // 32
    raw[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, groups, 16), np.uint8)
    raw[f"{name}_scales"] = rng.integers(118, 124, (experts, outputs, groups)).astype(np.uint8)
    pairs = zip(raw[f"{name}_blocks"], raw[f"{name}_scales"], strict=True)
    kept[name] = np.stack([plainly(*pair) for pair in pairs]).astype(BFLOAT16)
  write_raw(path, tensors | raw)
  fields = json.loads((folder / "config.json").read_text())
  quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
  (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantisation}))
  return tensors, raw


def write_raw(path, tensors):
  """As `write_tensors`, bytes too."""
  entries, at = {}, 0
  kinds = {"uint8": "U8", "bfloat16": "BF16", "float32": "F32"}
  for name, array in tensors.items():
    offsets = [at, at := at + array.nbytes]
    entries[name] = {
      "dtype": kinds[str(array.dtype)], "shape": array.shape, "data_offsets": offsets
    }  # fmt: skip
  header = json.dumps(entries).encode()
  body = b"".join(array.tobytes() for array in tensors.values())
  path.write_bytes(len(header).to_bytes(8, "little") + header + body)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path):
  """Of GPT-OSS in bfloat16, not quantised."""
  return make_folder(tmp_path / "hf", "gpt_oss", dtype=BFLOAT16, **SIZES)


def test_a_quantised_folder_is_the_one_that_it_stands_for(folder, tmp_path):
  plain = make_folder(tmp_path / "plain", "gpt_oss", dtype=BFLOAT16, **SIZES)
  kept = {}
  tensors, _ = quantised(folder, kept)
  assert len(kept) == 4
  write_tensors(plain / "model.safetensors", tensors | kept)
  source = open_model_folder(folder)
  assert source.dtype == "BF16"
  assert all(isinstance(source.tensors[name], Mxfp4Weight) for name in kept)
  for name, made in (("one", folder), ("other", plain)):
    import_folder(made, parse(tmp_path / name), tokenizer="bytes")
  got, want = arrays(tmp_path / "one", 0), arrays(tmp_path / "other", 0)
  assert got.keys() == want.keys()
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)
  export(parse(tmp_path / "one"), tmp_path / "out")
  out = read_header(tmp_path / "out/model.safetensors")
  assert out.keys() == {*tensors, *kept}
  for name, array in (tensors | kept).items():
    np.testing.assert_array_equal(out[name].read(), array, err_msg=name)
  assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


DOWN = "model.layers.1.mlp.experts.down_proj"


def test_wrong_pairs_are_named(folder, tmp_path):
  fields = (folder / "config.json").read_text()
  tensors, raw = quantised(folder, {})

  def refused(words):
    with pytest.raises(ValueError, match=words):
      import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")

  for name, change, words in (
    ("scales", None, f"holds {DOWN}_blocks, and no file holds {DOWN}_scales"),
    ("blocks", None, f"misses 1 tensors of a GPT-OSS model: {DOWN}"),
    ("scales", lambda a: a[..., :1], f"{DOWN}_blocks is .*, and its scales are"),
    ("blocks", lambda a: a[..., :8], f"{DOWN}_blocks is .*, 8., and its scales are"),
    ("blocks", lambda a: a[:, :16], f"{DOWN}_blocks is .*, and its scales are"),
    ("scales", lambda a: a.astype(np.float32), f"tensor {DOWN}_scales is in F32, MXFP4 is in U8"),
    ("scales", lambda a: np.full_like(a, 255), "a scale of MXFP4 is 255, expected at most 252"),
  ):
    wrong = dict(raw)
    array = wrong.pop(f"{DOWN}_{name}")
    if change:
      wrong[f"{DOWN}_{name}"] = change(array)
    write_raw(folder / "model.safetensors", tensors | wrong)
    refused(words)
  # Without its field nothing is unpacked.
  write_raw(folder / "model.safetensors", tensors | raw)
  (folder / "config.json").write_text(fields)
  refused(r"misses 4 tensors of a GPT-OSS model: .*down_proj")
