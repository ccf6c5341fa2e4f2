"""The tokenizer of an export has all special tokens, at their ids."""

import io
import json
from pathlib import Path

import pytest
import tokenizers
from hf_folders import make_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ats_jax.bridge.convert import config_of, import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.folder import open_model_folder
from ats_jax.checkpoint import workdir
from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.tokenizer import with_template
from ats_jax.data.tokens.export import files_of
from ats_jax.data.tokens.file import save_tokenizer
from ats_jax.data.tokens.tokenizer import ByteTokenizer, build_tokenizer
from ats_jax.store.paths import parse

TEXT = ["la forêt, 漢字 and 🙂\n" * 20, "def f(x):\n  return x\n" * 9]
SAID = "a  b\n\tçé 漢字 🙂\u200d <|im_end|> </s> don't  \n"


def published(tmp_path) -> str:
  """A tokenizer.json whose vocabulary has a hole, as one where tokens were taken out."""
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<s>", "</s>"],
    show_progress=False,
  )
  inner.train_from_iterator(TEXT, trainer)
  spec = json.loads(inner.to_str())
  vocab = spec["model"]["vocab"]
  vocab[max(vocab, key=vocab.get)] += 2
  (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
  return str(tmp_path / "tokenizer.json")


@pytest.fixture(params=["bytes", "bpe", "file"])
def words(request, tmp_path):
  if request.param == "bytes":
    return ByteTokenizer()
  name = published(tmp_path) if request.param == "file" else "bpe"
  return build_tokenizer(DataConfig(tokenizer=name, bpe_vocab_size=320), lambda: TEXT)


@pytest.mark.parametrize("template", [None, "llama3"])
def test_ids_names_and_bos(words, template):
  words = with_template(words, Chat(template=template)) if template else words
  files = files_of(words)
  inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
  assert inner.get_vocab_size() == words.vocab_size
  for name, i in words.special_tokens().items():
    assert inner.token_to_id(name) == i
    assert inner.encode(name, add_special_tokens=False).ids == [i]
  config = json.loads(files["tokenizer_config.json"])
  for role in ("bos", "eos", "pad"):
    assert inner.token_to_id(config[f"{role}_token"]) == getattr(words, f"{role}_id")
  inner.encode_special_tokens = True
  assert inner.encode(SAID).ids == [words.bos_id, *words.encode(SAID)]
  assert inner.decode(words.encode(SAID)) == SAID
  if template:
    ends = json.loads(files["generation_config.json"])["eos_token_id"]
    assert ends == sorted({words.eos_id, words.token_id(words.template.ends[0])})


def test_what_was_exported_is_the_same_tokenizer(words, tmp_path):
  source = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
  (tmp_path / "t.jinja").write_text(source)
  words = with_template(words, Chat(template=str(tmp_path / "t.jinja")))
  (tmp_path / "out").mkdir()
  for name, content in files_of(words).items():
    (tmp_path / "out" / name).write_bytes(content)
  assert (tmp_path / "out/chat_template.jinja").read_text() == source
  again = build_tokenizer(DataConfig(tokenizer=f"{tmp_path}/out/tokenizer.json"), lambda: [])
  assert again.encode(SAID) == words.encode(SAID) and again.vocab_size == words.vocab_size
  for role in ("bos_id", "eos_id", "pad_id"):
    assert getattr(again, role) == getattr(words, role)


def test_an_export_has_them(tmp_path):
  folder = make_folder(tmp_path / "hf")
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  chat = with_template(ByteTokenizer(), Chat())
  save_tokenizer(chat, parse(tmp_path / "run") / workdir.TOKENIZER)
  export(parse(tmp_path / "run"), tmp_path / "out")
  inner = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
  assert inner.token_to_id("<|im_end|>") == 260 and inner.token_to_id("<|eos|>") == 257


def test_a_folder_whose_tokenizer_is_a_model(tmp_path):
  folder = make_folder(tmp_path / "hf")
  with pytest.raises(ValueError, match=r"holds no tokenizer\.json or tokenizer\.model"):
    config_of(open_model_folder(folder))
  (folder / "tokenizer.model").write_bytes(b"")
  assert config_of(open_model_folder(folder)).data.tokenizer == str(folder / "tokenizer.model")


@pytest.mark.formats
@pytest.mark.parametrize(
  "rules",
  [
    dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
    dict(normalization_rule_name="identity", add_dummy_prefix=False),
  ],
)
def test_a_bpe_of_sentencepiece(tmp_path, rules):
  words = of_pieces(tmp_path, **rules)
  files = files_of(words)
  assert files["tokenizer.model"] == words.model
  inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
  inner.encode_special_tokens = True  # "as ordinary text"

  @given(st.text(max_size=60) | st.text(" \n\tab漢é", max_size=30))
  @example(SAID)
  @settings(max_examples=60, deadline=None)
  def same(text):
    ids = words.encode(text)
    assert inner.encode(text, add_special_tokens=False).ids == ids
    assert inner.decode(ids) == words.decode(ids)

  same()
  assert inner.encode("a").ids[0] == words.bos_id == inner.token_to_id("<s>")


@pytest.mark.formats
def test_other_models_of_sentencepiece(tmp_path):
  files = files_of(of_pieces(tmp_path, user_defined_symbols=["<|pad|>", "ab"]))
  assert "tokenizer.json" not in files
  config = json.loads(files["tokenizer_config.json"])
  assert config["pad_token"] == "</s>", "<|pad|> is a piece of the model, which text can reach"
  assert not config.get("added_tokens_decoder")
  unigram = of_pieces(tmp_path, model_type="unigram", hard_vocab_limit=False)
  assert "tokenizer.json" not in files_of(unigram)


def of_pieces(folder, **rules):
  spm = pytest.importorskip("sentencepiece")
  out, lines = io.BytesIO(), [*Path(json.__file__).read_text().splitlines(), *TEXT[0].splitlines()]
  usual = dict(vocab_size=420, model_type="bpe", byte_fallback=True, minloglevel=2)
  spm.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=out, **{**usual, **rules}
  )
  (folder / "a.model").write_bytes(out.getvalue())
  return build_tokenizer(DataConfig(tokenizer=str(folder / "a.model")), lambda: [])
