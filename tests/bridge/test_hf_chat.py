"""Ids of conversations are those of `apply_chat_template`, and the loss is on the answers.

The templates are ours, in the form of those of published models, each with a tokenizer of the kind
that the model has.
"""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.conversation import read_conversation
from ats_jax.data.chat.segments import COUNTS, role_of
from ats_jax.data.chat.tokenizer import with_template
from ats_jax.data.tokens.tokenizer import build_tokenizer

pytestmark = pytest.mark.hf

SAID = [
  "a", "  ", " ", "\n", "\n\n", "the cat", "é漢字", "🙂\u200d", "don't", "12 + 3", "<x>", "[", ">",
  "\t", ".",
]  # fmt: skip
TEXT = ["user assistant system the cat sat on\n\n\n the mat. Don't 12 + 3\n  User: a\n\nAssistant:"]
PREPEND = {
  "type": "Sequence",
  "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
  ],
}
NO_PREFIX = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def metaspace(scheme):
  kind = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
  return {"normalizer": None, "pre_tokenizer": kind}


def of_bytes() -> Tokenizer:
  inner = Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  inner.train_from_iterator(
    TEXT * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
  )
  return inner


def of_pieces() -> Tokenizer:
  letters = [*map(chr, range(33, 127)), "\n"]
  words = [("▁", "▁"), *(("▁", c) for c in letters), ("\n", "\n"), ("t", "h"), ("th", "e")]
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
  pieces += [left + right for left, right in words]
  inner = Tokenizer(
    models.BPE(
      {p: i for i, p in enumerate(pieces)}, words, unk_token="<unk>", fuse_unk=True,
      byte_fallback=True,
    )
  )  # fmt: skip
  parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
  return inner


def loop(body, before="", behind=""):
  return before + "{% for m in messages %}" + body + "{% endfor %}" + behind


def either(user, assistant):
  return "{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}"


def asks(heading, otherwise="''"):
  return "{{ " + heading + " if add_generation_prompt else " + otherwise + " }}"


