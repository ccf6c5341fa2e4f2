"""Tokenizers of SentencePiece and tiktoken give the ids of these libraries, and lose no text."""

import base64
import functools
import io
import json
import logging
import pickle
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.tokenizer import with_template
from ats_jax.data.tokens import tiktoken_file
from ats_jax.data.tokens.file import load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import StreamDecoder, build_tokenizer

TEXT = [
  "def f(x):\n  return x + 1\n", "la forêt, 漢字 and 🙂🙃\n" * 20, "<|im_end|> </s> 12345 " * 10,
  "Don't stop: the theme of them all, then THEY'LL see 2024's end.\r\n\r\n" * 9, "aaaaaaa " * 9,
]  # fmt: skip
MARKS = ["<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<pad>", "<0x0A>", "<unk>", "[INST]"]
WORDS = [
  *MARKS, " ", "  ", "\n", "\r\n", "\t", "a", "aaa", "'ll", "é", "e\u0301", "漢字", "🙂\u200d", "1",
]  # fmt: skip
ANY_TEXT = st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
ODD = "\x00\ufffd\u2028 \ufeff\u00a0\u3000\x85\U0010ffff"


def build(path, **changes):
  cfg = DataConfig(tokenizer=str(path), cache_dir=str(path.parent / "cache"), **changes)
  return build_tokenizer(cfg, lambda: [])


def trained(size=420) -> tuple[tokenizers.Tokenizer, list[bytes]]:
  """A BPE of the library `tokenizers`, and its tokens in the order of their ranks."""
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(tiktoken_file._CL100K), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])  # fmt: skip
  inner.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  inner.train_from_iterator(
    TEXT, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
  )
  bytes_of = {char: byte for byte, char in tiktoken_file.ALPHABET.items()}
  tokens = sorted(inner.get_vocab().items(), key=lambda item: item[1])
  return inner, [bytes(map(bytes_of.__getitem__, token)) for token, _ in tokens]


def rank_lines(tokens) -> bytes:
  return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))


def rank_file(path, tokens):
  path.write_bytes(rank_lines(tokens))
  return path


@functools.lru_cache(maxsize=8)
def converted(tokens: tuple[bytes, ...], pattern: str) -> tokenizers.Tokenizer:
  spec = tiktoken_file.converted(rank_lines(tokens), tiktoken_file.Encoding(pattern, {}))
  return tokenizers.Tokenizer.from_str(json.dumps(spec))


def spm_file(path, **settings):
  spm = pytest.importorskip("sentencepiece")
  out = io.BytesIO()
  usual = dict(vocab_size=420, model_type="bpe", byte_fallback=True, minloglevel=2)
  lossless = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
  lines = [line for text in TEXT for line in text.splitlines()]
  spm.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=out, **{**usual, **lossless, **settings}
  )
  path.write_bytes(out.getvalue())
  return path


@pytest.fixture(scope="module")
def maker():
  return trained()


@pytest.fixture(scope="module")
def ranks(maker):
  return maker[1]


