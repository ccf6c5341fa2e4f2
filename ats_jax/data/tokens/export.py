"""A run's tokenizer as the files that `transformers` loads, with all its special tokens."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ats_jax.data.tokens.base import OWN_NAMES, Tokenizer
from ats_jax.data.tokens.sentencepiece_file import SentencePieceTokenizer
from ats_jax.data.tokens.special import with_special
from ats_jax.data.tokens.tiktoken_file import ALPHABET, merged_pairs
from ats_jax.data.tokens.tokenizer import JsonTokenizer

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MODEL = "tokenizer.model"
_SPACE = "▁"  # what SentencePiece writes for a space
_ENDS = tokenizers.Regex(r"\A | \z")  # a space at the start or the end of a text


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
  """Content by name of the files that stand for a tokenizer.

  Ids are those of the run. The library puts bos before a text, as every document of ours begins.
  Of a template, jinja is written; those that are known by name are no jinja. A SentencePiece model
  is written as it is, and as a tokenizer.json too where that has the same ids: a BPE in which the
  user defined no pieces.
  """
  of_text = tokenizer.of_text
  special = _special(tokenizer)
  roles = {role: _name(special, getattr(tokenizer, f"{role[:3]}_id")) for role in OWN_NAMES}
  config: dict[str, Any] = {**roles, "clean_up_tokenization_spaces": False}
  files: dict[str, bytes] = {}
  if isinstance(of_text, SentencePieceTokenizer):
    added = {name: i for name, i in special.items() if of_text.token_id(name) is None}
    config["added_tokens_decoder"] = {
      str(i): {"content": name, "special": True} for name, i in {**of_text.added, **added}.items()
    }
    files[MODEL] = of_text.model
    text = _of_pieces(of_text)
  else:
    text = of_text.to_json() if isinstance(of_text, JsonTokenizer) else _of_bytes()
  if text:
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    files[TOKENIZER] = _json(text, special, roles["bos_token"]).encode()
  return {
    **files,
    **tokenizer.template_files(),
    CONFIG: json.dumps(config, ensure_ascii=False, indent=2).encode(),
  }


def _special(tokenizer: Tokenizer) -> dict[str, int]:
  """Id by name, of all special tokens, those without a name in their file by one of ours."""
  special = tokenizer.special_tokens()
  for role, name in OWN_NAMES.items():
    i = getattr(tokenizer, f"{role[:3]}_id")
    while i not in special.values() and tokenizer.token_id(name) not in (None, i):
      name = f"{name[:-2]}_|>"  # somebody else has the name
    if i not in special.values():
      special[name] = i
  return special


def _name(special: Mapping[str, int], i: int) -> str:
  return next(name for name, number in special.items() if number == i)


def _json(text: str, special: Mapping[str, int], bos: str) -> str:
  spec = with_special(text, special)
  if spec.get("post_processor"):
    return json.dumps(spec, ensure_ascii=False)
  inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
  begin = [(bos, special[bos])]
  inner.post_processor = processors.TemplateProcessing(
    single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=begin
  )
  return inner.to_str()


def _of_pieces(tokenizer: SentencePieceTokenizer) -> str:
  """A model of SentencePiece as a tokenizer.json; "" if the ids of some text would be others."""
  proto = tokenizer.parsed()
  rules, kinds = proto.normalizer_spec, type(proto).SentencePiece
  usual = rules.escape_whitespaces and not proto.trainer_spec.treat_whitespace_as_suffix
  is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
  types = {piece.type for piece in proto.pieces}
  if not (is_bpe and usual) or types & {kinds.USER_DEFINED, kinds.UNUSED}:
    return ""
  ranks = {piece.piece: -piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
  inner = tokenizers.Tokenizer(
    models.BPE(
      {piece.piece: i for i, piece in enumerate(proto.pieces)}, list(merged_pairs(ranks)),
      unk_token=proto.trainer_spec.unk_piece, fuse_unk=True, byte_fallback=True,
    )
  )  # fmt: skip
  steps: list[Any] = []
  if rules.precompiled_charsmap:
    steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
  if rules.remove_extra_whitespaces:
    steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Replace(_ENDS, "")]
  if rules.add_dummy_prefix:
    steps.append(normalizers.Prepend(_SPACE))
  inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
  back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if rules.add_dummy_prefix:
    back.append(decoders.Strip(" ", 1, 0))
  inner.decoder = decoders.Sequence(back)
  return inner.to_str()


def _of_bytes() -> str:
  """The tokenizer of bytes: id = byte."""
  inner = tokenizers.Tokenizer(models.BPE({char: byte for byte, char in ALPHABET.items()}, []))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.decoder = decoders.ByteLevel()
  return inner.to_str()
