"""A tokenizer's own template: exact answers, text that stays text, and no harm done."""

import json
from itertools import groupby

import pytest
from chat_cases import ANSWERS, NAMES, TEXTS, conversation

from ats_jax.data.chat import jinja
from ats_jax.data.chat.conversation import Conversation, MalformedError, Message
from ats_jax.data.chat.jinja import JinjaTemplate
from ats_jax.data.chat.segments import BOS, EOS, ChatSegment, written
from ats_jax.data.chat.tokenizer import ChatTokenizer, Form
from ats_jax.data.tokens.tokenizer import ByteTokenizer

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
SPECIAL = ("<|im_start|>", "<|im_end|>")
QUESTION = Conversation((Message("user", "a"), Message("assistant", "b")))


def template(source: str, *, marks: bool = True, special=SPECIAL):
  names = {"bos_token": "<s>", "eos_token": "</s>"}
  return JinjaTemplate(source, names, (*special, *names.values()), marks)


def answers(segments: list[ChatSegment]) -> list[str]:
  """The text of each run of segments in the loss."""
  runs = [list(run) for counts, run in groupby(segments, lambda s: s.counts) if counts]
  return [written(run, "<s>", "</s>") for run in runs]


@pytest.fixture(scope="module")
def plain():
  return template(PLAIN)


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["by turns", "by marks"])
def test_text_and_answers_are_those_of_chatml(source):
  own = template(source)
  for number, name in enumerate(NAMES):
    segments = own.render(conversation(number))
    assert written(segments, "<s>", "</s>") == TEXTS["chatml"]["texts"][number]["whole"], name
    assert answers(segments) == ANSWERS["chatml"][number], name
  assert own.ends == ("<|im_end|>",)


def test_names_of_special_tokens_stay_text(plain):
  said = "<|im_end|><|im_<|im_end|>start|>\ufdd0<s>"
  tricky = Conversation(
    (Message("user", said), Message("assistant", "<|im_"), Message("user", "|>"))
  )
  segments = plain.render(tricky)
  assert [s.text for s in segments if s.special] == ["<|im_start|>", "<|im_end|>"] * 3
  assert said in [s.text.removeprefix("user\n") for s in segments]
  split = template("{% for m in messages %}<|im_{{ m.content }}{{ '</s>' }}{% endfor %}")
  tokens = [s for s in split.render(Conversation((Message("assistant", "end|>"),))) if s.special]
  assert [s.text for s in tokens] == [EOS]


@pytest.mark.parametrize(
  ("source", "first"),
  [
    (PLAIN, "<|im_start|>"),
    ("{{ bos_token }}" + PLAIN, "<s>"),
    (NO_END.replace("{% endfor %}", "{{ eos_token }}{% endfor %}"), "<s>"),
    ("{% if messages[0].role == 'system' %}<|im_end|>{% endif %}" + PLAIN, "<s>"),
  ],
)
def test_a_conversation_begins_as_its_template_always_does(source, first):
  """Or, where that is no special token or not always the same, with the tokenizer's bos."""
  inner = ByteTokenizer()
  names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
  tokenizer = ChatTokenizer(inner, Form("", source, names, (*SPECIAL, *names.values())))
  begin = {**tokenizer.special, "<s>": inner.bos_id}[first]
  assert (tokenizer.bos_id, tokenizer.of_text.bos_id) == (begin, inner.bos_id)
  whole = written(tokenizer.template.render(QUESTION, prompt=False), "<s>", "</s>")
  ids = [begin, *tokenizer.encode_segments([tokenizer.template.render(QUESTION)])[0].ids.tolist()]
  shown = {i: name for name, i in tokenizer.special.items()}
  text = "".join(shown[i] if i in shown else tokenizer.decode([i]) for i in ids)
  assert text == whole if whole.startswith(first) else text == "<s>" + whole


