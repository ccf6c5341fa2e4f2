"""A tokenizer comes back from its file as it was."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from ats_jax.config.schema import DataConfig
from ats_jax.data.tokens.file import load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import build_tokenizer

TEXT = ["def f(x):\n  return x + 1\n", "la forêt, 漢字 and 🙂\n" * 9]
NUMBERS = ("vocab_size", "bos_id", "eos_id", "pad_id", "fingerprint")


def published_file(path) -> str:
  """A tokenizer.json as one downloads it: its own special tokens, a post-processor, padding."""
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<s>", "</s>"],
    show_progress=False,
  )
  inner.train_from_iterator(TEXT, trainer)
  inner.enable_padding(length=8)
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
  )
  inner.save(str(path))
  return str(path)


@pytest.fixture(scope="module", params=["bytes", "bpe", "tokenizer.json"])
def pair(request, tmp_path_factory):
  """A tokenizer, and the same from its file in a workdir."""
  folder = tmp_path_factory.mktemp("tokenizer")
  named = request.param
  if named == "tokenizer.json":
    named = published_file(folder / "published.json")
  original = build_tokenizer(DataConfig(tokenizer=named, bpe_vocab_size=320), lambda: TEXT)
  save_tokenizer(original, folder / "tokenizer.json")
  return original, load_tokenizer(folder / "tokenizer.json")


def test_same_numbers(pair):
  original, loaded = pair
  for name in NUMBERS:
    assert getattr(original, name) == getattr(loaded, name), name
  assert type(original) is type(loaded)


@given(text=st.text(max_size=40) | st.sampled_from(["<s>a</s>", "a  \n\tb", "漢字 🙂", *TEXT]))
def test_same_ids_and_text(pair, text):
  original, loaded = pair
  ids = loaded.encode(text)
  assert ids == original.encode(text)
  assert loaded.decode(ids) == original.decode(ids) == text
  assert not {loaded.bos_id, loaded.eos_id, loaded.pad_id}.intersection(ids)


def test_saving_what_was_loaded_gives_the_same_file(pair, tmp_path):
  original, loaded = pair
  save_tokenizer(original, tmp_path / "a")
  save_tokenizer(loaded, tmp_path / "b")
  assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_readable_text_in_the_file(tmp_path):
  """Plain JSON in UTF-8, so that a person or another program can look into it."""
  tokenizer = build_tokenizer(DataConfig(bpe_vocab_size=320), lambda: TEXT)
  save_tokenizer(tokenizer, tmp_path / "t.json")
  fields = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
  assert fields["kind"] == "tokenizers" and fields["vocab_size"] == tokenizer.vocab_size
  assert len(fields["tokenizer"]["model"]["vocab"]) == tokenizer.vocab_size - 3


IDS = {"bos_id": 1, "eos_id": 2, "pad_id": 3, "vocab_size": 4}
NO_TOKENIZERS = [b"", b'{"kind": ', b"\xff", b"[1]", b"3", b"null", b"{}", b'{"kind": "other"}']
NO_TOKENIZERS += [
  json.dumps({"kind": "tokenizers", **ids, "tokenizer": tokenizer}).encode()
  for ids, tokenizer in ((IDS, [1]), (IDS, {}), ({**IDS, "bos_id": []}, {}))
]


@pytest.mark.parametrize("content", [None, *NO_TOKENIZERS])
def test_missing_or_damaged(tmp_path, content):
  path = tmp_path / "tokenizer.json"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=rf"{path}, cannot be read: .*Training writes it"):
    load_tokenizer(path)
