"""Templates by name: their text, their masks, and text that looks like a special token."""

import numpy as np
import pytest
from chat_cases import ANSWERS, DIALOGUES, FAMILIES, NAMES, TEXTS, conversation, in_loss, text_of

from ats_jax.config.schema.text_format import TEMPLATES
from ats_jax.data.chat.conversation import Conversation, MalformedError, Message
from ats_jax.data.chat.segments import weight_table, written
from ats_jax.data.chat.templates import PUBLISHED
from ats_jax.data.chat.tokenizer import ChatTokenizer, Form
from ats_jax.data.tokens.tokenizer import ByteTokenizer

ANSWERS_ONLY = weight_table({"assistant": 1.0}, "all")


def tokenizer_of(family: str) -> ChatTokenizer:
  return ChatTokenizer(ByteTokenizer(), Form(family))


def encoded(tokenizer: ChatTokenizer, whole: Conversation):
  """The ids and the codes of a conversation."""
  return tokenizer.encode_segments([tokenizer.template.render(whole)])[0]


def own_names(family: str) -> tuple[str, str]:
  return TEXTS[family]["bos"], TEXTS[family]["eos"]


def before_last_answer(number: int) -> Conversation:
  messages = conversation(number).messages
  last = max(i for i, m in enumerate(messages) if m.role == "assistant")
  return Conversation(messages[:last])


def published_text(family: str, number: int) -> str:
  """What `transformers` made of a dialogue.

  The template of Mistral leaves out the system's turn once an answer is last. A model that answers
  has read it, so ours is where it is in the prompt.
  """
  texts, messages = TEXTS[family]["texts"][number], conversation(number).messages
  if family == "mistral" and messages[0].role == "system":
    assert messages[0].content not in texts["whole"] or not messages[0].content
    return f"{texts['prompt']} {messages[-1].content}</s>"
  return texts["whole"]


def test_the_settings_know_all_templates():
  assert set(PUBLISHED) == set(TEMPLATES)
  assert len(DIALOGUES) == 12
  assert set(TEMPLATES) == {*FAMILIES, "plain"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_publishers_and_only_answers_and_their_ends_are_in_the_loss(family):
  tokenizer, template, names = tokenizer_of(family), PUBLISHED[family], own_names(family)
  for number, name in enumerate(NAMES):
    whole, published = conversation(number), published_text(family, number)
    assert written(template.render(whole), *names) == published, name
    asked = template.render(before_last_answer(number), prompt=True)
    assert written(asked, *names) == TEXTS[family]["texts"][number]["prompt"], name
    ids, codes = encoded(tokenizer, whole)
    assert in_loss(ids, ANSWERS_ONLY[codes], tokenizer, *names) == ANSWERS[family][number], name
    assert names[0] + text_of(ids, tokenizer, *names) == published, name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_turn_says_is_text_whatever_it_says(family):
  """As many special tokens as in a dialogue of the same shape that names none."""
  tokenizer = tokenizer_of(family)
  names = [*tokenizer.special, "<|im_end|>", "<bos>", "<s>", "</s>", "[INST]"]
  hostile = Conversation((Message("user", "".join(names)), Message("assistant", "".join(names))))
  harmless = Conversation((Message("user", "a"), Message("assistant", "b")))
  found = [
    [i for i in encoded(tokenizer, said).ids.tolist() if i >= 256] for said in (hostile, harmless)
  ]
  assert found[0] == found[1] and len(found[0]) >= 2


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_goes_on_where_its_prompt_ends(family):
  """A model reads in `generate --chat` what it read in training before the answer."""
  tokenizer = tokenizer_of(family)
  whole, asked = conversation(3), before_last_answer(3)
  ids = encoded(tokenizer, whole).ids.tolist()
  prompt = tokenizer.prompt(asked)
  assert prompt == [tokenizer.bos_id, *ids[: len(prompt) - 1]]
  answer = ids[len(prompt) - 1 :]
  assert tokenizer.decode(answer).strip() == "7"
  first_end = next(i for i in answer if i in tokenizer.end_ids)
  assert tokenizer.decode(answer[: answer.index(first_end)]).strip() == "7"


def test_weights_are_of_what_each_role_says_or_of_the_last_answer():
  tokenizer = tokenizer_of("chatml")
  ids, codes = encoded(tokenizer, conversation(3))
  table = weight_table({"assistant": 1.0, "user": 0.25, "system": 0.5}, "all")
  by_weight = {
    weight: in_loss(ids, np.where(table[codes] == weight, 1, 0), tokenizer, "", "")
    for weight in (1.0, 0.5, 0.25)
  }
  assert by_weight == {
    1.0: ["4<|im_end|>", "7<|im_end|>"],
    0.5: ["Answer in digits.<|im_end|>"],
    0.25: ["Two and two?<|im_end|>", "And three?<|im_end|>"],
  }
  table = weight_table({"assistant": 1.0}, "last")
  assert in_loss(ids, table[codes], tokenizer, "", "") == ["7<|im_end|>"]


def test_a_turn_of_weight_0_is_not_in_the_loss():
  tokenizer = tokenizer_of("llama3")
  turns = [Message("user", "a"), Message("assistant", "b", counts=False), Message("user", "c")]
  ids, codes = encoded(tokenizer, Conversation((*turns, Message("assistant", "d"))))
  assert in_loss(ids, ANSWERS_ONLY[codes], tokenizer, "", "") == ["d<|eot_id|>"]


def test_plain_writes_nothing_but_what_is_said():
  tokenizer = tokenizer_of("plain")
  asked = Conversation((Message("user", "2+2="), Message("assistant", "4")))
  ids, codes = encoded(tokenizer, asked)
  assert ids.tolist() == [*b"2+2=4", tokenizer.eos_id]
  assert ANSWERS_ONLY[codes].tolist() == [0, 0, 0, 0, 1, 1]
  assert tokenizer.vocab_size == ByteTokenizer.vocab_size


@pytest.mark.parametrize("family", ["mistral", "gemma"])
@pytest.mark.parametrize(
  "roles", [("assistant",), ("user", "user"), ("user", "system"), ("system",)]
)
def test_turns_that_do_not_alternate_are_named(family, roles):
  messages = (*(Message(role, "x") for role in roles), Message("assistant", "y"))
  with pytest.raises(MalformedError, match=r"stands where (user|assistant) would"):
    PUBLISHED[family].render(Conversation(messages))


@pytest.mark.parametrize(
  ("turns", "tools", "match"),
  [
    ((Message("tool", "21 C"),), None, "turn 2 is of a tool"),
    ((Message("assistant", "", extra={"tool_calls": [{}]}),), None, "turn 2 calls a tool"),
    ((), [{"name": "f"}], "the record has tools"),
  ],
)
def test_tools_need_a_template_that_knows_them(turns, tools, match):
  messages = (Message("user", "x"), *turns, Message("assistant", "y"))
  with pytest.raises(MalformedError, match=f"{match}.*data.format.template=tokenizer"):
    PUBLISHED["chatml"].render(Conversation(messages, tools))
