import argparse
import inspect
import itertools
import json
import os
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from ats_jax.config.schema import DataConfig
from ats_jax.data.tokens import tokenizer as lib
from ats_jax.data.tokens.file import load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import ByteTokenizer, StreamDecoder, build_tokenizer
from ats_jax.inference.text import stream_text

TEXT = ["def f(x):\n  return x + 1\n", "la forêt, 漢字 and 🙂🙃\n" * 20, "<|eos|> </s> 12345 " * 10]
SPECIAL_WORDS = ["<|eos|>", "</s>", "<s>", "<|endoftext|>", "<pad>", "[PAD]", "<|bos|>"]


def bpe(vocab_size=400, texts=lambda: TEXT, **changes):
  return build_tokenizer(DataConfig(bpe_vocab_size=vocab_size, **changes), texts)


def tokenizer_json(special=("<s>", "</s>"), **extra) -> str:
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=320, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
  )
  inner.train_from_iterator(TEXT, trainer)
  inner.enable_truncation(4)  # as some published files do
  inner.enable_padding(length=8)
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{special[0]} $A", special_tokens=[(special[0], inner.token_to_id(special[0]))]
  )
  spec = json.loads(inner.to_str())
  return json.dumps({**spec, **extra})


@pytest.fixture(scope="module", params=["bytes", "bpe", "file"])
def tokenizer(request, tmp_path_factory):
  if request.param != "file":
    return bpe(tokenizer=request.param)
  path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
  path.write_text(tokenizer_json())
  return bpe(tokenizer=str(path))


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
  """The same from its file in a workdir."""
  path = tmp_path_factory.mktemp("workdir") / "tokenizer.json"
  save_tokenizer(tokenizer, path)
  return load_tokenizer(path)


ANY_TEXT = st.text(max_size=60) | st.lists(
  st.sampled_from([*SPECIAL_WORDS, " ", "\n", "a", "é", "🙂"]), max_size=12
).map("".join)


@given(ANY_TEXT)
@example("\x00\ufffd\u2028 \ufeff\U0010ffff")
@settings(max_examples=60)
def test_round_trip_and_no_special_id(tokenizer, loaded, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == loaded.decode(ids) == text
  assert loaded.encode(text) == ids
  special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
  assert not special.intersection(ids)
  assert all(0 <= i < tokenizer.vocab_size for i in ids)
  assert tokenizer.encode_batch([text, "x"])[0].tolist() == ids
  framed = [tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]
  assert tokenizer.decode(framed) == text


@given(st.lists(st.integers(0, 255), max_size=40), ANY_TEXT)
@settings(max_examples=60)
def test_stream_joins_to_decode_and_never_shows_half_a_character(tokenizer, raw, text):
  for ids in ([i % tokenizer.vocab_size for i in raw], tokenizer.encode(text)):
    stream = StreamDecoder(tokenizer)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
  if "\ufffd" not in text:
    assert "\ufffd" not in "".join(parts)


def test_stream_holds_back_an_unfinished_character():
  stream = StreamDecoder(ByteTokenizer())
  assert [stream.push(b) for b in "é!".encode()] == ["", "é", "!"]
  assert [stream.push(b) for b in "🙂".encode()[:3]] == ["", "", ""]
  assert stream.finish() == "\ufffd"


def test_stream_of_a_tokenizer_that_drops_the_first_space():
  words = {"▁the": 0, "▁cat": 1, "▁sat": 2}
  inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="▁the"))
  inner.decoder = decoders.Metaspace()
  tokenizer = lib.JsonTokenizer(inner.to_str(), bos_id=3, eos_id=4, pad_id=5, vocab_size=6)
  stream = StreamDecoder(tokenizer)
  assert [stream.push(i) for i in (0, 1, 4, 2)] == ["the", " cat", "", " sat"]
  assert tokenizer.decode([0, 1, 4, 2]) == "the cat sat"


