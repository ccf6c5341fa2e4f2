"""A tokenizer's own template: exact answers, text that stays text, and no harm done."""

import json
from itertools import groupby

import pytest
from chat_cases import ANSWERS, DIALOGUES, NAMES, TEXTS, conversation

from ats_jax.data.chat import jinja
from ats_jax.data.chat.conversation import Conversation, MalformedError, Message
from ats_jax.data.chat.jinja import JinjaTemplate
from ats_jax.data.chat.segments import BOS, EOS, ChatSegment, written

# Ours, in the form of ChatML: with its heading, tools, and thoughts that later turns leave out.
HEADING = "<|im_start|>{{ m.role }}\n"
PLAIN = (
  "{% for m in messages %}" + HEADING + "{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
  "{% for m in messages %}" + HEADING + "{% if m.role == 'assistant' %}"
  "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
  "{% endif %}{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_NOT_MARKED = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")
WITH_TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}" + PLAIN.replace(
  "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
)
QUESTION = Conversation((Message("user", "a"), Message("assistant", "b")))


def template(source: str, *, marks: bool = True, special=("<|im_start|>", "<|im_end|>")):
  names = {"bos_token": "<s>", "eos_token": "</s>"}
  return JinjaTemplate(source, names, (*special, *names.values()), marks)


def answers(segments: list[ChatSegment]) -> list[str]:
  """The text of each run of segments in the loss."""
  runs = [list(run) for counts, run in groupby(segments, lambda s: s.counts) if counts]
  return [written(run, "<s>", "</s>") for run in runs]


@pytest.fixture(scope="module")
def by_turns():
  return template(PLAIN)


@pytest.fixture(scope="module")
def by_marks():
  return template(MARKED)


@pytest.mark.parametrize("number", range(len(DIALOGUES)), ids=NAMES)
@pytest.mark.parametrize("kind", ["by_turns", "by_marks"])
def test_text_and_answers_are_those_of_chatml(kind, number, request):
  own = request.getfixturevalue(kind)
  segments = own.render(conversation(number))
  assert written(segments, "<s>", "</s>") == TEXTS["chatml"]["texts"][number]["whole"]
  assert answers(segments) == ANSWERS["chatml"][number]
  assert own.ends == ("<|im_end|>",)


def test_names_of_special_tokens_stay_text(by_turns):
  said = "<|im_end|><|im_<|im_end|>start|>\ufdd0<s>"
  tricky = Conversation(
    (Message("user", said), Message("assistant", "<|im_"), Message("user", "|>"))
  )
  segments = by_turns.render(tricky)
  assert [s.text for s in segments if s.special] == ["<|im_start|>", "<|im_end|>"] * 3
  assert said in [s.text.removeprefix("user\n") for s in segments]


def test_a_name_that_text_and_template_write_together_stays_text():
  split = template("{% for m in messages %}<|im_{{ m.content }}{{ '</s>' }}{% endfor %}")
  tokens = [s for s in split.render(Conversation((Message("assistant", "end|>"),))) if s.special]
  assert [s.text for s in tokens] == [EOS]


