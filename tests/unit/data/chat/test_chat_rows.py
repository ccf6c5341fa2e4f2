"""Conversations as packed rows: weights, exactness, the cache, and what is refused."""

import dataclasses
import importlib
import json
import logging
import pickle

import numpy as np
import pytest
from chat_cases import ANSWERS, DIALOGUES, in_loss

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema.setting import Table
from ats_jax.config.schema.text_format import Chat, Text
from ats_jax.data.batch import FIELDS
from ats_jax.data.chat.tokenizer import ChatTokenizer, Form, with_template
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.look import explain
from ats_jax.data.look.audit import audit
from ats_jax.data.look.checks import check_files
from ats_jax.data.look.stats import stats
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.splits import open_datasets, prepare
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile
from ats_jax.data.tokens.file import has_same_ids, load_tokenizer, save_tokenizer
from ats_jax.data.tokens.tokenizer import ByteTokenizer, build_tokenizer

MARKERS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def chat_config(config, write):
  """A DataConfig for the twelve dialogues, with a cache of its own."""
  paths = str(write("dialogues.jsonl", DIALOGUES))

  def make(chat="chat", **changes):
    defaults = dict(paths=(paths,), format=chat, packing="best_fit", seq_len=512)
    return config(**{**defaults, **changes})

  return make


def test_conversations_are_whole_unless_told_otherwise(chat_config, write, caplog):
  with caplog.at_level(logging.INFO, logger="absl"):
    train, _ = open_datasets(chat_config(packing="auto"), 0)
  assert "packed by best_fit" in caplog.text
  assert train.info.fingerprint == open_datasets(chat_config(), 0)[0].info.fingerprint
  text = chat_config("text", paths=(str(write("a.txt", "x" * 999)),), seq_len=32)
  one, other = (
    open_datasets(dataclasses.replace(text, packing=packing), 0)[0]
    for packing in ("auto", "concat")
  )
  assert one.info.fingerprint == other.info.fingerprint


def documents(ds, rows=None):
  """(ids of the targets, weights) of each segment of the rows; the eos behind it left out."""
  batch = ds.read_once(range(ds.info.num_rows) if rows is None else rows)
  for row in range(len(batch["tokens"])):
    for segment in range(1, batch["segment_ids"][row].max() + 1):
      here = batch["segment_ids"][row] == segment
      targets, weights = batch["targets"][row][here], batch["loss_mask"][row][here]
      assert targets[-1] == ds.info.tokenizer.eos_id and weights[-1] == 0.0
      yield targets[:-1], weights[:-1]


def test_rows_have_the_weights_of_their_conversations(chat_config):
  train, _ = open_datasets(chat_config(), 0)
  batch = train.read_once(range(train.info.num_rows))
  assert {name: x.dtype for name, x in batch.items()} == {n: f.dtype for n, f in FIELDS.items()}
  assert batch["segment_ids"].max() > 1, "conversations share rows"
  found = sorted(in_loss(*d, train.info.tokenizer, "", "") for d in documents(train))
  assert found == sorted(ANSWERS["chatml"])


def test_each_target_comes_once_with_its_weight(chat_config):
  """On 1, 2, 4 and 7 hosts, and with a change of their number in the middle."""
  train, _ = open_datasets(chat_config(Chat(weights=WEIGHTS), packing="best_fit", seq_len=300), 3)
  assert not [result.difference for result in audit(train) if result.difference]


WEIGHTS = Table(assistant=1.0, user=0.25)


def test_the_audit_sees_a_wrong_weight(chat_config):
  train, _ = open_datasets(chat_config(), 0)

  class Wrong(TrainBatches):
    def __next__(self):
      batch = super().__next__()
      if batch["targets"].max() < 300:  # the real reading, not the numbered one
        place = np.argwhere(batch["loss_mask"] > 0)[0]
        batch["loss_mask"][tuple(place)] = 0.0
      return batch

  assert "has a wrong weight" in next(audit(train, batches=Wrong)).difference