def test_vocabulary_and_errors(tokenizer):
  special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
  assert len(special) >= 2 and max(special) < tokenizer.vocab_size  # one may pad with its end
  for bad in (-1, tokenizer.vocab_size):
    with pytest.raises(ValueError, match=f"id {bad} is outside"):
      tokenizer.decode([bad])
  with pytest.raises(ValueError, match="surrogate"):
    tokenizer.encode("\ud800")


def test_bpe_size_and_repeated_training():
  a, b = bpe(), bpe()
  assert 300 < a.vocab_size <= 400
  assert a.fingerprint == b.fingerprint and a.to_json() == b.to_json()
  assert bpe(300).vocab_size == 300 and bpe(300).fingerprint != a.fingerprint
  assert len(a.encode(TEXT[1])) < len(TEXT[1].encode()) / 2


def test_bpe_of_ordinary_text_is_the_library_s_own():
  longest = ["x" * 996, "é" * 498, " " * 990, "7" * 996, "=" * 996]  # words that are not cut yet
  sample = [Path(module.__file__).read_text() for module in (argparse, inspect, typing)] + longest
  plain = tokenizers.Tokenizer(models.BPE())
  plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  plain.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  trainer = trainers.BpeTrainer(vocab_size=997, initial_alphabet=alphabet, show_progress=False)
  plain.train_from_iterator(sample, trainer)
  ours = bpe(1000, lambda: sample)
  assert json.loads(ours.to_json()) == json.loads(plain.to_str())


LONG_WORDS = """
from absl import logging
from ats_jax.config.schema import DataConfig
from ats_jax.data.tokens.tokenizer import build_tokenizer

logging.set_verbosity(logging.INFO)
text = "x" * 1_000_000
tokenizer = build_tokenizer(DataConfig(), lambda: [text])
ids = tokenizer.encode(text)
assert tokenizer.decode(ids) == text
print(len(ids))
"""


@pytest.mark.thorough
def test_bpe_of_one_unbroken_word_ends_and_says_that_it_trains():
  """Without cuts in long words it would take very long."""
  command = [sys.executable, "-c", LONG_WORDS]
  result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
  assert "Training a BPE of 2048 ids on 1.0 MB of text" in result.stderr
  assert int(result.stdout) < 5000


def test_long_words_of_the_sample_are_cut_between_characters():
  text = "short " + "aé漢𠮷b" * 1000 + " " * 1500 + "end"
  words = [word for word, _ in lib._TRAINING_WORDS.pre_tokenize_str(text)]
  parts = [decoders.ByteLevel().decode([word]) for word in words]  # U+FFFD for half a character
  first, *letters, spaces, fewer_spaces, last = parts
  assert (first, spaces, fewer_spaces, last) == ("short", " " * 1000, " " * 499, " end")
  sizes = [len(part.encode()) for part in letters]
  assert "".join(parts) == text and len(set(sizes)) > 2
  assert set(sizes[:-1]) <= {997, 998, 999, 1000} and sizes[-1] <= 1000


def test_bpe_reads_a_bounded_sample(monkeypatch):
  monkeypatch.setattr(lib, "BPE_SAMPLE_BYTES", 1000)
  monkeypatch.setattr(lib, "_BYTES_PER_ID", 1)
  taken = itertools.count()
  bpe(300, lambda: (f"{next(taken):0100d}" for _ in range(99)))
  assert next(taken) == 10


def test_bpe_is_cached_by_what_it_was_trained_on(tmp_path):
  calls = []

  def texts():
    calls.append(1)
    return TEXT

  cfg = DataConfig(bpe_vocab_size=300, cache_dir=str(tmp_path))
  first = build_tokenizer(cfg, texts, corpus_fingerprint="a")
  again = build_tokenizer(cfg, texts, corpus_fingerprint="a")
  assert first.fingerprint == again.fingerprint and len(calls) == 1
  build_tokenizer(cfg, texts, corpus_fingerprint="b")
  assert len(calls) == 2

  with pytest.raises(ValueError, match="no text to train a BPE"):
    build_tokenizer(DataConfig(), lambda: [])


