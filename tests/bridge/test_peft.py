"""Adapters beside those of peft: losses of the same training, and folders in both directions."""

import hf_gate
import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from helpers import make_test_mesh, micro_batches

from ats_jax.bridge import peft_folder
from ats_jax.bridge.convert import load_model
from ats_jax.bridge.family import match_weights, to_theirs, together
from ats_jax.bridge.parity import our_logits
from ats_jax.checkpoint import abstract_like
from ats_jax.checkpoint.layout import named_arrays
from ats_jax.config.build import resolve, with_settings
from ats_jax.config.names import flatten
from ats_jax.model import quantised
from ats_jax.model.adapters import merged
from ats_jax.model.layout import stacks
from ats_jax.model.param import params_of
from ats_jax.step.program import make_program

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
STEPS, RATE, DECAY, SEQ = 50, 5e-4, 0.02, 24
SETTINGS = {
  "num_steps": STEPS,
  "data.batch_size": 4,
  "data.seq_len": SEQ,
  "data.max_segments": 1,
  "precision.compute_dtype": "float32",
  "optimizer.learning_rate": RATE,
  "optimizer.schedule.name": "constant",
  "optimizer.b2": 0.999,
  "optimizer.weight_decay": DECAY,
  "optimizer.grad_clip": 0.0,
  "finetune.adapter.name": "lora",
  "finetune.adapter.rank": 4,
  "finetune.adapter.alpha": 6.0,
}
OURS = {
  "lora": {},
  "rslora": {"finetune.adapter.scale": "rslora"},
  "lora+": {"optimizer.rate_by_role": {"adapter_out": 4.0}},
  "dora": {"finetune.adapter.name": "dora", "optimizer.decay_by_role": {"scalar": DECAY}},
}


def opened(source, changes):
  """The program of a run on a folder's model, and its first state."""
  cfg = resolve(with_settings(hf_gate.settings(source), SETTINGS | changes), 0)
  program = make_program(cfg)
  abstract = abstract_like(program.abstract_base(), jax.sharding.get_mesh())
  # Each layer by itself, as a run reads it.
  abstract = quantised.arriving(abstract, program.init(abstract=True).model)
  return program, program.init(model=quantised.arrived(load_model(source, cfg, abstract)))


def rows(cfg):
  """Batches of random tokens without padding, which come again."""
  shape = (cfg.data.batch_size, SEQ + 1)
  for step in range(STEPS):
    tokens = np.random.default_rng(step % 5).integers(0, cfg.model.vocab_size, shape)
    tokens = tokens.astype(np.int32)
    ones = np.ones((shape[0], SEQ), np.int32)
    yield {
      "tokens": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "loss_mask": ones.astype(np.float32),
      "segment_ids": ones,
      "positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), ones.shape),
    }


def our_losses(program, state):
  losses = []
  for step, batch in enumerate(rows(program.cfg), 1):
    batch = micro_batches(batch, 1)
    state, metrics = program.train_step(state, batch, program.training_rules(step))
    losses.append(float(metrics["train/loss"]))
  return state, losses


def their_losses(model, cfg, rate_of_b=1.0):
  named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
  tied = []
  if cfg.model.tie_embeddings:  # peft has views of the same memory, and would move it twice
    of = lambda part: next(p for n, p in named if part in n)
    pairs = ("lora_embedding_A", "lm_head.lora_B"), ("lora_embedding_B", "lm_head.lora_A")
    tied = [(of(table), of(head)) for table, head in pairs]
    named = [(n, p) for n, p in named if "lm_head" not in n]
  groups = [
    {"params": [p for n, p in named if "lora_B" not in n], "lr": RATE},
    {"params": [p for n, p in named if "lora_B" in n], "lr": RATE * rate_of_b},
  ]
  optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=DECAY)
  losses = []
  for batch in rows(cfg):
    tokens, targets = (torch.tensor(batch[name]).long() for name in ("tokens", "targets"))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    for table, head in tied:
      table.grad += head.grad.T
      head.grad = None
    optimizer.step()
    losses.append(loss.item())
  return losses


def base_of(source):
  return transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)


def base_with(source, program, model):
  """Theirs, with the weights of ours, whose adapters are still zero."""
  arrays = named_arrays(merged(model), stacks=stacks(program.cfg))
  items = match_weights(source.family, {name: part.shape for name, part in arrays.items()})

  def ours(item):
    part = arrays[item.ours]
    return np.asarray(part.leaf if part.layer is None else part.leaf[part.layer])

  tensors = {k: v for group in together(items) for k, v in to_theirs(group, ours)}
  base = base_of(source)
  there = base.state_dict()
  for name, tensor in tensors.items():
    there[name].copy_(torch.tensor(np.ascontiguousarray(tensor)))
  return base


def write(program, source, state, folder):
  family = source.family.fitted(flatten(program.cfg))
  peft_folder.write(folder, program.cfg, family, state.model, base=str(source.folder))
  return family


@torch.no_grad()
def assert_same_logits(program, ours, theirs):
  tokens = next(rows(program.cfg))["tokens"]
  theirs.eval()
  want = theirs(torch.tensor(tokens).long()).logits.numpy()
  got = our_logits(ours, program.rules(STEPS), tokens, np.arange(SEQ))
  np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()), rtol=0)


