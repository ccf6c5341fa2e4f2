"""Text and conversations in one training."""

import numpy as np
from chat_cases import DIALOGUES
from loading import ONE_HOST, all_rows, assert_each_token_once, assert_same

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.tokenizer import ChatTokenizer
from ats_jax.data.sources import open_data, open_eval_sets
from ats_jax.data.splits import open_datasets


def test_each_is_read_as_what_it_is(config, write):
  base = write("base.jsonl", [{"text": f"some text {i} " * 20} for i in range(40)])
  talk, held = write("talk.jsonl", DIALOGUES), write("held.jsonl", DIALOGUES[:3])
  usual = dict(packing="best_fit", seq_len=512, batch_size=4, tokenizer="bpe", bpe_vocab_size=400)
  cfg = config(
    sources=Table(base=(str(base),), talk=(str(talk),)), format=Chat(sources=("talk", "held")),
    validation_paths=(str(base),), validation_sets=Table(held=(str(held),)),
    phases=(Phase(Table(base=1), steps=3), Phase(Table(base=1, talk=3))), **usual,
  )  # fmt: skip
  train, main = open_data(cfg, 0)
  text, chats = (train.info.parts[name] for name in ("base", "talk"))
  assert isinstance(train.info.tokenizer, ChatTokenizer)
  assert chats.info.tokenizer.inner.fingerprint == text.info.tokenizer.fingerprint
  assert train.info.tokenizer.fingerprint == chats.info.tokenizer.fingerprint
  assert text.packed.weights is None
  batch = train.read(np.arange(12, 52))
  is_talk = batch["source"] == 1
  assert is_talk[:, 0].sum() == 30
  text_mask = (batch["segment_ids"] > 0).astype(np.float32)
  np.testing.assert_array_equal(batch["loss_mask"][~is_talk], text_mask[~is_talk])
  asked = text_mask[is_talk] > batch["loss_mask"][is_talk]
  assert asked.any() and batch["loss_mask"][is_talk].any()

  of_text = text.info.tokenizer
  alone, _ = open_datasets(config(paths=(str(talk),), format=Chat(), **usual), 0, of_text)
  assert_same(all_rows(chats), all_rows(alone))
  assert_each_token_once(train, ONE_HOST)

  held = {s.name: s.dataset for s in open_eval_sets(cfg, main)}
  assert held[""].info.num_documents == 40 and held["held"].info.num_documents == 3
  assert held[""].info.bytes_per_token and not held["held"].info.bytes_per_token


def test_each_begins_as_what_it_is(config, write, tmp_path):
  """Text with bos, conversations with the first token of a template that writes no bos."""
  base = write("base.jsonl", [{"text": f"some text {i}"} for i in range(80)])
  talk, template = write("talk.jsonl", DIALOGUES), tmp_path / "template.jinja"
  template.write_text(
    "{% for m in messages %}{{ eos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
  )
  train, _ = open_data(
    config(
      sources=Table(base=(str(base),), talk=(str(talk),)),
      format=Chat(sources=("talk",), template=str(template)),
      tokenizer="bytes", packing="best_fit", seq_len=512, batch_size=4,
    ),
    0,
  )  # fmt: skip
  inner = train.info.parts["base"].info.tokenizer
  for name, begin in (("base", inner.bos_id), ("talk", inner.eos_id)):
    rows = all_rows(train.info.parts[name])
    firsts = (rows["positions"] == 0) & (rows["segment_ids"] > 0)
    assert set(rows["tokens"][firsts].tolist()) == {begin}
  assert_each_token_once(train, ONE_HOST)