def test_pickle_and_workdir_file_keep_all(tokenizer, loaded, tmp_path):
  for copy in (pickle.loads(pickle.dumps(tokenizer)), loaded):
    assert type(copy) is type(tokenizer)
    assert copy.encode("</s> é <s>") == tokenizer.encode("</s> é <s>")
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "fingerprint"):
      assert getattr(copy, name) == getattr(tokenizer, name), name
    save_tokenizer(copy, tmp_path / "again.json")
    save_tokenizer(tokenizer, tmp_path / "t.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()
  # Plain JSON in UTF-8, so that a person or another program can look into it.
  fields = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
  if fields["kind"] == "tokenizers":
    assert fields["vocab_size"] == tokenizer.vocab_size
    assert fields["tokenizer"]["model"]["vocab"]


IDS = {"bos_id": 1, "eos_id": 2, "pad_id": 3, "vocab_size": 4}
NO_TOKENIZERS = [b"", b'{"kind": ', b"\xff", b"[1]", b"3", b"null", b"{}", b'{"kind": "other"}']
NO_TOKENIZERS += [
  json.dumps({"kind": "tokenizers", **ids, "tokenizer": tokenizer}).encode()
  for ids, tokenizer in ((IDS, [1]), (IDS, {}), ({**IDS, "bos_id": []}, {}))
]


@pytest.mark.parametrize("content", [None, *NO_TOKENIZERS])
def test_a_workdir_file_that_is_missing_or_damaged(tmp_path, content):
  path = tmp_path / "tokenizer.json"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=rf"{path}, cannot be read: .*Training writes it"):
    load_tokenizer(path)


class TestFile:
  def build(self, tmp_path, text, config=None):
    (tmp_path / "tokenizer.json").write_text(text)
    if config is not None:
      text = config if isinstance(config, str) else json.dumps(config)
      (tmp_path / "tokenizer_config.json").write_text(text)
    return bpe(tokenizer=str(tmp_path / "tokenizer.json"))

  def test_known_names_are_used_and_missing_ones_added(self, tmp_path):
    text = tokenizer_json()
    inner = tokenizers.Tokenizer.from_str(text)
    tokenizer = self.build(tmp_path, text)
    assert tokenizer.bos_id == inner.token_to_id("<s>")
    assert tokenizer.eos_id == inner.token_to_id("</s>")
    assert tokenizer.pad_id == tokenizer.eos_id, "no new id: the vocabulary may be full"
    assert tokenizer.vocab_size == inner.get_vocab_size()

  def test_config_beside_it_decides(self, tmp_path):
    text = tokenizer_json(special=("<|x|>", "<s>", "</s>"))
    config = {"bos_token": None, "eos_token": {"content": "<|x|>"}}
    tokenizer = self.build(tmp_path, text, config)
    assert tokenizer.eos_id == tokenizers.Tokenizer.from_str(text).token_to_id("<|x|>")
    assert tokenizer.decode(tokenizer.encode("a<|x|>b")) == "a<|x|>b"

  def test_a_token_not_marked_special_is_still_no_text(self, tmp_path):
    spec = json.loads(tokenizer_json())
    for token in spec["added_tokens"]:
      token["special"] = False
    tokenizer = self.build(tmp_path, json.dumps(spec))
    assert tokenizer.eos_id not in tokenizer.encode("a</s>b")

  def test_special_token_that_is_a_word_of_the_model(self, tmp_path):
    words = {"</s>": 0, "<unk>": 1}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    with pytest.raises(ValueError, match="could end itself"):
      self.build(tmp_path, inner.to_str())

  def test_lossy(self, tmp_path):
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    lossy = tokenizer_json(normalizer=strip)
    no_token = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    for text in (lossy, no_token):
      with pytest.raises(ValueError, match="not lossless"):
        self.build(tmp_path, text)

  @pytest.mark.parametrize(
    ("text", "reason"),
    [
      ("{", "Expecting property name"),
      ("[" * 100_000, "it is nested too deeply"),
      ("[1]", "it has no field 'model'"),
      ("3", "it has no field 'model'"),
      ("{}", "it has no field 'model'"),
      ('{"model": 3}', "ModelUntagged"),
      ('{"model": {"type": "BPE"}}', "Missing vocab/merges"),
      ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "`b` out of voc"),
    ],
  )
  def test_not_a_tokenizer(self, tmp_path, text, reason):
    with pytest.raises(ValueError, match=rf"is not a tokenizer\.json: .*{reason}"):
      self.build(tmp_path, text)

  @pytest.mark.parametrize(
    ("config", "said"),
    [
      ("{", r"tokenizer_config\.json cannot be read: Expecting"),
      ("[" * 100_000, r"tokenizer_config\.json cannot be read: it is nested too deeply"),
      ("[1]", r"tokenizer_config\.json holds \[1\], not a JSON object"),
      ('{"eos_token": [1]}', r"eos_token is \[1\], which tokenizer\.json does not hold"),
      ('{"eos_token": "<nope>"}', "eos_token is '<nope>'"),
    ],
  )
  def test_config_that_is_none(self, tmp_path, config, said):
    with pytest.raises(ValueError, match=said):
      self.build(tmp_path, tokenizer_json(), config)
    with pytest.raises(ValueError, match="no such file"):
      bpe(tokenizer="no/tokenizer.json")


