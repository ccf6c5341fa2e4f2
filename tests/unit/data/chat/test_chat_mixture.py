"""Text and conversations in one training."""

import numpy as np
import pytest
from chat_cases import DIALOGUES

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.config.schema.text_format import Chat
from ats_jax.data.chat.tokenizer import ChatTokenizer
from ats_jax.data.look.audit import ReadingPhase, audit
from ats_jax.data.sources import open_data, open_eval_sets
from ats_jax.data.splits import open_datasets


@pytest.fixture
def chat_and_text(config, write):
  """A DataConfig of both."""
  base = write("base.jsonl", [{"text": f"some text {i} " * 20} for i in range(40)])
  talk = write("talk.jsonl", DIALOGUES)
  held = write("held.jsonl", DIALOGUES[:3])

  def make(**changes):
    defaults = dict(
      sources=Table(base=(str(base),), talk=(str(talk),)),
      format=Chat(sources=("talk", "held")), packing="best_fit", seq_len=512,
      validation_paths=(str(base),),
      validation_sets=Table(held=(str(held),)), batch_size=4,
      phases=(Phase(Table(base=1), steps=3), Phase(Table(base=1, talk=3))),
    )  # fmt: skip
    return config(**{**defaults, **changes})

  return make


def test_each_is_read_as_what_it_is(chat_and_text):
  cfg = chat_and_text()
  train, main = open_data(cfg, 0)
  assert isinstance(train.info.tokenizer, ChatTokenizer)
  assert train.info.parts["base"].packed.weights is None
  batch = train.read(np.arange(12, 52))
  is_talk = batch["source"] == 1
  assert is_talk[:, 0].sum() == 30
  text_mask = (batch["segment_ids"] > 0).astype(np.float32)
  np.testing.assert_array_equal(batch["loss_mask"][~is_talk], text_mask[~is_talk])
  asked = text_mask[is_talk] > batch["loss_mask"][is_talk]
  assert asked.any() and batch["loss_mask"][is_talk].any()

  alone = chat_and_text(
    paths=cfg.sources["talk"], sources=Table(), format=Chat(), phases=(),
    validation_paths=(), validation_sets=Table(), validation_fraction=0.0,
  )  # fmt: skip
  want, _ = open_datasets(alone, 0)
  got = train.info.parts["talk"]
  for name, values in want.read_once(range(want.info.num_rows)).items():
    np.testing.assert_array_equal(
      got.read_once(range(got.info.num_rows))[name], values, err_msg=name
    )

  held = {s.name: s.dataset for s in open_eval_sets(cfg, main)}
  assert held[""].info.num_documents == 40 and held["held"].info.num_documents == 3
  assert held[""].info.bytes_per_token and not held["held"].info.bytes_per_token


def test_each_token_once_and_with_its_weight(chat_and_text):
  train, _ = open_data(chat_and_text(), 0)
  phases = (ReadingPhase(1, 1, 0.5), ReadingPhase(3, 1, 1.0))
  (result,) = audit(train, scenarios={"1 host, then 3": phases})
  assert (result.difference, result.lost, result.repeated) == ("", 0, 0)
  assert result.targets == train.info.num_tokens


def test_one_vocabulary_of_both(chat_and_text):
  train, _ = open_data(chat_and_text(tokenizer="bpe", bpe_vocab_size=400), 0)
  base, talk = (train.info.parts[name].info.tokenizer for name in ("base", "talk"))
  assert talk.inner.fingerprint == base.fingerprint
  assert train.info.tokenizer.fingerprint == talk.fingerprint
