"""A Llama's weights as a GGUF file, for llama.cpp and what reads its format.

The file has no tokenizer: llama.cpp cuts text by rules that it knows by name, and ours is none of
them. Tokens are to be made outside.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.safetensors_file import DTYPES, Stored

ARCHITECTURE = "llama"
_TABLES = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}
_OF_LAYER = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def write(folder: Path, path: Path) -> int:
  """Write the file of a folder of the family `llama`, a tensor at a time.

  Args:
    folder: folder of an export in float32 or float16.
    path: path of the file.

  Returns:
    How many tensors it has.

  Raises:
    ValueError: if the model is another, scales its rotary frequencies, or the package is missing.
  """
  try:
    import gguf  # pyright: ignore[reportMissingImports]
  except ModuleNotFoundError as e:
    raise ValueError(f"--format=gguf needs {e.name}: pip install 'ats_jax[gguf]'.") from e
  source = open_model_folder(folder)
  own = source.settings
  if source.family.model_type != ARCHITECTURE:
    raise ValueError(f"--format=gguf: {folder} is {source.family.name}, and only Llama is written.")
  if (scaling := own["model.rope_scaling.name"]) != "none":
    raise ValueError(f"--format=gguf: model.rope_scaling={scaling} is not written, only none.")
  if source.dtype not in ("F32", "F16"):
    raise ValueError(
      f"--format=gguf: {source.dtype} is not written. Use --dtype=float16 or float32."
    )
  writer = gguf.GGUFWriter(path, ARCHITECTURE)
  writer.add_vocab_size(own["model.vocab_size"])
  writer.add_context_length(int(source.fields["max_position_embeddings"]))
  writer.add_embedding_length(own["model.d_model"])
  writer.add_block_count(own["model.num_layers"])
  writer.add_feed_forward_length(own["model.d_ff"])
  writer.add_head_count(own["model.num_heads"])
  writer.add_head_count_kv(own["model.num_kv_heads"])
  writer.add_key_length(_head_dim(own))
  writer.add_value_length(_head_dim(own))
  writer.add_rope_dimension_count(_head_dim(own))
  writer.add_rope_freq_base(own["model.rope_theta"])
  writer.add_layer_norm_rms_eps(own["model.norm_eps"])
  kinds = gguf.LlamaFileType
  writer.add_file_type(kinds.ALL_F32 if source.dtype == "F32" else kinds.MOSTLY_F16)
  writer.add_tokenizer_model("none")
  named = list(_named(source.tensors))
  for name, tensor in named:
    dtype = np.dtype(np.float32) if len(tensor.shape) == 1 else DTYPES[tensor.dtype]
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    writer.add_tensor_info(name, tensor.shape, dtype, size)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  heads = {"attn_q": own["model.num_heads"], "attn_k": own["model.num_kv_heads"]}
  for name, tensor in named:
    array, kind = tensor.read(), name.split(".")[-2]
    array = _in_pairs(array, heads[kind]) if kind in heads else array
    wide = array.astype(np.float32) if array.ndim == 1 else array  # vectors are, in all files
    writer.write_tensor_data(np.ascontiguousarray(wide))
  writer.close()
  return len(named)


def _head_dim(own: Mapping[str, Any]) -> int:
  return own["model.head_dim"] or own["model.d_model"] // own["model.num_heads"]


def _named(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
  for name, tensor in tensors.items():
    if name in _TABLES:
      yield _TABLES[name], tensor
    else:
      layer, _, part = name.removeprefix("model.layers.").partition(".")
      yield f"blk.{layer}.{_OF_LAYER[part.removesuffix('.weight')]}.weight", tensor


def _in_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
  """Rows (i, i + half) of each head, which are rotated together, beside each other."""
  halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
  return halves.swapaxes(1, 2).reshape(matrix.shape)