PREPEND = {
  "type": "Sequence",
  "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
  ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
ADDED = {"content": "<note>", "special": False, "single_word": False, "normalized": False}


def of_bytes(*, without="", added=(), model=(), **fields) -> dict:
  """A tokenizer.json of single bytes."""
  symbols = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in without]
  inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(symbols)}, []))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  spec = json.loads(inner.to_str())
  tokens = [{"id": 256 + i, "lstrip": False, "rstrip": False, **t} for i, t in enumerate(added)]
  return {**spec, "added_tokens": tokens, "model": {**spec["model"], **dict(model)}, **fields}


def of_pieces(*, without=(), **fields) -> dict:
  """A tokenizer.json of SentencePiece's kind."""
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁c", *"abcdeht"]
  vocab = {piece: i for i, piece in enumerate(pieces) if piece not in without}
  merges = [("▁", "c")]
  inner = tokenizers.Tokenizer(
    models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
  )
  parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
  return {**json.loads(inner.to_str()), **fields}


WORDS = [" ", "  ", "\n", "\r", "\t", "a", "B", "é", "e\u0301", "<note>", "Å", "ﬁ", "▁", "🙂\u200d"]
KINDS = {  # what its file does -> "" = nothing is lost, else what is said
  "bytes": (of_bytes(), ""),
  "no byte 0D": (of_bytes(without="č"), "!byte 0x0D"),
  "no byte F1": (of_bytes(without="ñ"), "!byte 0xF1"),
  "bytes that no text has": (of_bytes(without="Áÿ"), ""),
  "added token": (of_bytes(added=[ADDED]), ""),
  "word": (of_bytes(added=[{**ADDED, "single_word": True}]), ""),
  "takes blanks": (of_bytes(added=[{**ADDED, "lstrip": True, "rstrip": True}]), "lstrip, rstrip"),
  "dropout": (of_bytes(model={"dropout": 0.5}), "dropout of 0.5 is off"),
  "nfc": (of_bytes(normalizer={"type": "NFC"}), "changes some text"),
  "nfkc": (of_bytes(normalizer={"type": "NFKC"}), "changes some text"),
  "lower": (of_bytes(normalizer={"type": "Lowercase"}), "!'A b' comes back as 'a b'"),
  "strip": (
    of_bytes(normalizer={"type": "Strip", "strip_left": False, "strip_right": True}), "!'a '"
  ),
  "replace": (
    of_bytes(normalizer={"type": "Replace", "pattern": {"String": "qz"}, "content": "q"}), "!'qz'"
  ),
  "whitespace": (of_bytes(pre_tokenizer={"type": "WhitespaceSplit"}), "!not lossless"),
  "bert": (of_bytes(pre_tokenizer={"type": "BertPreTokenizer"}), "!not lossless"),
  "unknown vanishes": (
    of_bytes(pre_tokenizer=None, decoder={"type": "Fuse"}), "!not lossless"
  ),
  "pieces": (of_pieces(normalizer=PREPEND), "'a▁b' comes back as 'a b'"),
  "blank in front": (of_pieces(pre_tokenizer=METASPACE), "' a' comes back as 'a'"),
  "no piece F0": (of_pieces(normalizer=PREPEND, without=("<0xF0>",)), "!byte 0xF0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_does_to_text_is_refused_or_said_unless_all_text_comes_back(
  kind, tmp_path, caplog
):
  spec, said = KINDS[kind]
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(spec), encoding="utf-8")
  if said.startswith("!"):
    with pytest.raises(ValueError, match=f"not lossless: .*{said[1:]}|{said[1:]}"):
      bpe(tokenizer=str(path))
    return
  tokenizer = bpe(tokenizer=str(path))
  warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
  assert said in "".join(warnings) and len(warnings) == bool(said)
  if "changes some text" in "".join(warnings):
    return

  @given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.text(max_size=20))
  @settings(max_examples=30)
  def comes_back(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == tokenizer.encode(text)

  comes_back()


def test_a_continuation_is_decoded_behind_its_prompt(tmp_path):
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(of_pieces(normalizer=PREPEND)), encoding="utf-8")
  tokenizer = bpe(tokenizer=str(path))
  prompt, rest = tokenizer.encode("the"), [*map(tokenizer.token_id, ["▁c", "a", "t"])]
  joined = lambda before: "".join(stream_text(rest, tokenizer, before))
  assert joined([tokenizer.bos_id, *prompt]) == " cat"
  assert joined([*prompt, tokenizer.eos_id]) == joined([]) == "cat", "a text begins"
  assert tokenizer.decode([*prompt, *rest]) == "the cat"