@pytest.mark.parametrize("kind", OURS)
def test_dense_training_is_that_of_peft(kind, cases, tmp_path):
  source, _ = cases("qwen3")
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program, state = opened(source, OURS[kind])
    write(program, source, state, tmp_path / "first")
    theirs = peft.PeftModel.from_pretrained(base_of(source), tmp_path / "first", is_trainable=True)
    state, losses = our_losses(program, state)
    rate_of_b = 4.0 if kind == "lora+" else 1.0
    want = their_losses(theirs, program.cfg, rate_of_b)
    assert want[-5] < want[0] - 0.01  # of the same batch: it learns
    np.testing.assert_allclose(losses, want, atol=1e-5, rtol=0)

    family = write(program, source, state, tmp_path / "last")
    again = peft.PeftModel.from_pretrained(base_of(source), tmp_path / "last")
    assert_same_logits(program, state.model, again)
    assert_same_logits(program, merged(state.model), again)
    theirs.save_pretrained(tmp_path / "theirs")
    other = opened(source, OURS[kind])[1].model
    back = peft_folder.read(tmp_path / "theirs", program.cfg, family, other)
    assert_same_logits(program, back, theirs)


@pytest.mark.parametrize(("kind", "base"), [("lora", "int8"), ("lora", "int4"), ("dora", "nf4")])
def test_training_beside_codes_is_that_of_peft_on_what_they_mean(kind, base, cases, tmp_path):
  source, _ = cases("qwen3")
  settings = OURS[kind] | {"finetune.adapter.base": base}
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program, state = opened(source, settings)
    write(program, source, state, tmp_path / "first")
    theirs = base_with(source, program, state.model)
    plain = base_of(source).state_dict()
    assert any(not torch.equal(x, plain[name]) for name, x in theirs.state_dict().items())
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "first", is_trainable=True)
    state, losses = our_losses(program, state)
    want = their_losses(theirs, program.cfg)
    assert want[-5] < want[0] - 0.01
    np.testing.assert_allclose(losses, want, atol=1e-5, rtol=0)
    assert_same_logits(program, merged(state.model), theirs)


TABLES = {"finetune.adapter.targets": ("embedding", "head", "q", "down")}
TIED = {"finetune.adapter.targets": ("embedding", "attention"), "finetune.adapter.scale": "rslora"}


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("llama", TABLES),
    ("llama", TABLES | OURS["dora"]),
    ("qwen2-yarn-window", TIED),
    ("gemma2", TIED),
    ("mixtral", {"finetune.adapter.targets": ("router",), "finetune.adapter.scale": "rslora"}),
    ("qwen3_moe", {"finetune.adapter.targets": ("router", "experts", "attention")}),
    ("gpt_oss", {"finetune.adapter.targets": ("router", "attention")}),
    ("gpt_oss", {"finetune.adapter.targets": ("router",)}),
  ],
)
def test_tables_and_routers_are_adapted_as_by_peft(name, changes, cases, tmp_path):
  source, _ = cases(name)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program, state = opened(source, changes)
    write(program, source, state, tmp_path / "first")
    theirs = peft.PeftModel.from_pretrained(base_of(source), tmp_path / "first", is_trainable=True)
    state, losses = our_losses(program, state)
    is_sparse = program.cfg.moe.num_experts > 0  # then another loss is added to ours
    want = losses if is_sparse else their_losses(theirs, program.cfg)
    assert want[-5] < want[0] - 1e-3
    np.testing.assert_allclose(losses, want, atol=1e-5, rtol=1e-6)
    family = write(program, source, state, tmp_path / "last")
    again = peft.PeftModel.from_pretrained(base_of(source), tmp_path / "last")
    assert_same_logits(program, state.model, again)
    assert_same_logits(program, merged(state.model), again)
    if not is_sparse:  # of experts peft saves other names than it reads
      again.save_pretrained(tmp_path / "again")
    folder, other = tmp_path / ("last" if is_sparse else "again"), opened(source, changes)[1].model
    cfg = with_settings(hf_gate.settings(source), {"precision.compute_dtype": "float32"})
    base = hf_gate.imported(source, cfg)
    with_adapters = peft_folder.config_with(folder, cfg, family, base)
    assert_same_logits(program, peft_folder.merged_with(folder, with_adapters, family, base), again)
    back = peft_folder.read(folder, program.cfg, family, other)
    jax.tree.map(np.testing.assert_array_equal, params_of(back), params_of(state.model))


# Experts that are not square: their transposes would not fit, or give other logits.
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scale", ["lora", "rslora"])
def test_adapters_of_experts_load_in_peft(name, scale, cases, tmp_path):
  source, _ = cases(name)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program, state = opened(source, {"finetune.adapter.scale": scale})
    state, losses = our_losses(program, state)
    assert losses[-5] < losses[0] - 0.01
    family = write(program, source, state, tmp_path / "last")
    theirs = peft.PeftModel.from_pretrained(base_of(source), tmp_path / "last")
    assert_same_logits(program, state.model, theirs)
    assert_same_logits(program, merged(state.model), theirs)
    other = opened(source, {"finetune.adapter.scale": scale})[1].model
    back = peft_folder.read(tmp_path / "last", program.cfg, family, other)
    jax.tree.map(np.testing.assert_array_equal, params_of(back), params_of(state.model))
