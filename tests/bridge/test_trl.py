"""Losses of pairs beside trl's: 50 updates of one model on the same pairs, by AdamW of PyTorch."""

import os
import types

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import hf_gate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
import trl
from helpers import micro_batches
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from ats_jax.config.build import with_settings
from ats_jax.config.schema.loss import DpoConfig, KtoConfig, OrpoConfig, RewardConfig, SimPoConfig
from ats_jax.extensions import losses
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]  # theirs are many

STEPS, BATCHES, PAIRS, SEQ, RATE, PAD = 50, 5, 16, 24, 1e-3, 0
LOSSES = {
  "dpo": DpoConfig(beta=0.3),
  "ipo": DpoConfig(beta=0.3, form="ipo"),
  "a token": DpoConfig(beta=0.3, form="sigmoid_norm"),
  "simpo": SimPoConfig(beta=2.0, margin=0.6),
  "orpo": OrpoConfig(odds_weight=0.4),
  "kto": KtoConfig(beta=0.3, desirable=1.5, undesirable=0.7),
  "reward": RewardConfig(),
}
TOLERANCE = 1e-5  # of a loss; ours and theirs add in another order


def draw(vocab_size, seed=0):
  """[STEPS][PAIRS] pairs of (prompt, chosen, rejected), lists of ids; they come again."""
  rng = np.random.default_rng(seed)
  some = lambda: rng.integers(4, vocab_size, rng.integers(2, 7)).tolist()
  few = [[(some(), some(), some()) for _ in range(PAIRS)] for _ in range(BATCHES)]
  return few * (STEPS // BATCHES)


def padded(answers, prompts):
  """trl's batch of answers behind their prompts; the first token is what ours reads first."""
  ids = torch.full((len(answers), SEQ), PAD)
  attention, completion = torch.zeros_like(ids), torch.zeros_like(ids)
  for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    whole = [1, *prompt, *answer]
    ids[row, : len(whole)], attention[row, : len(whole)] = torch.tensor(whole), 1
    completion[row, 1 + len(prompt) : len(whole)] = 1
  return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def theirs_of(pairs):
  prompts = [prompt for prompt, _, _ in pairs]
  answers = [chosen for _, chosen, _ in pairs] + [rejected for _, _, rejected in pairs]
  return padded(answers, prompts * 2)


def theirs_to_rate(pairs):
  """The same without the last token, as ours reads them: nothing is behind it."""
  cut = [(prompt, chosen[:-1], rejected[:-1]) for prompt, chosen, rejected in pairs]
  return {name: x for name, x in theirs_of(cut).items() if name != "completion_mask"}


def labelled(pairs):
  """Beside each answer that of the question before, as trl does; the last answer is dropped."""
  return [(prompt, mine, pairs[n - 1][1]) for n, (prompt, mine, _) in enumerate(pairs)]


def is_good(number):
  return number % 3 > 0


def theirs_of_labelled(pairs):
  """trl's batch of answers with labels, and of the same questions with the other answers."""
  prompts, mine, others = (list(part) for part in zip(*pairs, strict=True))
  beside = {f"KL_{name}": x for name, x in padded(others, prompts).items()}
  return padded(mine, prompts) | beside | {"label": torch.tensor([*map(is_good, range(PAIRS))])}


def ours_of(pairs, reference):
  """Two pairs in a row, each of two segments."""
  shape = (len(pairs) // 2, 4 * SEQ)
  integers = ("tokens", "targets", "segment_ids", "positions")
  batch = {name: np.zeros(shape, np.int32) for name in integers}
  batch |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "reference", "label")}
  for number, (prompt, *answers) in enumerate(pairs):
    row, first = divmod(number, 2)
    for which, answer in enumerate(answers):
      at = SEQ * (2 * first + which)
      whole = [1, *prompt, *answer]
      here = row, slice(at, at + len(whole) - 1)
      batch["tokens"][here], batch["targets"][here] = whole[:-1], whole[1:]
      batch["segment_ids"][here] = 2 * first + which + 1
      batch["positions"][here] = np.arange(len(whole) - 1)
      batch["loss_mask"][row, at + len(prompt) : at + len(whole) - 1] = 1
      batch["reference"][row, at] = reference[which * len(pairs) + number]
      batch["label"][row, at] = 1 if is_good(number) else -1
  return batch


def logprobs(model, batch):
  """Sums over answers and their lengths, by torch alone."""
  logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
  each = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
  mask = batch["completion_mask"][:, 1:]
  return (each * mask).sum(1), mask.sum(1)


@torch.no_grad()
def references_of(model, batches):
  return [logprobs(model, theirs_of(pairs))[0].numpy() for pairs in batches]


@pytest.fixture(scope="module")
def source(cases):
  return cases("qwen3")[0]


