"""Conversations as packed rows: weights, exactness, the cache, and what is refused."""

import dataclasses
import importlib
import json
import logging
import pickle

import numpy as np
import pytest
from chat_cases import ANSWERS, DIALOGUES, in_loss
from loading import ONE_HOST, all_rows, assert_each_token_once, assert_same, find_fault

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema.setting import Table
from ats_jax.config.schema.text_format import Chat, Text
from ats_jax.data.batch import FIELDS
from ats_jax.data.chat.tokenizer import ChatTokenizer, Form, with_template
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.look import explain
from ats_jax.data.look.checks import check_files
from ats_jax.data.look.stats import stats
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.splits import open_datasets, prepare
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile
from ats_jax.data.tokens.file import has_same_ids, load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import ByteTokenizer, build_tokenizer

MARKERS = ("<|im_start|>", "<|im_end|>")
WEIGHTS = Table(assistant=1.0, user=0.25)


@pytest.fixture
def chat_config(config, write):
  """A DataConfig for the twelve dialogues, or for other records."""
  path = write("dialogues.jsonl", DIALOGUES)

  def make(chat="chat", records=None, **changes):
    paths = (str(write("records.jsonl", records) if records else path),)
    defaults = dict(paths=paths, format=chat, packing="best_fit", seq_len=512)
    return config(**{**defaults, **changes})

  return make


@pytest.fixture
def opened(chat_config):
  """The training split; both splits if some documents are held out."""

  def make(*arguments, **changes):
    train, held = open_datasets(chat_config(*arguments, **changes), 0)
    return (train, held) if "validation_fraction" in changes else train

  return make


def weighed(ds):
  """(ids of the targets, weights) of each conversation; the eos behind it left out."""
  batch = all_rows(ds)
  for row in range(len(batch["tokens"])):
    for segment in range(1, batch["segment_ids"][row].max() + 1):
      here = batch["segment_ids"][row] == segment
      targets, weights = batch["targets"][row][here], batch["loss_mask"][row][here]
      assert targets[-1] == ds.info.tokenizer.eos_id and weights[-1] == 0.0
      yield targets[:-1], weights[:-1]


def assert_answers_in_the_loss(ds):
  found = sorted(in_loss(*d, ds.info.tokenizer, "", "") for d in weighed(ds))
  assert found == sorted(ANSWERS["chatml"])


def test_rows_have_the_weights_of_their_conversations(opened):
  train = opened()
  batch = all_rows(train)
  assert {name: x.dtype for name, x in batch.items()} == {n: f.dtype for n, f in FIELDS.items()}
  assert batch["segment_ids"].max() > 1, "conversations share rows"
  assert_answers_in_the_loss(train)
  counted = sum(int((weights > 0).sum()) for _, weights in weighed(train))
  assert stats(train.info)["targets in the loss"].startswith(f"{counted} (")
  assert train.info.bytes_per_token == 0  # bits per byte are not told of answers alone


def test_each_target_comes_once_with_its_weight(opened):
  train = opened(Chat(weights=WEIGHTS), seq_len=300)
  assert_each_token_once(train, ONE_HOST)

  class Wrong(TrainBatches):
    def __next__(self):
      batch = super().__next__()
      if batch["targets"].max() < 300:  # the real reading, not the numbered one
        place = np.argwhere(batch["loss_mask"] > 0)[0]
        batch["loss_mask"][tuple(place)] = 0.0
      return batch

  assert "has a wrong weight" in find_fault(train, batches=Wrong).difference


def test_weights_are_not_part_of_the_cached_text_but_of_the_rows(opened, tmp_path):
  one, other = opened(), opened(Chat(weights=WEIGHTS))
  assert len(list((tmp_path / "cache").glob("corpus-*[!k]"))) == 1
  assert_same(all_rows(pickle.loads(pickle.dumps(other))), all_rows(other))
  assert all_rows(other)["loss_mask"].sum() > all_rows(one)["loss_mask"].sum()
  last = opened(Chat(answers="last"))
  assert len({ds.info.fingerprint for ds in (one, other, last)}) == 3


def test_conversations_are_whole_and_those_that_do_not_fit_are_left_out(opened, caplog):
  with caplog.at_level(logging.INFO, logger="absl"):
    whole = opened(packing="auto")
  assert "packed by best_fit" in caplog.text
  assert whole.info.fingerprint == opened().info.fingerprint
  longest = max(len(ids) for ids, _ in weighed(whole)) + 1
  assert opened(seq_len=longest).info.num_documents == 12
  less = opened(seq_len=longest - 1)
  assert less.info.num_documents == 11
  assert less.info.report["skipped"] == {f"longer than a row of data.seq_len={longest - 1}": 1}
  assert "1 longer than a row" in caplog.text
  with pytest.raises(ValueError, match=r"Nothing is left .* 12 longer than a row .*seq_len=8"):
    opened(seq_len=8)


