"""Fine-tuning on conversations with a known rule: it answers, and it stops."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import called, train_flags
from helpers import TINY, TRAINING, assert_trees_close, make_decoder, micro_batches, tiny_config

from ats_jax.config.text import text_of
from ats_jax.data.chat.conversation import Message
from ats_jax.data.splits import open_datasets
from ats_jax.inference.load import load_run
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals

# The rule: asked for a letter and a number, answer with the letter so many times.
ASKED = [(letter, count) for letter in "abcdefghijklmnop" for count in (1, 2, 3, 4)]
HELD_OUT = ASKED[5::9]


def turns(letter, count):
  asked = {"role": "user", "content": f"{letter}{count}"}
  return {"messages": [asked, {"role": "assistant", "content": letter * count}]}


SETTINGS = {
  "num_steps": 120,
  "model.vocab_size": 384,
  "model.d_model": 64,
  "model.d_ff": 128,
  "data.tokenizer": "bytes",
  "data.format": "chat",
  "data.packing": "best_fit",
  "data.seq_len": 64,
  "data.batch_size": 8,
  "data.validation_fraction": 0.0,
  "optimizer.learning_rate": 5e-3,
  "optimizer.warmup_steps": 20,
  "orchestrator.mode": "off",
  "log.writers": ("jsonl",),
  "log.progress": False,
  "sample.prompt": "a1",
  "sample.max_tokens": 16,
  "sample.temperature": 0.0,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """Those of a run on conversations of the rule, but for `HELD_OUT`."""
  folder = tmp_path_factory.mktemp("chats")
  lines = [json.dumps(turns(*pair)) for pair in ASKED if pair not in HELD_OUT]
  (folder / "chats.jsonl").write_text("\n".join(lines))
  paths = {"data.paths": (str(folder / "chats.jsonl"),), "data.cache_dir": str(folder / "cache")}
  return TINY | SETTINGS | paths


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
  """The workdir of a run that has learned the rule."""
  folder = tmp_path_factory.mktemp("run") / "chat"
  given = (f"{name}={text_of(value)}" for name, value in settings.items())
  assert called("train", *train_flags(folder, *given)).code == 0
  return folder


@pytest.mark.thorough
def test_it_learns_the_rule_and_to_stop(trained):
  assert (trained / "samples" / "120.txt").read_text() == "a1a\n"
  with load_run(trained) as run:
    for letter, count in HELD_OUT[:3]:
      assert "".join(run.answer(0, [Message("user", f"{letter}{count}")])) == letter * count
    with pytest.raises(ValueError, match="not trained on conversations"):
      of_text = dataclasses.replace(run, tokenizer=run.tokenizer.of_text)
      of_text.answer(0, [Message("user", "a1")])
  prompt = [f"--workdir={trained}", "--prompt=c3"]
  assert called("generate", *prompt, "--chat").out == "ccc\n"
  assert "--system is a turn" in called("generate", *prompt, "--system=x").error()


@pytest.fixture(scope="module")
def cfg(settings):
  return tiny_config(settings | {"data.format.weights": {"assistant": 1.0, "user": 0.25}})


@pytest.fixture(scope="module")
def rows(cfg):
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  return train_set.read(range(cfg.data.batch_size))


@pytest.fixture(scope="module")
def gradient(cfg):
  def of_batch(model, batch):
    whole = batch_totals(batch, TRAINING)
    objective = Pretraining(cfg)
    sums, _, grads = sums_and_grads(objective, model, batch, whole, jax.random.key(0), TRAINING)
    return objective.means(sums, whole)["train/loss"], grads

  return jax.jit(of_batch)


def test_targets_weigh_as_their_turns_do(cfg, rows, gradient, mesh):
  """Loss and gradient are those of a weighted mean, and of masked targets exactly nothing."""
  model, mask = make_decoder(cfg), rows["loss_mask"]
  assert set(np.unique(mask)) == {0.0, 0.25, 1.0}

  def dense(model):
    x_BTD, _ = model(
      rows["tokens"], positions_BT=rows["positions"], segment_ids_BT=rows["segment_ids"],
      rules=TRAINING, key=None,
    )  # fmt: skip
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, model.head_weights())
    chosen_BTV = jax.nn.one_hot(rows["targets"], cfg.model.vocab_size)
    logprobs_BT = jnp.sum(jax.nn.log_softmax(logits_BTV, axis=-1) * chosen_BTV, axis=-1)
    return -jnp.sum(logprobs_BT * mask) / jnp.sum(mask)

  loss, grads = gradient(model, micro_batches(rows, 1))
  want, want_grads = jax.jit(jax.value_and_grad(dense))(model)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  assert_trees_close(grads, want_grads, rtol=1e-4, atol=1e-6)

  noise = np.random.default_rng(0).integers(0, 256, mask.shape).astype(np.int32)
  other = rows | {"targets": np.where(mask == 0, noise, rows["targets"])}
  assert (other["targets"] != rows["targets"]).sum() > 100
  found = gradient(model, micro_batches(other, 1))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get((loss, grads)))