def test_a_run_goes_on_at_its_position(chat_config):
  train, _ = open_datasets(chat_config(seq_len=300), 0)
  how = dict(accum_steps=1, batch_size=2, local_rows=np.arange(2), num_workers=0, prefetch=1)
  with TrainBatches(train, **how) as batches:
    first = [next(batches) for _ in range(5)]
  with TrainBatches(train, **how) as batches:
    for _ in range(2):
      next(batches)
    position = json.loads(json.dumps(batches.position()))
  with TrainBatches(train, position=position, **how) as batches:
    for expected in first[2:]:
      found = next(batches)
      for name in FIELDS:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_weights_are_not_part_of_the_cached_text_but_of_the_rows(chat_config, tmp_path):
  one, _ = open_datasets(chat_config(), 0)
  other, _ = open_datasets(chat_config(Chat(weights=WEIGHTS)), 0)
  assert len(list((tmp_path / "cache").glob("corpus-*[!k]"))) == 1
  assert one.info.fingerprint != other.info.fingerprint
  copy = pickle.loads(pickle.dumps(other))
  for name in FIELDS:
    np.testing.assert_array_equal(copy.read_once([0])[name], other.read_once([0])[name])
  assert other.read_once([0])["loss_mask"].sum() > one.read_once([0])["loss_mask"].sum()
  last, _ = open_datasets(chat_config(Chat(answers="last")), 0)
  assert last.info.fingerprint not in (one.info.fingerprint, other.info.fingerprint)


def test_conversations_longer_than_a_row_are_left_out_and_counted(chat_config, caplog):
  longest = max(len(ids) for ids, _ in documents(open_datasets(chat_config(), 0)[0])) + 1
  whole, _ = open_datasets(chat_config(seq_len=longest), 0)
  less, _ = open_datasets(chat_config(seq_len=longest - 1), 0)
  assert (whole.info.num_documents, less.info.num_documents) == (12, 11)
  assert less.info.report["skipped"] == {f"longer than a row of data.seq_len={longest - 1}": 1}
  assert "1 longer than a row" in caplog.text
  with pytest.raises(
    ValueError, match=r"Nothing is left .* 12 longer than a row of data.seq_len=8"
  ):
    open_datasets(chat_config(seq_len=8), 0)


def test_conversations_without_a_token_in_the_loss_are_left_out(chat_config, write):
  muted = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
  path = str(write("muted.jsonl", [{"messages": muted}, {"prompt": "abc", "completion": "def"}]))
  train, _ = open_datasets(chat_config(Chat(template="plain"), paths=(path,), seq_len=8), 0)
  assert (train.info.num_documents, train.info.report["skipped"]) == (
    1,
    {"without a token in the loss": 1},
  )


def test_what_a_template_has_no_place_for_is_counted(chat_config, write, caplog):
  rows = [*DIALOGUES[:2], {"messages": [{"role": "assistant", "content": "first"}]}]
  path = str(write("some.jsonl", rows))
  train, _ = open_datasets(chat_config(Chat(template="gemma"), paths=(path,), seq_len=96), 0)
  assert train.info.report["malformed"] == {"turns do not alternate": 1}
  assert f"{path}:3: the template has turns of user and assistant in turn" in caplog.text


def test_documents_are_held_out_as_ever(chat_config, write):
  rows = [{"prompt": f"question {i}", "completion": "yes"} for i in range(200)]
  path = str(write("many.jsonl", rows))
  train, valid = open_datasets(chat_config(paths=(path,), validation_fraction=0.2, seq_len=64), 0)
  assert train.info.num_documents + valid.info.num_documents == 200
  assert 20 < valid.info.num_documents < 60
  assert valid.info.tokenizer is train.info.tokenizer


def test_conversations_are_prepared_ahead(chat_config, tmp_path):
  cfg = chat_config()
  opened = prepare(cfg, tmp_path / "out", TokeniseOptions())
  assert opened.corpus.report["balance"] == {"records": 12, "documents": 12, "dropped": 0}
  ahead = dataclasses.replace(cfg, paths=(str(tmp_path / "out"),))
  one, other = open_datasets(cfg, 0)[0], open_datasets(ahead, 0)[0]
  for name in FIELDS:
    np.testing.assert_array_equal(one.read_once([0])[name], other.read_once([0])[name])
  for changes in ({"format": Chat(template="gemma")}, {"format": Text(), "packing": "concat"}):
    with pytest.raises(ValueError, match="holds ids of another tokenizer"):
      open_datasets(dataclasses.replace(ahead, **changes), 0)