def test_what_teaches_nothing_or_has_no_place_is_left_out_and_named(opened, caplog):
  muted = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
  records = [{"messages": muted}, {"prompt": "abc", "completion": "def"}]
  train = opened(Chat(template="plain"), records, seq_len=8)
  assert train.info.num_documents == 1
  assert train.info.report["skipped"] == {"without a token in the loss": 1}
  records = [*DIALOGUES[:2], {"messages": [{"role": "assistant", "content": "first"}]}]
  train = opened(Chat(template="gemma"), records, seq_len=96)
  assert train.info.report["malformed"] == {"turns do not alternate": 1}
  assert "records.jsonl:3: the template has turns of user and assistant in turn" in caplog.text


def test_documents_are_held_out_as_ever(opened):
  rows = [{"prompt": f"question {i}", "completion": "yes"} for i in range(200)]
  train, valid = opened(records=rows, validation_fraction=0.2, seq_len=64)
  assert train.info.num_documents + valid.info.num_documents == 200
  assert 20 < valid.info.num_documents < 60
  assert valid.info.tokenizer is train.info.tokenizer


def test_conversations_are_prepared_ahead(opened, chat_config, tmp_path):
  one, cfg = opened(), chat_config()
  prepare(cfg, tmp_path / "out", TokeniseOptions())
  ahead = dataclasses.replace(cfg, paths=(str(tmp_path / "out"),))
  assert_same(all_rows(one), all_rows(open_datasets(ahead, 0)[0]))
  for changes in ({"format": Chat(template="gemma")}, {"format": Text(), "packing": "concat"}):
    with pytest.raises(ValueError, match="holds ids of another tokenizer"):
      open_datasets(dataclasses.replace(ahead, **changes), 0)


@pytest.mark.formats
def test_records_are_read_from_parquet(opened, tmp_path):
  arrow = importlib.import_module("pyarrow")
  parquet = importlib.import_module("pyarrow.parquet")
  rows = [{"messages": d["messages"]} for d in DIALOGUES]
  parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
  assert_answers_in_the_loss(opened(paths=(str(tmp_path / "d.parquet"),)))


def test_validate_names_records_that_are_no_conversation(write, config):
  path = str(write("some.jsonl", [*DIALOGUES, {"messages": []}]))
  report = Report(strict=False)
  cfg = config(paths=(path,), format="chat")
  check_files([SourceFile(path, "some.jsonl", "jsonl")], cfg, None, report)
  assert report.first == [f"{path}:13: the conversation has no turn"]
  assert report.balance() == {"records": 13, "documents": 12, "dropped": 1}


def test_a_bpe_learns_from_what_is_said(opened):
  train = opened(tokenizer="bpe", bpe_vocab_size=300)
  tokenizer = train.info.tokenizer
  assert isinstance(tokenizer, ChatTokenizer) and sorted(tokenizer.special) == sorted(MARKERS)
  assert tokenizer.vocab_size == tokenizer.inner.vocab_size + 2
  answers = {tokenizer.decode(ids[weights > 0]) for ids, weights in weighed(train)}
  assert "A line of tokens." in answers


class TestTokenizer:
  def test_it_is_kept_with_the_run_and_brings_its_template(self, tmp_path, config):
    path = tmp_path / "tokenizer.json"
    made = ChatTokenizer(ByteTokenizer(), Form("gemma"))
    save_tokenizer(made, path)
    for copy in (load_tokenizer(path), pickle.loads(pickle.dumps(made))):
      assert isinstance(copy, ChatTokenizer)
      assert (copy.fingerprint, copy.special) == (made.fingerprint, made.special)
      assert (copy.vocab_size, copy.end_ids) == (261, {257, made.special["<end_of_turn>"]})
    cfg = config(tokenizer=str(path))
    again = with_template(build_tokenizer(cfg, list), Chat(template="tokenizer"), cfg.tokenizer)
    assert again.fingerprint == made.fingerprint
    # A run on conversations may begin with a run on text.
    of_text = ByteTokenizer()
    assert has_same_ids(made, of_text) and has_same_ids(made, made)
    assert not has_same_ids(of_text, made)
    assert not has_same_ids(ChatTokenizer(ByteTokenizer(), Form("chatml")), made)

  def test_special_tokens_decode_to_nothing(self):
    made = ChatTokenizer(ByteTokenizer(), Form("chatml"))
    assert made.decode([*made.special.values(), *b"a", made.eos_id]) == "a"
    with pytest.raises(ValueError, match="outside the vocabulary"):
      made.decode([made.vocab_size])


