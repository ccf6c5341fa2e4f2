"""Pairs of answers: the schemas of their records, their rows, and what is refused."""

import pickle

import numpy as np
import pytest
from helpers import tiny_config
from loading import all_rows, assert_each_token_once, assert_same

from ats_jax.data.chat.conversation import MalformedError
from ats_jax.data.chat.pairs import read_pair
from ats_jax.data.rows.contract import with_documents
from ats_jax.data.splits import open_datasets

USER = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("yes", "n"))
SHAREGPT = {"from": "gpt", "value": "yes"}, {"from": "gpt", "value": "n"}
SYSTEM = {"role": "system", "content": "s"}
SCHEMAS = {
  "texts": {"prompt": "q", "chosen": "yes", "rejected": "n"},
  "turns": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
  "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
  "whole ones beside their prompt": {
    "prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0
  },
  "ShareGPT": {
    "conversations": [{"from": "human", "value": "q"}],
    "chosen": SHAREGPT[0],
    "rejected": SHAREGPT[1],
  },
  "a question": {"question": "q", "chosen": "yes", "rejected": "n"},
  "an instruction": {"instruction": "q", "input": "", "chosen": "yes", "rejected": "n"},
  "nulls": {"prompt": "q", "chosen": "yes", "rejected": "n", "system": None},
}  # fmt: skip


def said(conversation):
  return [(m.role, m.content, m.counts) for m in conversation.messages]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_pair_is_read_from_each_schema(name):
  pair = read_pair(SCHEMAS[name])
  assert said(pair.chosen) == [("user", "q", False), ("assistant", "yes", True)]
  assert said(pair.rejected) == [("user", "q", False), ("assistant", "n", True)]
  assert [m.content for m in pair.messages] == ["q", "yes", "n"]


def test_only_what_follows_the_common_turns_counts():
  earlier = [SYSTEM, USER, GOOD, USER]
  pair = read_pair({"chosen": [*earlier, GOOD], "rejected": [*earlier, BAD]})
  assert [m.counts for m in pair.chosen.messages] == [False] * 4 + [True]
  longer = read_pair({"system": "s", "prompt": "q", "chosen": [GOOD, USER, BAD], "rejected": "n"})
  assert said(longer.chosen)[:2] == [("system", "s", False), ("user", "q", False)]
  assert [m.counts for m in longer.chosen.messages] == [False, False, True, True, True]
  assert longer.shared == 2


@pytest.mark.parametrize(
  ("record", "kind"),
  [
    ({"prompt": "q", "chosen": "a"}, "no pair"),
    ({"messages": [USER, GOOD]}, "no pair"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal answers"),
    ({"chosen": "a", "rejected": "b"}, "no question"),
    ({"chosen": [USER], "rejected": [USER, BAD]}, "no answer"),
    ({"chosen": [], "rejected": [USER, BAD]}, "no turns"),
    ({"prompt": "q", "chosen": 3, "rejected": "b"}, "turn not an object"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x"]}, "not text alone"),
  ],
)
def test_what_is_no_pair_is_refused(record, kind):
  with pytest.raises(MalformedError) as refused:
    read_pair(record)
  assert refused.value.kind == kind


@pytest.fixture
def opened(config, write):
  """The rows of records of pairs."""

  def make(records, **changes):
    paths = (str(write("pairs.jsonl", records)),)
    settings = dict(paths=paths, format="preference", seq_len=96) | changes
    return open_datasets(config(**settings), 0)[0]

  return make


def many(count):
  letters = "abcdefghijklmnop"
  return [
    {"prompt": f"{i}", "chosen": letters[: 1 + i % 7], "rejected": letters[-1 - i % 5 :]}
    for i in range(count)
  ]


def test_a_pair_is_two_segments_of_a_row(opened):
  """Each reads as if it stood alone, and of each the answer alone is in the loss."""
  train = opened(many(9), format={"name": "preference", "template": "plain"})
  batch, tokenizer, found = all_rows(train), train.info.tokenizer, []
  for row in range(len(batch["tokens"])):
    of = {name: x[row] for name, x in batch.items()}
    last = of["segment_ids"].max()
    assert last > 2 and last % 2 == 0
    texts = []
    for segment in range(1, last + 1):
      here = np.flatnonzero(of["segment_ids"] == segment)
      tokens, targets, mask = (of[name][here] for name in ("tokens", "targets", "loss_mask"))
      assert of["positions"][here].tolist() == list(range(len(here)))
      assert tokens[0] == tokenizer.bos_id and targets[-1] == tokenizer.eos_id
      np.testing.assert_array_equal(tokens[1:], targets[:-1])
      texts.append((tokenizer.decode(targets), tokenizer.decode(targets[mask > 0])))
    found += list(zip(texts[::2], texts[1::2], strict=True))
  want = [
    ((r["prompt"] + r["chosen"], r["chosen"]), (r["prompt"] + r["rejected"], r["rejected"]))
    for r in many(9)
  ]
  assert sorted(found) == sorted(want)


def test_rows_hold_no_more_segments_than_they_may(opened):
  batch = all_rows(opened(many(9), max_segments=5, seq_len=256))
  assert batch["segment_ids"].max() == 4


def test_each_token_is_a_target_once(opened):
  assert_each_token_once(opened(many(60)))


def test_a_pair_is_whole_or_left_out(opened, caplog):
  records = [*many(9), {"prompt": "long", "chosen": "x" * 90, "rejected": "y"}]
  caplog.set_level("WARNING")
  assert opened(records).info.num_documents == 9
  assert "1 longer than a row of data.seq_len=96" in caplog.text


def test_further_fields_stand_where_segments_begin(opened):
  train = opened(many(9))
  numbers = np.arange(2 * len(train.packed.corpus), dtype=np.float32).reshape(-1, 2) + 1
  further = with_documents(train, lambda packed: packed.with_beside(reference=numbers))
  rows, of_all = all_rows(train), all_rows(pickle.loads(pickle.dumps(further)))
  field = of_all.pop("reference")
  assert_same(of_all, rows)
  assert sorted(field[field > 0]) == list(range(1, 19))
  assert ((field > 0) == ((rows["positions"] == 0) & (rows["segment_ids"] > 0))).all()
  for row, values in enumerate(field):
    documents = [int((x - 1) // 2) for x in values[values > 0][::2]]
    names = tuple(train.packed.corpus.name(i) for i in documents)
    assert names == train.packed.document_names(row)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"step.loss": "cross_entropy"}, "would learn the bad answers too"),
    ({"data.sources": {"a": ("x",)}}, "data.sources: rows of pairs are not mixed"),
    ({"data.order": "length"}, "pairs come at random"),
    ({"data.max_segments": 1}, "no room for a pair"),
    ({"data.format": "chat"}, "step.loss=dpo learns .* Set data.format=preference"),
    ({"step.loss": "simpo", "step.z_loss": 0.1}, "step.z_loss=0.1 is of the cross-entropy"),
    ({"step.loss": {"name": "dpo", "form": "ipo", "label_smoothing": 0.1}}, "label_smoothing"),
  ],
)
def test_what_cannot_go_together_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    tiny_config({"data.format": "preference", "step.loss": "dpo", **settings})