@pytest.mark.formats
def test_records_are_read_from_parquet(chat_config, tmp_path):
  arrow = importlib.import_module("pyarrow")
  parquet = importlib.import_module("pyarrow.parquet")
  rows = [{"messages": d["messages"]} for d in DIALOGUES]
  parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
  train, _ = open_datasets(chat_config(paths=(str(tmp_path / "d.parquet"),)), 0)
  found = sorted(in_loss(*d, train.info.tokenizer, "", "") for d in documents(train))
  assert found == sorted(ANSWERS["chatml"])


def test_validate_names_records_that_are_no_conversation(chat_config, write):
  path = str(write("some.jsonl", [*DIALOGUES, {"messages": []}]))
  report = Report(strict=False)
  cfg = chat_config(paths=(path,))
  check_files([SourceFile(path, "some.jsonl", "jsonl")], cfg, None, report)
  assert report.first == [f"{path}:13: the conversation has no turn"]
  assert report.balance() == {"records": 13, "documents": 12, "dropped": 1}


def test_a_bpe_learns_from_what_is_said(chat_config):
  train, _ = open_datasets(chat_config(tokenizer="bpe", bpe_vocab_size=300), 0)
  assert isinstance(train.info.tokenizer, ChatTokenizer)
  assert sorted(train.info.tokenizer.special) == sorted(MARKERS)
  assert train.info.tokenizer.vocab_size == train.info.tokenizer.inner.vocab_size + 2
  texts = {train.info.tokenizer.decode(ids[weights > 0]) for ids, weights in documents(train)}
  assert "A line of tokens." in texts


def test_bits_per_byte_are_not_told_of_answers_alone(chat_config):
  assert open_datasets(chat_config(), 0)[0].info.bytes_per_token == 0


def test_stats_count_what_is_in_the_loss(chat_config):
  train, _ = open_datasets(chat_config(), 0)
  counted = sum(int((weights > 0).sum()) for _, weights in documents(train))
  assert stats(train.info)["targets in the loss"].startswith(f"{counted} (")


class TestTokenizer:
  def test_it_is_kept_with_the_run(self, tmp_path):
    made = ChatTokenizer(ByteTokenizer(), Form("gemma"))
    save_tokenizer(made, tmp_path / "tokenizer.json")
    for copy in (load_tokenizer(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(made))):
      assert isinstance(copy, ChatTokenizer)
      assert (copy.fingerprint, copy.special) == (made.fingerprint, made.special)
      assert (copy.vocab_size, copy.end_ids) == (261, {257, made.special["<end_of_turn>"]})

  def test_one_of_a_run_brings_its_template(self, tmp_path, config):
    made = ChatTokenizer(ByteTokenizer(), Form("gemma"))
    save_tokenizer(made, tmp_path / "tokenizer.json")
    cfg = config(tokenizer=str(tmp_path / "tokenizer.json"))
    again = with_template(build_tokenizer(cfg, list), Chat(template="tokenizer"), cfg.tokenizer)
    assert again.fingerprint == made.fingerprint

  def test_a_tuned_run_may_begin_with_a_run_on_text(self):
    of_text, of_chats = ByteTokenizer(), ChatTokenizer(ByteTokenizer(), Form("gemma"))
    assert has_same_ids(of_chats, of_text) and has_same_ids(of_chats, of_chats)
    assert not has_same_ids(of_text, of_chats)
    assert not has_same_ids(ChatTokenizer(ByteTokenizer(), Form("chatml")), of_chats)

  def test_special_tokens_decode_to_nothing(self):
    made = ChatTokenizer(ByteTokenizer(), Form("chatml"))
    assert made.decode([*made.special.values(), *b"a", made.eos_id]) == "a"
    with pytest.raises(ValueError, match="outside the vocabulary"):
      made.decode([made.vocab_size])