class TestOfAFile:
  """A tokenizer.json that has, or has not, the special tokens of a template."""

  MARKED = tuple((name, True) for name in MARKERS)

  @pytest.fixture
  def made(self, tmp_path, config):
    """A tokenizer with a template, of a file with these special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    spec = json.loads(inner.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def make(*added, template="chatml"):
      spec["added_tokens"] = [
        {"id": 256 + i, "content": name, **flags, "special": special}
        for i, (name, special) in enumerate(added)
      ]
      path = tmp_path / "tokenizer.json"
      path.write_text(json.dumps(spec))
      of_text = build_tokenizer(config(tokenizer=str(path)), list)
      return with_template(of_text, Chat(template=template), str(path))

    return make

  def test_its_own_ids_are_used_or_missing_ones_added(self, made):
    assert made(*self.MARKED).special == dict(zip(MARKERS, (256, 257), strict=True))
    added = made()
    assert added.special == dict(zip(MARKERS, (258, 259), strict=True))  # behind bos and eos
    assert added.vocab_size == 260

  @pytest.mark.parametrize("holder", ["chat_template.jinja", "tokenizer_config.json", "several"])
  def test_its_own_template_is_read(self, tmp_path, made, holder):
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    if holder == "chat_template.jinja":
      (tmp_path / holder).write_text(source)
    else:
      several = [{"name": "tools", "template": ""}, {"name": "default", "template": source}]
      held = {"chat_template": several if holder == "several" else source}
      mark = "\ufeff" if holder == "several" else ""  # as editors of Windows put it there
      path = tmp_path / "tokenizer_config.json"
      path.write_text(mark + json.dumps(held), encoding="utf-8")
    found = made(*self.MARKED, template="tokenizer")
    assert isinstance(found, ChatTokenizer) and found.form.source == source
    assert found.end_ids == {257, found.eos_id}

  def test_what_is_refused(self, tmp_path, made):
    with pytest.raises(ValueError, match=r"the text '<\|im_end\|>' as a special token"):
      made((MARKERS[0], True), (MARKERS[1], False))  # which text can reach
    with pytest.raises(ValueError, match=r"neither a chat_template.jinja nor .*Name a .jinja file"):
      made(template="tokenizer")
    path = tmp_path / "a.jinja"
    with pytest.raises(ValueError, match=r"a.jinja' cannot be read"):
      made(template=str(path))
    path.write_text("{{ messages }}")
    with pytest.raises(ValueError, match=r"weighs user, but of jinja only the answers are known"):
      with_template(ByteTokenizer(), Chat(template=str(path), weights=WEIGHTS))


def test_a_row_is_explained(opened, config, write):
  train = opened(Chat(weights=WEIGHTS))
  title, header, *lines = explain.explain(train, 0, coloured=False)
  batch = train.read([0])
  used = int((batch["segment_ids"] > 0).sum())
  assert title.startswith(f"row 0 of training: {used} targets in ")
  assert f"{int((batch['loss_mask'] > 0).sum())} of them in the loss" in title
  assert header.split() == ["place", "segment", "weight", "role", "id", "token"]
  assert len(lines) == used and "\x1b" not in "".join(lines)
  ends = [line.split() for line in lines if line.endswith("<|im_end|>")]
  assert {tuple(e[2:4]) for e in ends} == {("1", "assistant"), ("0.25", "user"), ("0", "system")}
  coloured = list(explain.explain(train, 0, coloured=True))[2:]
  assert [line.split("m", 1)[1].removesuffix("\x1b[0m") for line in coloured] == lines
  styles = {line.split()[4]: line[2 : line.index("m")] for line in coloured if "'" in line}
  assert styles["assistant"] in ("32", "32;1") and styles["user"] in ("34", "34;1")

  of_text, _ = open_datasets(config(paths=(str(write("a.txt", "héllo" * 5)),), seq_len=16), 0)
  first, second = (list(explain.explain(of_text, row, coloured=False))[2:] for row in (0, 1))
  assert second[0].split()[1:3] == ["1", "1"]
  assert any(line.endswith("(eos)") for line in first + second)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"template": "alpaca"}, r"Choose one of: chatml, .*tokenizer for .*\.jinja"),
    ({"weights": {"assistant": 0.0, "user": 1.0}}, r"never learn to stop.*e.g. assistant=1"),
    ({"weights": {"user": 1.0}}, "never learn to stop"),
    ({"weights": {"bot": 1.0}}, "no role 'bot'. The roles are system, user"),
    ({"weights": {"assistant": 2.0}}, r"format.weights\['assistant'\]=2.0 is too large"),
    ({"weights": {"assistant": float("nan")}}, "not a finite number"),
    ({"answers": "first"}, "Choose one of: all, last"),
    ({"text_field": "content"}, r"text_field=content does nothing with data.format.sources="),
    ({"name": "text", "marks": True}, "marks is a setting of data.format.name=chat"),
  ],
)
def test_wrong_settings_are_refused(changes, match):
  values = base_config()
  values.data.format = {"name": "chat", **changes}
  with pytest.raises(ValueError, match=match):
    from_config_dict(values)


def test_conversations_are_not_cut():
  data = {"format": "chat", "packing": "concat"}
  with pytest.raises(ValueError, match=r"cuts conversations .* set data.packing=best_fit"):
    from_config_dict({"data": data})
  assert from_config_dict({"data": {"format": "chat"}}).data.packing_kind == "best_fit"
  assert from_config_dict({"data": {"format": "text"}}).data.packing_kind == "concat"


def test_a_source_has_the_format_that_is_said_of_it():
  chat = Chat(text_field="body", sources=("talk",), answers="last")
  assert chat.of_source("web") == chat.of_source("") == Text(text_field="body")
  assert chat.of_source("talk") == Chat(answers="last")
  assert Chat().of_source("web") == Chat() and Text().of_source("web") == Text()