def test_the_tokenizers_own_tokens_are_known_by_role():
  own = template("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
  assert [s.text for s in own.render(QUESTION)] == [BOS, "a", EOS, "b", EOS]
  assert own.ends == (EOS,)


@pytest.mark.parametrize(
  ("source", "special", "message"),
  [
    (END_NOT_MARKED, SPECIAL, r"never learn to stop.*data.format.marks=false"),
    (NO_END, SPECIAL, r"no special token.*data.format.template=chatml"),
    (PLAIN, (), "no special token"),  # the tokenizer does not know it
    ("{% for %}", SPECIAL, "is no jinja: TemplateSyntaxError"),
  ],
)
def test_a_template_whose_answers_have_no_end_is_refused(source, special, message):
  with pytest.raises(ValueError, match=message):
    template(source, special=special).ends  # noqa: B018
  if source == END_NOT_MARKED:  # the setting mends it
    assert answers(template(source, marks=False).render(QUESTION)) == ["b<|im_end|>"]


@pytest.mark.parametrize(
  ("source", "message"),
  [
    (FORGETFUL, "in another way once"),
    (MARKED.replace("m.role == 'assistant'", "loop.index == 2"), "marks 1 of 2 answers"),
  ],
)
def test_a_template_that_treats_turns_differently_is_refused(source, message):
  long = Conversation((*QUESTION.messages, Message("user", "c"), Message("assistant", "d")))
  with pytest.raises(MalformedError, match=message):  # the record alone, not the training
    template(source).render(long)


ASKS = "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
OTHERWISE_EOS = ASKS.replace("''", "eos_token")
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"


@pytest.mark.parametrize(
  ("source", "end"),
  [
    (TURN + "{% endfor %}" + OTHERWISE_EOS, "<|im_end|>"),
    (TURN + "\n{% endfor %}" + OTHERWISE_EOS, "<|im_end|>"),
    (TURN + "{% endfor %}" + ASKS.replace("''", "'\n' + eos_token"), "<|im_end|>"),
    (TURN + "{{ eos_token if m.role == 'assistant' }}{% endfor %}" + ASKS, "<|im_end|></s>"),
    (
      "{% for m in messages %}{{ m.content }}{% endfor %}"
      "{{ '' if add_generation_prompt else eos_token }}",
      "</s>",
    ),
  ],
)
def test_what_ends_a_conversation_ends_no_answer_unless_nothing_else_does(source, end):
  own = template(source)
  assert answers(own.render(QUESTION)) == [f"b{end}"]
  assert own.ends == ((EOS,) if end.endswith("</s>") else (end,))
  turns = (*QUESTION.messages, Message("user", "c"), Message("assistant", "<|im"))
  if end == "</s>":  # which ends the last answer alone
    with pytest.raises(MalformedError, match="in another way once"):
      own.render(Conversation(turns))
  else:
    assert answers(own.render(Conversation(turns))) == [f"b{end}", f"<|im{end}"]


def test_tools_reach_the_template_and_stay_text():
  call = {"name": "look", "arguments": {"at": "<|im_end|>é"}}
  turns = (Message("user", "a"), Message("assistant", "", extra={"tool_calls": [call]}))
  tools = [{"name": "look", "description": "<|im_start|>"}]
  segments = template(WITH_TOOLS).render(Conversation(turns, tools))
  text = written(segments, "<s>", "</s>")
  assert text.startswith("Tools: " + json.dumps(tools, ensure_ascii=False))
  assert answers(segments) == [json.dumps(call, ensure_ascii=False) + "<|im_end|>"]
  assert len([s for s in segments if s.special]) == 4


def test_what_json_allows_and_text_does_not_or_a_template_refuses_is_malformed(plain):
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
    plain.render(Conversation((every, Message("assistant", "b"))))
  refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
  with pytest.raises(MalformedError, match="no system"):
    template(refusing + PLAIN).render(Conversation((Message("system", "x"), *QUESTION.messages)))


@pytest.mark.parametrize(
  "hostile",
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ messages.append(1) }}",
    "{% include 'FILE' %}",
    "{{ range(10 ** 9) | list | length }}",
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


def test_its_process_can_open_no_file_and_ends_with_the_template():
  """The second wall: what got past jinja's sandbox would find no file, socket or module."""
  own = template(PLAIN)
  own.render(QUESTION)
  process = own.sandbox._process
  with open(f"/proc/{process.pid}/limits") as lines:
    named = {line[:25].strip(): line[26:].split()[0] for line in lines}
  assert named["Max open files"] == "3"
  assert int(named["Max address space"]) == 2**30
  del own
  assert process.poll() is not None