STRICT = (
  "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
)
NAMED = "{{ '<|' + m.role + '|>\n' + m.content "
ROLE = (
  "{{ '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>')"
)
BOS = "{{ bos_token }}"
PHI = ("<|user|>", "<|assistant|>", "<|end|>")
BEGIN, END = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
# name: (fields of pieces; None = of bytes, bos, eos, other special tokens, whether they take
# blanks, template, how an answer is written)
FAMILIES = {
  "chatml": (
    None, None, "<|im_end|>", ("<|im_start|>",), False,
    loop("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
         behind=asks("'<|im_start|>assistant\n'")), "{}<|im_end|>"),
  "llama2": (
    {"normalizer": PREPEND}, "<s>", "</s>", (), False,
    loop(either("{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}",
                "{{ ' ' + m.content.strip() + ' ' + eos_token }}")), " {strip} </s>"),
  "llama3": (
    None, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), False,
    loop("{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
         " + '<|eot_id|>' }}", BOS,
         asks("'<|start_header_id|>assistant<|end_header_id|>\n\n'")), "{strip}<|eot_id|>"),
  "mistral": (
    metaspace("first"), "<s>", "</s>", ("[INST]", "[/INST]"), False,
    loop(STRICT + either("{{ '[INST] ' + m.content + '[/INST]' }}",
                         "{{ ' ' + m.content + eos_token }}"), BOS), " {}</s>"),
  "mixtral": (
    metaspace("always"), "<s>", "</s>", (), False,
    loop(STRICT + either("{{ '[INST] ' + m.content + ' [/INST]' }}",
                         "{{ m.content + eos_token }}"), BOS), "{}</s>"),
  "zephyr": (
    {"normalizer": PREPEND}, "<s>", "</s>", (), False,
    loop(NAMED + "+ eos_token + '\n' }}", behind=asks("'<|assistant|>\n'")), "{}</s>"),
  "phi3": (
    metaspace("first"), "<s>", "<|endoftext|>", PHI, True,
    loop(NAMED + "+ '<|end|>\n' }}", behind=asks("'<|assistant|>\n'", "eos_token")), "{}<|end|>"),
  "phi4-mini": (
    None, None, "<|endoftext|>", PHI, False,
    loop("{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}",
         behind=asks("'<|assistant|>'", "eos_token")), "{}<|end|>"),
  "gemma": (
    {"normalizer": NO_PREFIX}, "<bos>", "<end_of_turn>", ("<start_of_turn>",), False,
    loop("{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
         " + m.content | trim + '<end_of_turn>\n' }}", BOS, asks("'<start_of_turn>model\n'")),
    "{strip}<end_of_turn>"),
  "deepseek": (
    None, BEGIN, END, (), False,
    loop(either("{{ 'User: ' + m.content + '\n\n' }}",
                "{{ 'Assistant: ' + m.content + eos_token }}"), BOS, asks("'Assistant:'")),
    f" {{}}{END}"),
  "command-r": (
    None, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>",
    ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"), False,
    loop(ROLE + " + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}", BOS,
         asks("'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'")), "{strip}<|END_OF_TURN_TOKEN|>"),
  "tulu": (
    None, None, "<|endoftext|>", (), False,
    loop(either(NAMED + "+ '\n' }}", NAMED + "+ eos_token + ('' if loop.last else '\n') }}"),
         behind=asks("'<|assistant|>\n'")), "{}<|endoftext|>"),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
  """(their tokenizer, ours, how an answer is written) of a family."""
  pieces, bos, eos, others, takes, template, form = FAMILIES[request.param]
  inner = of_bytes() if pieces is None else of_pieces()
  names = [name for name in (bos, eos) if name]
  inner.add_special_tokens([AddedToken(n, normalized=False) for n in names])
  inner.add_special_tokens([AddedToken(n, normalized=False, rstrip=takes) for n in others])
  spec = {**json.loads(inner.to_str()), **(pieces or {})}
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(spec), encoding="utf-8")
  config = {"bos_token": bos, "eos_token": eos, "chat_template": template}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
  theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token=bos, eos_token=eos)
  theirs.chat_template = template
  ours = build_tokenizer(DataConfig(tokenizer=str(path)), list)
  return theirs, with_template(ours, Chat(template="tokenizer"), str(path)), form


def conversations():
  draw = random.Random(7)
  say = lambda: "".join(draw.choices(SAID, k=draw.randint(1, 8)))
  for number in range(25):
    yield [
      {"role": role, "content": f"{say()}{number}{role[0]}{turn}{say()}"}
      for turn in range(draw.randint(1, 3))
      for role in ("user", "assistant")
    ]


def in_answers(theirs, text, turns, form):
  """Which of their tokens end inside an answer; of special ones, that take blanks, begin there."""
  encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
  found = np.zeros(len(encoded["input_ids"]), bool)
  at = 0
  for turn in turns[1::2]:
    answer = form.format(turn["content"], strip=turn["content"].strip())
    begin = text.index(answer, at)
    at = begin + len(answer)
    for number, (token, (left, right)) in enumerate(
      zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ):
      place = left if token in theirs.added_tokens_decoder else max(left, right - 1)
      found[number] |= begin <= place < at
  return found


def test_ids_and_answers_are_those_of_transformers(family):
  theirs, ours, form = family
  for turns in conversations():
    whole = read_conversation({"messages": turns})
    segments = ours.template.render(whole)
    ids, codes = ours.encode_segments([segments])[0]
    expected = theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
    text = theirs.apply_chat_template(turns, tokenize=False)
    answers = in_answers(theirs, text, turns, form)
    begin = int(expected[0] == ours.bos_id)  # each document of ours begins with it anyway
    assert ids.tolist() == expected[begin:], turns
    marked = [role_of(c) == "assistant" and bool(c & COUNTS) for c in codes.tolist()]
    assert marked == answers[begin:].tolist(), turns
    asked = theirs.apply_chat_template(
      turns[:-1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompt = ours.prompt(whole._replace(messages=whole.messages[:-1]))
    assert prompt == [ours.bos_id, *asked[int(asked[0] == ours.bos_id) :]]