@pytest.fixture(scope="module")
def own_ranks(ranks, tmp_path_factory):
  """A rank file of one's own: its pattern and its special tokens are beside it."""
  path = rank_file(tmp_path_factory.mktemp("tiktoken") / "mine.tiktoken", ranks)
  path.with_suffix(".pattern").write_text(tiktoken_file._CL100K + "\n")
  n = len(ranks)
  added = {n + 3: {"content": "<|endoftext|>"}, n + 5: {"content": "<|im_end|>"}}
  config = {"added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
  (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
  return path


SPM = {
  "spm-bpe": dict(user_defined_symbols=["<|im_end|>", "\n\n", "[INST]"]),
  "spm-unigram": dict(
    model_type="unigram", hard_vocab_limit=False, allow_whitespace_only_pieces=True
  ),
}


@pytest.fixture(
  scope="module",
  params=["tiktoken", *(pytest.param(name, marks=pytest.mark.formats) for name in SPM)],
)
def file(request, tmp_path_factory):
  if request.param == "tiktoken":
    return request.getfixturevalue("own_ranks")
  return spm_file(tmp_path_factory.mktemp("spm") / "my.model", **SPM[request.param])


@pytest.fixture(scope="module")
def tokenizer(file):
  return build(file)


@given(ANY_TEXT)
@example(ODD)
@settings(max_examples=60)
def test_round_trip_and_no_special_id(tokenizer, file, text):
  if file.suffix == ".model":
    text = text.replace("▁", "_")  # which SentencePiece itself takes for a space
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert not set(tokenizer.special_tokens().values()).intersection(ids)
  assert not tokenizer.special_ids.intersection(ids)
  assert all(0 <= i < tokenizer.vocab_size for i in ids)
  assert [x.tolist() for x in tokenizer.encode_batch([text, "x"])] == [ids, tokenizer.encode("x")]
  assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text
  stream = StreamDecoder(tokenizer)
  assert "".join([stream.push(i) for i in ids]) + stream.finish() == text


def test_every_byte_has_an_id_and_a_lone_surrogate_is_refused(tokenizer):
  for text in ("".join(map(chr, range(0x250))).replace("▁", ""), "\U0001f600\u0f00\u1680"):
    assert tokenizer.decode(tokenizer.encode(text)) == text
  with pytest.raises(ValueError, match="surrogate"):
    tokenizer.encode("\ud800")


def test_pickle_and_workdir_file_keep_the_ids(tokenizer, tmp_path):
  save_tokenizer(tokenizer, tmp_path / "t.json")
  text = "</s> é <s><|im_end|>"
  copies = [pickle.loads(pickle.dumps(tokenizer)), load_tokenizer(tmp_path / "t.json")]
  for copy in [*copies, build(tmp_path / "t.json")]:
    assert copy.encode(text) == tokenizer.encode(text)
    assert copy.fingerprint == tokenizer.fingerprint


def test_a_template_takes_its_tokens_from_the_file_and_text_stays_text(tokenizer):
  chat = with_template(tokenizer, Chat())
  known = tokenizer.token_id("<|im_end|>")
  assert chat.token_id("<|im_end|>") == (tokenizer.vocab_size + 1 if known is None else known)
  assert chat.token_id("<|im_end|>") not in chat.encode("a<|im_end|>b")
  assert chat.decode(chat.encode("a<|im_end|>b")) == "a<|im_end|>b"


@pytest.fixture(scope="module", params=tiktoken_file.ENCODINGS)
def publisher(request, ranks):
  """An encoding as tiktoken defines it, of our ranks in place of those that it would fetch."""
  tiktoken = pytest.importorskip("tiktoken")
  public = pytest.importorskip("tiktoken_ext.openai_public")
  ours = {token: rank for rank, token in enumerate(ranks)}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(public, "load_tiktoken_bpe", lambda *args, **kwargs: ours)
    fields = public.ENCODING_CONSTRUCTORS[request.param]()
  special = fields.pop("special_tokens")
  fields.pop("explicit_n_vocab", None)
  return request.param, tiktoken.Encoding(**fields, special_tokens={}), special


class TestTiktoken:
  @given(ANY_TEXT)
  @settings(max_examples=60)
  def test_ids_are_those_of_the_bpe_that_made_the_ranks(self, ranks, maker, text):
    ours = converted(tuple(ranks), tiktoken_file._CL100K)
    assert ours.encode(text, add_special_tokens=False).ids == maker[0].encode(text).ids

  @pytest.mark.formats
  @given(ANY_TEXT)
  @example(ODD)
  @settings(max_examples=200)
  def test_ids_are_those_of_tiktoken(self, publisher, ranks, text):
    name, encoding, special = publisher
    known = tiktoken_file.ENCODINGS[name]
    assert known.special == special
    ours = converted(tuple(ranks), known.pattern)
    assert ours.encode(text, add_special_tokens=False).ids == encoding.encode_ordinary(text)

  @pytest.mark.formats
  @given(st.text("abc", max_size=30), st.randoms(use_true_random=False))
  @settings(max_examples=100)
  def test_any_ranks_give_the_ids_of_tiktoken(self, text, random):
    tiktoken = pytest.importorskip("tiktoken")
    tokens = {bytes(random.choices(b"abc", k=random.randint(2, 5))) for _ in range(25)}
    tokens = random.sample(sorted(tokens), len(tokens))  # of no training: some cannot be reached
    ranks = [*(bytes([i]) for i in range(256)), *tokens]
    theirs = tiktoken.Encoding(
      "x", pat_str=r"\w+", mergeable_ranks={t: i for i, t in enumerate(ranks)}, special_tokens={}
    )
    assert converted(tuple(ranks), r"\w+").encode(text).ids == theirs.encode_ordinary(text)

  def test_special_tokens_and_holes(self, own_ranks, ranks):
    tokenizer = build(own_ranks)
    n = len(ranks)
    assert tokenizer.eos_id == tokenizer.token_id("<|endoftext|>") == n + 3
    assert tokenizer.token_id("<|im_end|>") == n + 5
    assert tokenizer.token_id(f"<|unused_{n}|>") == n
    assert tokenizer.pad_id == tokenizer.eos_id, "no token for padding has a name"
    assert tokenizer.vocab_size == n + 6

  def test_what_is_refused(self, tmp_path, ranks):
    path = tmp_path / "cl100k_base.tiktoken"
    for raw, said in {
      b"": "no rank for the byte 0",
      b"IQ== 0\n!! 1\n": "line 2 is not a token in base64 and its rank",
      b"IQ==\n": "line 1 is not a token",
    }.items():
      path.write_bytes(raw)
      with pytest.raises(ValueError, match=rf"is not a rank file of tiktoken: .*{said}"):
        build(path)
    path = rank_file(tmp_path / "o200k_base.tiktoken", ranks)
    with pytest.raises(ValueError, match=rf"has {len(ranks)} ranks, and that encoding has 199,998"):
      build(path)
    path = rank_file(tmp_path / "mine.tiktoken", ranks)
    with pytest.raises(ValueError, match=r"is known of r50k_base, .* into .*mine\.pattern"):
      build(path)
    path.with_suffix(".pattern").write_text("(")
    with pytest.raises(ValueError, match=r"is not a rank file of tiktoken: .*parenthesis"):
      build(path)


@pytest.mark.formats
class TestSentencePiece:
  def test_pieces_of_a_user_that_look_special_are_no_text(self, tmp_path):
    file = spm_file(tmp_path / "a.model", **SPM["spm-bpe"])
    tokenizer = build(file)
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_file=str(file))
    mark, lines = (theirs.piece_to_id(name) for name in ("<|im_end|>", "\n\n"))
    assert mark in theirs.encode("a<|im_end|>") and lines in theirs.encode("a\n\nb")
    assert mark not in tokenizer.encode("a<|im_end|>") and lines in tokenizer.encode("a\n\nb")
    assert tokenizer.token_id("<|im_end|>") == mark

  @given(ANY_TEXT)
  @settings(max_examples=100)
  def test_ids_are_those_of_the_library(self, tokenizer, file, text):
    spm = pytest.importorskip("sentencepiece")
    if file.suffix == ".model" and not any(mark in text for mark in MARKS):
      theirs = spm.SentencePieceProcessor(model_file=str(file))
      assert tokenizer.encode(text) == theirs.encode(text)

  def test_its_own_normaliser_is_said_and_kept(self, tmp_path, caplog):
    changes = dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    with caplog.at_level(logging.WARNING, logger="absl"):
      tokenizer = build(spm_file(tmp_path / "a.model", **changes))
    assert "changes some text" in caplog.text and "'  a' comes back as 'a'" in caplog.text

    for text in ("ａ① ﬁ", "x  y ", "Å", TEXT[1], TEXT[3]):
      kept = " ".join(unicodedata.normalize("NFKC", text).split())
      assert tokenizer.decode(tokenizer.encode(text)) == kept
      assert tokenizer.decode(tokenizer.encode(kept)) == kept  # once changed

  def test_special_pieces(self, tmp_path):
    file = spm_file(tmp_path / "a.model", pad_id=3, user_defined_symbols=["<turn>"])
    config = {
      "eos_token": {"content": "<turn>"},
      "added_tokens_decoder": {"425": {"content": "<x>"}},
    }
    assert build(file).eos_id == 2 and build(file).pad_id == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build(file)
    assert tokenizer.eos_id == 4 and 4 not in tokenizer.encode("a<turn>")
    assert tokenizer.token_id("<x>") == 425 and tokenizer.vocab_size == 426
    assert tokenizer.token_id("no piece") is None
    assert tokenizer.decode([425, *tokenizer.encode("é"), 424]) == "é"

  def test_what_is_refused(self, tmp_path, ranks):
    file = spm_file(tmp_path / "a.model", byte_fallback=False, vocab_size=150)
    with pytest.raises(ValueError, match=r"no pieces for bytes, .* Train it with --byte_fallback"):
      build(file)
    path = spm_file(tmp_path / "a.model")
    path.write_bytes(path.read_bytes()[:999])
    with pytest.raises(ValueError, match="is not a model of SentencePiece: "):
      build(path)
    with pytest.raises(ValueError, match=r"It is a rank file: name it NAME\.tiktoken"):
      build(rank_file(tmp_path / "b.model", ranks))


def test_without_the_library(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "sentencepiece", None)
  (tmp_path / "a.model").write_bytes(b"")
  with pytest.raises(ValueError, match=r"not installed: pip install 'ats_jax\[sentencepiece\]'"):
    build(tmp_path / "a.model")