class TestOfAFile:
  """A tokenizer.json that has, or has not, the special tokens of a template."""

  def made(self, folder, config, **changes):
    cfg = config(tokenizer=str(folder / "tokenizer.json"), **changes)
    return with_template(build_tokenizer(cfg, list), Chat())

  def written(self, folder, *added):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    spec = json.loads(inner.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] = [
      {"id": 256 + i, "content": name, **flags, "special": special}
      for i, (name, special) in enumerate(added)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder

  def test_its_own_ids_are_used(self, tmp_path, config):
    folder = self.written(tmp_path, *((name, True) for name in MARKERS))
    assert self.made(folder, config).special == dict(zip(MARKERS, (256, 257), strict=True))

  def test_missing_ones_are_added_behind_all_others(self, tmp_path, config):
    made = self.made(self.written(tmp_path), config)
    assert made.special == dict(zip(MARKERS, (259, 260), strict=True))  # behind bos, eos and pad
    assert made.vocab_size == 261

  def test_one_that_text_can_reach_is_refused(self, tmp_path, config):
    folder = self.written(tmp_path, (MARKERS[0], True), (MARKERS[1], False))
    with pytest.raises(ValueError, match=r"the text '<\|im_end\|>' as a special token"):
      self.made(folder, config)

  @pytest.mark.parametrize("holder", ["chat_template.jinja", "tokenizer_config.json", "several"])
  def test_its_own_template_is_read(self, tmp_path, config, holder):
    folder = self.written(tmp_path, *((name, True) for name in MARKERS))
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    if holder == "chat_template.jinja":
      (folder / holder).write_text(source)
    else:
      several = [{"name": "tools", "template": ""}, {"name": "default", "template": source}]
      held = {"chat_template": several if holder == "several" else source}
      (folder / "tokenizer_config.json").write_text(json.dumps(held))
    cfg = config(tokenizer=str(folder / "tokenizer.json"))
    made = with_template(build_tokenizer(cfg, list), Chat(template="tokenizer"), cfg.tokenizer)
    assert isinstance(made, ChatTokenizer) and made.form.source == source
    assert made.end_ids == {257, made.eos_id}

  def test_without_one_it_is_said(self, tmp_path, config):
    folder = self.written(tmp_path)
    cfg = config(tokenizer=str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"neither a chat_template.jinja nor .*Name a .jinja file"):
      with_template(build_tokenizer(cfg, list), Chat(template="tokenizer"), cfg.tokenizer)
    gone = Chat(template=str(tmp_path / "gone.jinja"))
    with pytest.raises(ValueError, match=r"gone.jinja' cannot be read"):
      with_template(ByteTokenizer(), gone)

  def test_of_jinja_only_answers_can_be_weighed(self, tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    chat = Chat(template=str(tmp_path / "a.jinja"), weights=Table(WEIGHTS))
    with pytest.raises(ValueError, match=r"weighs user, but of jinja only the answers are known"):
      with_template(ByteTokenizer(), chat)


def test_a_row_is_explained(chat_config):
  train, _ = open_datasets(chat_config(Chat(weights=WEIGHTS)), 0)
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


def test_a_row_of_text_is_explained(config, write):
  train, _ = open_datasets(config(paths=(str(write("a.txt", "héllo" * 5)),), seq_len=16), 0)
  lines = list(explain.explain(train, 1, coloured=False))[2:]
  assert lines[0].split()[1:3] == ["1", "1"]
  assert any(
    line.endswith("(eos)") for line in [*lines, *explain.explain(train, 0, coloured=False)]
  )


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"template": "alpaca"}, r"Choose one of: chatml, .*tokenizer for .*\.jinja"),
    ({"weights": {"assistant": 0.0, "user": 1.0}}, r"never learn to stop.*e.g. assistant=1"),
    ({"weights": {"user": 1.0}}, "never learn to stop"),
    ({"weights": {"bot": 1.0}}, "no role 'bot'. The roles are system, user"),
    ({"weights": {"assistant": 2.0}}, r"format.weights\['assistant'\]=2.0 is too large"),
    ({"weights": {"assistant": float("nan")}}, "not a finite number"),
    ({"weights": {"assistant": "much"}}, "must be float, got 'much'"),
    ({"answers": "first"}, "Choose one of: all, last"),
    ({"text_field": "content"}, r"text_field=content does nothing with data.format.sources="),
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


@pytest.mark.parametrize("name", ["template", "sources", "weights", "answers", "marks"])
def test_text_has_no_setting_of_conversations(name):
  value = getattr(Chat(), name)
  with pytest.raises(ValueError, match=f"data.format.{name} is a setting of data.format.name=chat"):
    from_config_dict({"data": {"format": {"name": "text", name: value}}})


def test_a_source_has_the_format_that_is_said_of_it():
  chat = Chat(text_field="body", sources=("talk",), answers="last")
  assert chat.of_source("web") == chat.of_source("") == Text(text_field="body")
  assert chat.of_source("talk") == Chat(answers="last")
  assert Chat().of_source("web") == Chat() and Text().of_source("web") == Text()
