"""A model and its tokenizer as a GGUF file, for llama.cpp and what reads its format."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ats_jax.bridge.folder import ModelFolder, open_model_folder, read_json
from ats_jax.bridge.safetensors_file import DTYPES, Stored
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.schema import Config
from ats_jax.data.tokens.export import TOKENIZER
from ats_jax.model.block import rope_scaling
from ats_jax.ops.rope import frequencies

# llama.cpp's name of the architecture, by `model_type`.
ARCHITECTURES = {
  "llama": "llama",
  "mistral": "llama",
  "mixtral": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "qwen3_moe": "qwen3moe",
}
# What llama.cpp computes of an architecture, whatever the file says.
_FIXED = {
  "model.window": 0,
  "moe.renormalize": True,
  "moe.every": 1,
  "moe.dense_first": 0,
}
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PARTS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS
# llama.cpp knows how text is cut into words by name alone: (a first cut, whether ByteLevel cuts by
# its own expression, whether a word of the vocabulary needs no merges) -> name.
_CUTS = {
  ("", True, False): "gpt-2",
  ("digits", True, False): "smollm",
  (_PARTS % "{1,3}", False, True): "llama-bpe",
  (_PARTS % "{1,3}", False, False): "dbrx",
  (_PARTS % "", False, False): "qwen2",
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A tensor of the file.

  Attributes:
    name: in the file.
    shape: its shape.
    dtype: its dtype.
    parts: the tensors of the folder that it is: one, or those of all experts.
    heads: heads whose rows are written in pairs that are rotated together; 0 = as they are.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  parts: tuple[Stored, ...]
  heads: int = 0

  def read(self) -> np.ndarray:
    arrays = [part.read() for part in self.parts]
    array = np.stack(arrays) if len(self.shape) > len(arrays[0].shape) else arrays[0]
    array = _in_pairs(array, self.heads) if self.heads else array
    return np.ascontiguousarray(array.astype(self.dtype, copy=False))


def write(folder: Path, path: Path) -> tuple[int, str]:
  """Write the file of a folder, a tensor at a time; one of experts is all those of its layer.

  Args:
    folder: folder of an export in float32 or float16.
    path: path of the file.

  Returns:
    How many tensors it has, and why it has no tokenizer; "" if it has one.

  Raises:
    ValueError: if llama.cpp has no such model here, or the package is missing.
  """
  try:
    import gguf  # pyright: ignore[reportMissingImports]
  except ModuleNotFoundError as e:
    raise ValueError(f"--format=gguf needs {e.name}: pip install 'ats_jax[gguf]'.") from e
  source = open_model_folder(folder)
  kind = source.family.model_type
  cfg = _config(source)
  if source.dtype not in ("F32", "F16"):
    raise ValueError(
      f"--format=gguf: {source.dtype} is not written. Use --dtype=float16 or float32."
    )
  model, moe, arch = cfg.model, cfg.moe, ARCHITECTURES[kind]
  writer = gguf.GGUFWriter(path, arch)
  writer.add_vocab_size(model.vocab_size)
  writer.add_context_length(int(source.fields["max_position_embeddings"]))
  writer.add_embedding_length(model.d_model)
  writer.add_block_count(model.num_layers)
  writer.add_feed_forward_length(model.d_ff)
  writer.add_head_count(model.num_heads)
  writer.add_head_count_kv(model.num_kv_heads)
  writer.add_key_length(model.head_dim)
  writer.add_value_length(model.head_dim)
  writer.add_rope_dimension_count(model.head_dim)
  writer.add_rope_freq_base(model.rope_theta)
  writer.add_layer_norm_rms_eps(model.norm_eps)
  if moe.num_experts:
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.top_k)
    writer.add_expert_feed_forward_length(moe.d_ff or model.d_ff)
  kinds = gguf.LlamaFileType
  writer.add_file_type(kinds.ALL_F32 if source.dtype == "F32" else kinds.MOSTLY_F16)
  lacks = _add_tokenizer(gguf, writer, folder, model.vocab_size)
  (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
  names = gguf.get_tensor_name_map(number, model.num_layers)
  tensors: list[_Tensor | _Factors] = list(
    _tensors(source.tensors, names, cfg, in_pairs=arch == "llama")
  )
  if model.rope_scaling.name != "none":
    tensors.insert(0, _Factors("rope_freqs.weight", cfg))
  for tensor in tensors:
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    writer.add_tensor_info(tensor.name, tensor.shape, tensor.dtype, size)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for tensor in tensors:
    writer.write_tensor_data(tensor.read())
  writer.close()
  return len(tensors), lacks


def _config(source: ModelFolder) -> Config:
  """The folder's config, if llama.cpp computes what it says.

  Raises:
    ValueError: naming what it does not.
  """
  kind, own = source.family.model_type, source.settings
  if kind not in ARCHITECTURES:
    raise ValueError(
      f"--format=gguf: {source.family.name} is not written. The families are "
      f"{', '.join(ARCHITECTURES)}."
    )
  differing = [
    f"{name}={own[name]}" for name in _FIXED if own.get(name, _FIXED[name]) != _FIXED[name]
  ]
  scalings = ("none", "linear", "llama3") if ARCHITECTURES[kind] == "llama" else ("none",)
  if own["model.rope_scaling.name"] not in scalings:
    differing.append(f"model.rope_scaling={own['model.rope_scaling.name']}")
  if differing:
    raise ValueError(
      f"--format=gguf: {', '.join(differing)} is not written for {source.family.name}, as "
      "llama.cpp does not compute it there."
    )
  return resolve(
    with_settings(Config(), {"data.tokenizer": "bytes", **own}), own["model.vocab_size"]
  )


@dataclasses.dataclass(frozen=True)
class _Factors:
  """What divides the frequency of each rotated pair, where they are scaled."""

  name: str
  cfg: Config

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(np.float32)

  @property
  def shape(self) -> tuple[int, ...]:
    return (self.cfg.model.head_dim // 2,)

  def read(self) -> np.ndarray:
    model = self.cfg.model
    plain = frequencies(model.head_dim, model.rope_theta)
    scaled = frequencies(model.head_dim, model.rope_theta, rope_scaling(model))
    return (plain / scaled).astype(np.float32)


def _tensors(
  stored: Mapping[str, Stored], names: Any, cfg: Config, *, in_pairs: bool
) -> Iterator[_Tensor]:
  heads = {"attn_q": cfg.model.num_heads, "attn_k": cfg.model.num_kv_heads} if in_pairs else {}
  joined: dict[str, dict[int, Stored]] = {}
  for name, tensor in stored.items():
    expert = re.search(r"\.experts\.(\d+)\.", name)
    whole = name.replace(expert[0], ".experts.") if expert else name
    joined.setdefault(whole, {})[int(expert[1]) if expert else 0] = tensor
  for whole, experts in joined.items():
    name, first = names.get_name(whole, try_suffixes=(".weight", ".bias")), experts[0]
    assert name is not None, whole
    shape = (len(experts), *first.shape) if ".experts." in whole else first.shape
    # As llama.cpp's own files: vectors and routers are in float32.
    is_wide = len(shape) == 1 or ".ffn_gate_inp." in name
    dtype = np.dtype(np.float32) if is_wide else DTYPES[first.dtype]
    parts = tuple(tensor for _, tensor in sorted(experts.items()))
    yield _Tensor(name, shape, dtype, parts, heads.get(name.split(".")[-2], 0))


def _add_tokenizer(gguf: Any, writer: Any, folder: Path, vocab_size: int) -> str:
  """Add the tokenizer of a folder; return why it cannot be, "" if it is there."""
  if not (folder / TOKENIZER).is_file():
    writer.add_tokenizer_model("none")
    return f"the run has no {TOKENIZER}"
  text = (folder / TOKENIZER).read_text(encoding="utf-8")
  spec = json.loads(text)
  cut = _cut(spec)
  if not cut:
    writer.add_tokenizer_model("none")
    return "llama.cpp has no name for the way in which it cuts text into words"
  inner = tokenizers.Tokenizer.from_str(text)
  added = {token["id"]: token for token in spec.get("added_tokens") or []}
  tokens, kinds = [], []
  for i in range(vocab_size):
    token = added[i]["content"] if i in added else inner.id_to_token(i)
    kind = gguf.TokenType.NORMAL
    if i in added:
      is_special = added[i].get("special")
      kind = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
    elif token is None:
      token, kind = f"[PAD{i}]", gguf.TokenType.UNUSED
    tokens.append(token)
    kinds.append(kind)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(cut)
  writer.add_token_list(tokens)
  writer.add_token_types(kinds)
  special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
  # llama.cpp refuses a file without any. This one, of two zero bytes, gives no token that exists.
  special.merges = special.merges or ["\u0100 \u0100"]
  ids = special.special_token_ids
  begin, end = _put_around(inner)
  special.add_special_token = {"bos": begin == [ids.get("bos")], "eos": end == [ids.get("eos")]}
  special.add_to_gguf(writer, quiet=True)
  if more := _further_ends(folder, ids.get("eos")):
    writer.add_eot_token_id(more[0])
  return ""


def _cut(spec: Mapping[str, Any]) -> str:
  """llama.cpp's name of the way in which a tokenizer.json cuts text; "" if it has none."""
  model, normalizer = spec["model"], spec.get("normalizer") or {"type": "NFC"}
  other = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
  if model["type"] != "BPE" or normalizer["type"] != "NFC" or any(model.get(k) for k in other):
    return ""
  steps = spec.get("pre_tokenizer") or {}
  *first, last = steps.get("pretokenizers") or [steps]
  if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(first) > 1:
    return ""
  if not model["merges"]:
    return "gpt-2"  # each byte is a token, however text is cut
  before, ignores = _first_cut(first[0]) if first else "", bool(model.get("ignore_merges"))
  return _CUTS.get((before, last.get("use_regex", True), ignores), "")


def _first_cut(step: Mapping[str, Any]) -> str:
  if step["type"] == "Digits" and step.get("individual_digits"):
    return "digits"
  is_plain = step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert")
  return step["pattern"].get("Regex", "?") if is_plain else "?"


def _put_around(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
  """Ids that the tokenizer puts before a text, and behind it."""
  bare, ids = (inner.encode("a", add_special_tokens=add).ids for add in (False, True))
  place = next(i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
  return ids[:place], ids[place + len(bare) :]


def _further_ends(folder: Path, eos: int | None) -> list[int]:
  """Ids beside eos that end a generation, by generation_config.json."""
  path = folder / "generation_config.json"
  ends = read_json(path).get("eos_token_id") if path.is_file() else []
  return [i for i in (ends if isinstance(ends, list) else [ends]) if i not in (eos, None)]


def _in_pairs(array: np.ndarray, heads: int) -> np.ndarray:
  """Rows (i, i + half) of each head, which are rotated together, beside each other."""
  halves = array.reshape(heads, 2, -1, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)