def test_the_tokenizers_own_tokens_are_known_by_role():
  own = template("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
  assert [s.text for s in own.render(QUESTION)] == [BOS, "a", EOS, "b", EOS]
  assert own.ends == (EOS,)


def test_marks_that_leave_out_the_end_are_refused_with_the_setting_that_mends_it():
  with pytest.raises(ValueError, match=r"never learn to stop.*data.format.marks=false"):
    template(END_NOT_MARKED).ends  # noqa: B018
  mended = template(END_NOT_MARKED, marks=False)
  assert answers(mended.render(QUESTION)) == ["b<|im_end|>"]


def test_a_template_without_an_end_is_refused():
  with pytest.raises(ValueError, match=r"no special token.*data.format.template=chatml"):
    template(NO_END).ends  # noqa: B018
  with pytest.raises(ValueError, match="no special token"):  # the tokenizer does not know it
    template(PLAIN, special=()).ends  # noqa: B018


def test_a_template_that_rewrites_earlier_turns_is_refused():
  long = Conversation((*QUESTION.messages, Message("user", "c"), Message("assistant", "d")))
  with pytest.raises(ValueError, match="in another way once"):
    template(FORGETFUL).render(long)


def test_marks_that_miss_an_answer_are_refused():
  source = MARKED.replace("m.role == 'assistant'", "loop.index == 2")
  long = Conversation((*QUESTION.messages, Message("user", "c"), Message("assistant", "d")))
  with pytest.raises(ValueError, match="marks 1 of 2 answers"):
    template(source).render(long)


def test_tools_reach_the_template_and_stay_text():
  call = {"name": "look", "arguments": {"at": "<|im_end|>é"}}
  turns = (Message("user", "a"), Message("assistant", "", extra={"tool_calls": [call]}))
  tools = [{"name": "look", "description": "<|im_start|>"}]
  segments = template(WITH_TOOLS).render(Conversation(turns, tools))
  text = written(segments, "<s>", "</s>")
  assert text.startswith("Tools: " + json.dumps(tools, ensure_ascii=False))
  assert answers(segments) == [json.dumps(call, ensure_ascii=False) + "<|im_end|>"]
  assert len([s for s in segments if s.special]) == 4


def test_what_json_allows_and_text_does_not_is_malformed():
  deep = {"x": 1}
  for _ in range(3000):
    deep = {"x": deep}
  for call, kind in (({"x": "\ud800"}, "lone surrogate"), (deep, "nested too deeply")):
    asked = Message("assistant", "b", extra={"tool_calls": [call]})
    with pytest.raises(MalformedError) as error:
      template(WITH_TOOLS).render(Conversation((Message("user", "a"), asked)))
    assert error.value.kind == kind
  every = Message("user", "".join(jinja._FREE))
  with pytest.raises(MalformedError, match="nearly all characters"):
    template(PLAIN).render(Conversation((every, Message("assistant", "b"))))


def test_what_a_template_refuses_is_malformed():
  refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
  with pytest.raises(MalformedError, match="no system"):
    template(refusing + PLAIN).render(Conversation((Message("system", "x"), *QUESTION.messages)))


def test_what_is_no_jinja_is_refused():
  with pytest.raises(ValueError, match="is no jinja: TemplateSyntaxError"):
    template("{% for %}").ends  # noqa: B018


@pytest.mark.parametrize(
  "hostile",
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
    "{% include 'FILE' %}",
    "{% import 'FILE' as f %}{{ f }}",
    "{% extends 'FILE' %}",
    "{{ range(10 ** 9) | list | length }}",
    "{{ 'a' * 10 ** 11 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
  ],
)
def test_a_hostile_template_gets_nothing(hostile, tmp_path):
  secret = tmp_path / "secret"
  secret.write_text("do not read this")
  source = hostile.replace("FILE", str(secret)) + PLAIN
  with pytest.raises(ValueError, match="the chat template") as error:
    template(source).ends  # noqa: B018
  assert "do not read" not in str(error.value)


def test_a_template_that_does_not_end_is_ended(monkeypatch):
  monkeypatch.setattr(jinja, "TIMEOUT_SECS", 0.5)
  turns = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
  endless = template(turns + PLAIN)
  with pytest.raises(ValueError, match="did not end in 0 s"):
    endless.render(QUESTION)
  assert endless.sandbox._process.returncode == -9


def test_its_process_can_open_no_file(tmp_path):
  """The second wall: what got past jinja's sandbox would find no file, socket or module."""
  sandbox = jinja.Sandbox("{{ messages }}")
  assert sandbox.render(messages="x", marks=("", "")) == "x"
  limits = f"/proc/{sandbox._process.pid}/limits"
  with open(limits) as lines:
    named = {line[:25].strip(): line[26:].split()[0] for line in lines}
  assert named["Max open files"] == "3"
  assert int(named["Max address space"]) == 2**30


def test_the_process_ends_with_the_template():
  own = template(PLAIN)
  own.render(QUESTION)
  process = own.sandbox._process
  del own
  assert process.poll() is not None
