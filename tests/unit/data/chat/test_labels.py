"""Answers with labels: the schemas of their records, and the answers that stand beside them."""

import numpy as np
import pytest
from loading import all_rows

from ats_jax.data.chat.conversation import MalformedError
from ats_jax.data.chat.labelled import read_labelled, with_others
from ats_jax.data.chat.segments import GOOD
from ats_jax.data.splits import open_datasets
from ats_jax.data.text.report import Report

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
  "record",
  [
    {"prompt": "q", "completion": "a", "label": True},
    {"prompt": [USER], "completion": [ANSWER], "label": 1},
    {"messages": [USER, ANSWER], "label": True, "kto_tag": None},
    {"conversations": [USER, ANSWER], "kto_tag": True},
    {"instruction": "q", "input": "", "output": "a", "label": True},
  ],
)
def test_an_answer_is_read_from_each_schema(record):
  read = read_labelled(record)
  said = [(m.role, m.content, m.counts) for m in read.own.messages]
  assert said == [("user", "q", False), ("assistant", "a", True)] and read.is_good
  name = "label" if record.get("label") is not None else "kto_tag"
  assert not read_labelled(record | {name: False}).is_good


@pytest.mark.parametrize(
  ("record", "kind"),
  [
    ({"prompt": "q", "completion": "a"}, "no label"),
    ({"prompt": "q", "completion": "a", "label": "yes"}, "no label"),
    ({"messages": [ANSWER], "label": True}, "no question"),
    ({"messages": [ANSWER, USER], "label": True}, "no answer"),
    ({"chosen": "a", "prompt": "q"}, "no pair"),
    ({"prompt": "q", "completion": "a", "label": False, "images": ["x"]}, "not text alone"),
  ],
)
def test_what_has_no_label_is_refused(record, kind):
  with pytest.raises(MalformedError) as refused:
    read_labelled(record)
  assert refused.value.kind == kind


def joined(*questions, report=None):
  """Of records with these questions, the number of each and that whose answer stands beside."""
  records = [
    (n, read_labelled({"prompt": asked, "completion": str(n), "label": n % 2 == 0}))
    for n, asked in enumerate(questions)
  ]
  found = with_others(iter(records), "file", report or Report(strict=False))
  return [(place, int(each.other.messages[-1].content)) for place, each in found]


def test_the_other_answer_is_to_another_question():
  assert joined(*"abc") == [(0, 1), (1, 0), (2, 1)]
  assert joined(*"aabbc") == [(0, 2), (1, 2), (2, 1), (3, 1), (4, 3)]
  assert joined(*"aba") == [(0, 1), (1, 0), (2, 1)]
  report = Report(strict=False)
  assert joined(*"aaa", report=report) == []
  assert report.malformed == {"no other question": 3}


def test_a_pair_becomes_two_answers(config, write):
  """Both segments of a document have the question; the codes of the second one say the label."""
  pairs = [{"prompt": f"{n}", "chosen": f"good{n}", "rejected": f"bad{n}"} for n in range(4)]
  single = {"prompt": "8", "completion": "bad8", "label": False}
  paths = (str(write("answers.jsonl", [*pairs, single])),)
  format = {"name": "labelled", "template": "plain"}
  train = open_datasets(config(paths=paths, format=format, seq_len=96), 0)[0]
  batch, tokenizer, found = all_rows(train), train.info.tokenizer, []
  for row in range(len(batch["tokens"])):
    of = {name: x[row] for name, x in batch.items()}
    codes = train.info.packed.codes(np.array([row]))[0]
    for segment in range(1, of["segment_ids"].max() + 1):
      here = np.flatnonzero(of["segment_ids"] == segment)
      whole, counted = (
        tokenizer.decode(of["targets"][here][of["loss_mask"][here] >= low]) for low in (0, 1)
      )
      assert whole == whole[0] + counted and of["positions"][here[0]] == 0
      if segment % 2:
        asked, answer = whole[0], counted
        assert counted in (f"good{asked}", f"bad{asked}")
      else:
        assert whole[0] == asked and counted[-1] != asked
        assert bool(codes[here[0]] & GOOD) == answer.startswith("good")
        found.append(answer)
  assert sorted(found) == sorted([f"{x}{n}" for n in range(4) for x in ("bad", "good")] + ["bad8"])