def loss_of_trl(loss, model, tmp_path):
  """trl's loss as a function of a batch."""
  fixed = {"accelerator": types.SimpleNamespace(device="cpu"), "alpha": 0.0, "label_smoothing": 0.0}
  if isinstance(loss, SimPoConfig):
    own = types.SimpleNamespace(**fixed, beta=loss.beta, loss_type="simpo", simpo_gamma=loss.margin)

    def simpo(batch):
      sums, lengths = logprobs(model, batch)
      return CPOTrainer.cpo_loss(own, *(sums / lengths).chunk(2))[0].mean()

    return simpo
  if isinstance(loss, OrpoConfig):
    own = types.SimpleNamespace(**fixed, beta=loss.odds_weight)

    def orpo(batch):
      sums, lengths = logprobs(model, batch)
      chosen, rejected = (sums / lengths).chunk(2)
      return (-chosen - ORPOTrainer.odds_ratio_loss(own, chosen, rejected)[0]).mean()

    return orpo
  words = tokenizers.models.WordLevel({str(i): i for i in range(8)}, unk_token="0")
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(words), eos_token="2", pad_token="3", bos_token="1"
  )
  common = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
  common |= {"output_dir": str(tmp_path)}
  some = lambda record: datasets.Dataset.from_list([record] * 2)
  pair = {"prompt": "5", "chosen": "6", "rejected": "7"}
  if isinstance(loss, RewardConfig):
    args = trl.RewardConfig(**common)
    trainer = trl.RewardTrainer(
      model=model, args=args, train_dataset=some(pair), processing_class=tokenizer
    )
    model.config.pad_token_id = PAD  # by which it finds the last token
    return lambda batch: trainer.compute_loss(model, batch)
  common["beta"] = loss.beta
  if isinstance(loss, KtoConfig):
    weights = {"desirable_weight": loss.desirable, "undesirable_weight": loss.undesirable}
    args = trl.KTOConfig(**common, **weights, train_sampling_strategy="sequential")
    record, make = {"prompt": "5", "completion": "6", "label": True}, trl.KTOTrainer
  else:
    args = trl.DPOConfig(**common, loss_type=loss.form)
    record, make = pair, trl.DPOTrainer
  before = transformers.AutoModelForCausalLM.from_pretrained(model.folder)
  trainer = make(
    model=model, ref_model=before, args=args, train_dataset=some(record), processing_class=tokenizer
  )
  return lambda batch: trainer._compute_loss(model, batch, False)


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.slow) if n == "a token" else n for n in LOSSES]
)
def test_fifty_updates_have_the_losses_of_trl(name, source, tmp_path, mesh):
  loss = LOSSES[name]
  kind, further = transformers.AutoModelForCausalLM, {}
  if name == "reward":
    kind = transformers.AutoModelForSequenceClassification
    further = {"num_labels": 1}
  model = kind.from_pretrained(source.folder, dtype=torch.float32, **further)
  model.folder = source.folder
  model.eval()  # no dropout
  batches, batch_of = draw(model.config.vocab_size), theirs_of
  if name == "kto":
    batches, batch_of = [labelled(pairs) for pairs in batches], theirs_of_labelled
  if name == "reward":
    batch_of, references = theirs_to_rate, [np.zeros(2 * PAIRS)] * STEPS
    head = model.score.weight.detach().clone().numpy()
  else:
    references = references_of(model, batches)
  compute = loss_of_trl(loss, model, tmp_path)
  optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0)
  want = []
  for pairs in batches:
    value = compute(batch_of(pairs))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    want.append(value.item())

  cfg = with_settings(
    hf_gate.settings(source),
    {
      "data.format": loss.FORMAT,
      "data.seq_len": 4 * SEQ,
      "data.batch_size": PAIRS // 2,  # two in a row
      "data.max_segments": 4,
      "step.loss": loss,
      "optimizer.learning_rate": RATE,
      "optimizer.schedule": "constant",
      "optimizer.warmup_steps": 0,
      "optimizer.weight_decay": 0.0,
      "optimizer.grad_clip": 0.0,
      "optimizer.b2": 0.95,
      "orchestrator.mode": "off",
    },
  )
  program = make_program(cfg, losses.find(loss.name)(cfg))
  state = program.init(model=hf_gate.imported(source, cfg))
  if name == "reward":
    state.model.head.weight[...] = jnp.asarray(head)
  got = []
  for pairs, reference in zip(batches, references, strict=True):
    batch = to_global(micro_batches(ours_of(pairs, reference), 1), jax.sharding.get_mesh())
    state, metrics = program.train_step(state, batch, program.training_rules(1))
    got.append(metrics["train/loss"])
  assert np.mean(want[-BATCHES:]) < 0.8 * np.mean(want[:BATCHES])  # it learns
  np.testing.assert_allclose(np.asarray(got), want, rtol=TOLERANCE, atol=TOLERANCE)
