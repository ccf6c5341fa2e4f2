"""A dialogue in the terminal, and a file of prompts, on a device that draws from what it read."""

import pytest
from fake_device import FakeDevice, alone

from ats_jax.data.chat.conversation import Message
from ats_jax.data.chat.tokenizer import ChatTokenizer, Form, prompt_of
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.store import paths
from ats_jax.verbs import chat
from ats_jax.verbs.prompts import answers, read_prompts

TOKENIZER = ChatTokenizer(ByteTokenizer(), Form("chatml"))
SAMPLING = Sampling(max_tokens=9)


def answer_to(*turns):
  return alone(Request(prompt_of(TOKENIZER, turns), SAMPLING))[1]


@pytest.fixture
def device():
  return FakeDevice(num_pages=90, max_pages_per_row=60)


@pytest.fixture
def dialogue(device):
  return chat.Dialogue(Engine(device, TOKENIZER), TOKENIZER, SAMPLING)


def talk(dialogue, *lines):
  """Say lines; one that is an exception is raised in place of a line."""
  left = [*lines, EOFError()]

  def read():
    line = left.pop(0)
    if isinstance(line, BaseException):
      raise line
    return line

  chat.talk({"": dialogue}, read)
  return left


def test_a_dialogue_goes_on_from_what_was_said(dialogue, capsys):
  talk(dialogue, "hi", "", "/system Be brief.", "more", "/reset", "again")
  system, hi = Message("system", "Be brief."), Message("user", "hi")
  first = answer_to(hi)
  second = answer_to(system, hi, Message("assistant", first), Message("user", "more"))
  third = answer_to(system, Message("user", "again"))
  assert capsys.readouterr().out == f"{first}\n{second}\n{third}\n\n"


def test_each_model_answers_by_what_it_said_itself(dialogue, device, capsys):
  other = chat.Dialogue(
    Engine(FakeDevice(num_pages=90, max_pages_per_row=60), TOKENIZER), TOKENIZER, SAMPLING
  )
  list(other.say("before"))
  turns, lines = [*other.turns, Message("user", "hi")], iter(["hi", "/reset", "hi"])
  chat.talk({"base": dialogue, "x": other}, lambda: next(lines, "/quit"))
  alone = answer_to(Message("user", "hi"))
  assert capsys.readouterr().out == (
    f"base:\n{alone}\nx:\n{answer_to(*turns)}\nbase:\n{alone}\nx:\n{alone}\n"
  )


def test_control_c_stops_an_answer_and_control_d_the_program(dialogue, device, capsys):
  device.interrupt = "read"
  left = talk(dialogue, "hi", KeyboardInterrupt(), "hi", "/quit", "never said")
  assert left[0] == "never said"
  assert capsys.readouterr().out == f"\n\n{answer_to(Message('user', 'hi'))}\n"
  assert len(dialogue.turns) == 2  # nothing had come of the first


def test_what_was_shown_of_a_stopped_answer_is_the_turn(dialogue):
  pieces = dialogue.say("hi")
  said = next(pieces)
  pieces.close()
  assert dialogue.turns == [Message("user", "hi"), Message("assistant", said)]
  list(dialogue.say("more"))
  assert not dialogue.engine.busy and len(dialogue.turns) == 4


def test_what_cannot_be_answered_is_said_and_forgotten(dialogue, capsys):
  talk(dialogue, "x" * 300, "/rest", "a\udcff", "hi")
  out, err = capsys.readouterr()
  assert out == f"{answer_to(Message('user', 'hi'))}\n\n"
  long, unknown, broken = err.splitlines()
  assert "the prompt has" in long and "/reset" in long
  assert unknown == "error: no command '/rest': there are /reset, /system TEXT and /quit."
  assert broken == "error: a lone surrogate at character 1 of the turn"


def test_prompts_of_a_file_are_answered_in_its_order(device, tmp_path):
  path = paths.parse(tmp_path / "asked.jsonl")
  path.write_text(
    '{"prompt": "ab"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    f'{{"prompt": "{"x" * 300}"}}\n{{"prompt": ""}}\n'
  )
  prompts = read_prompts(path)
  requests = [Request(p.ids(TOKENIZER), SAMPLING) for p in prompts]
  rows = list(answers(Engine(device, TOKENIZER), prompts, requests))
  assert [row.get("text") for row in rows] == [
    alone(r)[1] if i != 2 else None for i, r in enumerate(requests)
  ]
  assert rows[1]["messages"] == [{"role": "user", "content": "hi"}]
  assert "the prompt has 301 tokens" in rows[2]["error"]
  assert {row["finished"] for row in rows if "finished" in row} <= {"end", "length"}
  assert prompts[0].asked([]).turns == (Message("user", "ab"),)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"ok\nab\xff", "a.txt:2: not UTF-8 at byte 2 of the line"),
    ("a.txt", b"\n", "holds no prompt"),
    ("a.jsonl", b"{", "a.jsonl:1: "),
    ("a.jsonl", rb'{"prompt": "\ud800"}', "a.jsonl:1: a lone surrogate at character 0"),
    ("a.jsonl", b'{"prompt": 3}', '"prompt" is 3, not a text'),
    ("a.jsonl", b'{"messages": []}', "a.jsonl:1: messages hold no turn"),
    ("a.jsonl", b'{"prompt": "a", "messages": []}', "either"),
  ],
)
def test_a_file_that_holds_no_prompts_is_refused_with_its_line(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    read_prompts(paths.parse(tmp_path / name))
