"""Records of every schema become turns; each malformed one has a reason with its place."""

import json

import pytest

from ats_jax.data.chat.conversation import MalformedError, Message, read_conversation
from ats_jax.data.chat.records import conversations, message_pieces
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TURNS = (Message("user", "a"), Message("assistant", "b"))


@pytest.mark.parametrize(
  "record",
  [
    {"messages": [USER, ANSWER]},
    {"conversation": [USER, ANSWER]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"messages": [{"role": "Human", "content": "a"}, {"role": "MODEL", "content": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": [USER], "completion": [ANSWER]},
    {"instruction": "a", "output": "b"},
    {"instruction": "a", "input": "", "output": "b"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]},
    {"prompt": "x", "prompt_id": "y", "messages": [USER, ANSWER]},
    {"messages": None, "prompt": "a", "completion": "b", "tools": None},
    {"messages": [USER, {**ANSWER, "weight": None, "tool_calls": None, "from": None}]},
    {"messages": [{**USER, "value": None}, {"content": None, "value": "b", "from": "gpt"}]},
    {"messages": [USER, ANSWER], "tools": "", "history": [], "images": [], "label": True},
    {"messages": [USER, ANSWER], "tools": " [] "},
    {"messages": [USER, ANSWER], "tools": "null"},
  ],
)
def test_schemas(record):
  assert read_conversation(record) == (TURNS, None)


def test_texts_beside_the_turns_and_other_names_of_roles():
  found = read_conversation({"instruction": "Add.", "input": "2, 2", "output": "4"})
  assert found.messages[0].content == "Add.\n\n2, 2"
  for field in ("messages", "conversations"):
    found = read_conversation({"system": "s", field: [USER, ANSWER]})
    assert found.messages == (Message("system", "s"), *TURNS)
    assert read_conversation({"system": "", field: [USER, ANSWER]}).messages == TURNS
  for alias, role in {"developer": "system", "bot": "assistant", "observation": "tool"}.items():
    turns = [{"role": alias, "content": "x"}, USER, ANSWER]
    assert read_conversation({"messages": turns}).messages[0] == Message(role, "x")


@pytest.mark.parametrize(
  "record",
  [
    {"instruction": "a", "input": "", "output": "b"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [USER], "completion": [ANSWER]},
  ],
)
def test_turns_of_history_stand_before_the_question(record):
  history = [["c", "d"], ["e", "f"]]
  found = read_conversation({**record, "history": history, "system": "s"})
  assert [(m.role, m.content) for m in found.messages] == [
    ("system", "s"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f"),
    ("user", "a"), ("assistant", "b"),
  ]  # fmt: skip


@pytest.mark.parametrize("many", [False, True])
def test_tools_and_calls_as_text(many):
  call = {"name": "f", "arguments": {"x": 1}}
  text = json.dumps([call, call] if many else call)
  turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": text}]
  found = read_conversation({"conversations": turns, "tools": '[{"name": "f"}]'})
  calls = [{"type": "function", "function": call}] * (2 if many else 1)
  assert found.tools == [{"name": "f"}]
  assert found.messages[1] == Message("assistant", "", True, {"tool_calls": calls})


def test_what_only_a_template_reads_is_kept():
  call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
  found = read_conversation({"messages": [USER, call], "tools": [{"name": "f"}]})
  assert found.messages[1] == Message("assistant", "", True, {"tool_calls": [{"name": "f"}]})
  assert found.tools == [{"name": "f"}]
  turns = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]
  counts = [m.counts for m in read_conversation({"messages": turns}).messages]
  assert counts == [True, False, True, True]


MALFORMED = [
  ({}, "no conversation", r"\(it has nothing\)"),
  ({"text": "x", "id": 1}, "no conversation", "it has 'text', 'id'"),
  ({"prompt": "x"}, "no conversation", "prompt with completion"),
  ({"messages": []}, "no turns", "has no turn"),
  ({"messages": {"role": "user"}}, "turns not a list", "'messages' is an object"),
  ({"messages": "hello"}, "turns not a list", "is a string"),
  ({"messages": ["hello"]}, "turn not an object", "turn 1 is a string"),
  ({"messages": [USER]}, "no answer", "nothing to learn"),
  ({"messages": [USER, {"content": "b"}]}, "no role", "turn 2 has neither 'role' nor 'from'"),
  ({"messages": [{"role": "", "content": "x"}]}, "unknown role", "turn 1 has the role ''"),
  ({"messages": [{"role": 3, "content": "x"}]}, "unknown role", "known are system, user"),
  ({"messages": [{"role": "user"}, ANSWER]}, "content not text", "turn 1 has null as its text"),
  ({"messages": [USER, {**ANSWER, "content": 5}]}, "content not text", "turn 2 has a number"),
  (
    {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
    "content not text", "turn 1 holds 'image': only text",
  ),
  ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "lone surrogate", "at character 0"),
  ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight not 0 or 1", "has the weight 0.5"),
  ({"prompt": "a", "completion": 2}, "field not a string", "'completion' is a number"),
  ({"instruction": 1, "output": "b"}, "field not a string", "'instruction' is a number"),
  ({"messages": [USER, ANSWER], "tools": {}}, "tools not a list", "is an object"),
  ({"prompt": [USER], "completion": [USER]}, "no answer", "assistant"),
  ({"messages": [USER, ANSWER], "tools": "[{"}, "broken JSON", "field 'tools' is text that is no"),
  ({"messages": [USER, ANSWER], "tools": '{"name": "f"}'}, "tools not a list", "is an object"),
  ({"messages": [USER, ANSWER], "history": [["c", "d"]]}, "history", "beside the turns"),
  ({"prompt": "a", "completion": "b", "history": [["c"]]}, "history", "pair 1 of 'history'"),
  ({"prompt": "a", "completion": "b", "history": "c"}, "history", "no list of two texts"),
  ({"messages": [USER, ANSWER], "images": ["a.png"]}, "not text alone", "'images' is not empty"),
  ({"messages": [USER, ANSWER], "label": False}, "answer not to learn", "'label' is false"),
  ({"messages": [USER, {"role": "function_call", "content": "f"}]}, "broken JSON", "turn 2 of"),
  ({"messages": [USER, {"role": "function_call", "content": "[]"}]}, "no tool call", "a name"),
  ({"messages": [USER, ANSWER], "tools": [b"x"]}, "bytes", "field 'tools' holds bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "kind", "match"), MALFORMED)
def test_malformed_records_have_a_reason(record, kind, match):
  with pytest.raises(MalformedError, match=match) as error:
    read_conversation(record)
  assert error.value.kind == kind


def test_reasons_come_with_file_and_line_and_other_files_are_passed_over(write):
  rows = [{"messages": [USER, ANSWER]}, {"messages": [USER]}, {"prompt": "a", "completion": "b"}]
  path = str(write("a.jsonl", rows))
  with open(path, "a") as out:
    out.write("\n{broken\n[1]\n")
  report = Report(strict=False)
  found = list(conversations(SourceFile(path, "a.jsonl", "jsonl"), report))
  assert [place for place, _ in found] == [1, 3]
  assert report.malformed == {"no answer": 1, "broken JSON": 1, "not an object": 1}
  assert report.skipped == {"empty": 1}
  assert [line.split(": ")[0] for line in report.first] == [f"{path}:{n}" for n in (2, 5, 6)]
  with pytest.raises(ValueError, match=r"a.jsonl:2: no turn is .*strict=False"):
    list(conversations(SourceFile(path, "a.jsonl", "jsonl"), Report(strict=True)))

  report = Report(strict=True)
  path = str(write("README.md", "text"))
  assert not list(conversations(SourceFile(path, "README.md", "text"), report))
  assert report.skipped == {"no records": 1}
  gone = Report(strict=False)
  assert not list(conversations(SourceFile(path + ".jsonl", "gone.jsonl", "jsonl"), gone))
  assert gone.malformed == {"unreadable": 1}


def test_what_is_said_trains_a_bpe(write):
  path = str(write("a.jsonl", [{"messages": [USER, ANSWER]}, {"prompt": "é", "completion": ""}]))
  pieces = list(message_pieces(SourceFile(path, "a.jsonl", "jsonl"), Report(strict=True)))
  expected = [(1, True, "a"), (1, False, "b"), (2, True, "é"), (2, False, "")]
  assert [p[:3] for p in pieces] == expected