def test_parts_are_encoded_as_one_text(tmp_path):
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(of_pieces(normalizer=PREPEND)), encoding="utf-8")
  for tokenizer in (bpe(tokenizer=str(path)), ByteTokenizer()):
    eos = tokenizer.eos_id
    ((ids, part),) = tokenizer.encode_parts([["a", " c", eos, " ", "c</s>", eos]])
    first, second = tokenizer.encode("a c"), tokenizer.encode(" c</s>")
    assert ids.tolist() == [*first, eos, *second, eos]
    assert part[len(first)] == 2 and part[-1] == 5 and (part[len(first) + 1 : -1] >= 3).all()
    assert part[: len(first)].tolist() == sorted(part[: len(first)].tolist())


def test_files_are_utf8_whatever_the_locale_is(tmp_path):
  code = (
    "from ats_jax.config.build import unchecked\n"
    "from ats_jax.data.tokens.tokenizer import build_tokenizer\n"
    f"cfg = unchecked({{'data': {{'bpe_vocab_size': 300, 'cache_dir': {str(tmp_path)!r}}}}}).data\n"
    "text = ['caf\\u00e9 \\u6f22\\u5b57 ' * 50]\n"
    "for _ in range(2):\n"
    "  tokenizer = build_tokenizer(cfg, lambda: text, corpus_fingerprint='x')\n"
    "  assert tokenizer.decode(tokenizer.encode(text[0])) == text[0]\n"
  )
  env = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
  subprocess.run([sys.executable, "-c", code], env=env, check=True)
