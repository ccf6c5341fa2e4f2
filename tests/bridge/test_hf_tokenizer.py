"""`transformers` reads the tokenizer of an export, and gives the ids of the run."""

import json

import pytest
from transformers import AutoTokenizer

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.tokenizer import with_template
from ats_jax.data.tokens.export import files_of
from ats_jax.data.tokens.tokenizer import build_tokenizer

pytestmark = pytest.mark.hf
TEXT = ["la forêt, 漢字 and 🙂\n" * 20, "def f(x):\n  return x\n" * 9]
SAID = "a  b\n\tçé 漢字 🙂\u200d don't , .  \n"


@pytest.mark.parametrize(
  ("kind", "template"), [("bytes", None), ("bpe", "chatml"), ("bpe", "jinja")]
)
def test_ids_and_special_tokens(kind, template, tmp_path):
  if template == "jinja":
    template = str(tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_text(
      "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    )
  words = build_tokenizer(DataConfig(tokenizer=kind, bpe_vocab_size=320), lambda: TEXT)
  words = with_template(words, Chat(template=template)) if template else words
  for name, content in files_of(words).items():
    (tmp_path / name).write_bytes(content)
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
  theirs = AutoTokenizer.from_pretrained(tmp_path)
  assert len(theirs) == words.vocab_size
  assert theirs(SAID)["input_ids"] == [words.bos_id, *words.encode(SAID)]
  assert theirs.decode(words.encode(SAID)) == SAID
  for role in ("bos", "eos", "pad"):
    assert getattr(theirs, f"{role}_token_id") == getattr(words, f"{role}_id")
  for name, i in words.special_tokens().items():
    assert theirs.convert_tokens_to_ids(name) == i
    assert theirs(name, add_special_tokens=False)["input_ids"] == [i]
  if template and "jinja" in template:
    turns = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "7"}]
    ids = theirs.apply_chat_template(turns, return_dict=False)
    end = words.eos_id
    assert ids == [*words.encode("user:é"), end, *words.encode("assistant:7"), end]
