"""The decoder in PyTorch computes what JAX's does: logits, losses, gradients, buffers, tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
import torch_cases
from torch_cases import CASES

from ats_jax.bridge.parity import our_greedy
from ats_jax.model.forward_pass import rules_at
from ats_jax.model.layer_kinds import layer_kinds as our_kinds
from ats_jax.model.param import merge
from ats_jax.pytorch import objective, weights
from ats_jax.pytorch.attention import Tokens, visibility
from ats_jax.pytorch.generation import generate
from ats_jax.pytorch.settings import RoutingRules, layer_kinds
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.parts.sparse import with_buffers

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),
]
# Models whose layers choose by other rules in training, and that keep no cache of their own.
OTHER_RULES = ("moe-capacity", "moe-capacity-weight")
# What has gradients of its own: a gradient is right only if the logits are.
OF_TRAINING = [name for name in CASES if name not in ("dense", "moe-capacity")]
# `test_torch_export` generates with further ones.
OF_CACHE = ["windows", "mod-predictor", "mod-static"]
CLOSE = dict(rtol=1e-4, atol=1e-4)


def test_the_mask_lies_in_memory_as_kernels_of_attention_need_it():
  ids_BT = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]]).T.contiguous().T  # batch by batch
  tokens = Tokens(ids_BT, ids_BT, torch.arange(4).expand(2, 4), (ids_BT, ids_BT), (ids_BT, ids_BT))
  seen_B1TS = visibility(tokens, None, None)
  assert seen_B1TS is not None and seen_B1TS.is_contiguous()
  assert seen_B1TS[0, 0].tolist() == [
    [True, False, False, False],
    [True, True, False, False],
    [False, False, True, False],
    [False, False, True, True],
  ]


def rules_of(cfg, *, training):
  found = rules_at(cfg, 0, training=training)
  return found, RoutingRules(training, found.capacity, found.horizon)


@jax.jit(static_argnames="rules")
def logits_of(model, batch, rules):
  x_BTD, _ = model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=rules,
  )
  return model.logits(x_BTD)


def test_the_kinds_of_layers_are_the_same():
  for cfg in map(torch_cases.config, CASES):
    ours = [dataclasses.replace(kind, tuned=True) for kind in our_kinds(cfg)]
    assert [(*kind, True) for kind in layer_kinds(cfg)] == list(map(dataclasses.astuple, ours))


@pytest.mark.parametrize("name", OTHER_RULES)
def test_logits_of_packed_rows(name):
  cfg, ours, theirs = torch_cases.both(name)
  rows, batch = torch_cases.batch(cfg)
  rules, their_rules = rules_of(cfg, training=False)
  want = np.asarray(logits_of(ours, rows, rules))
  with torch.no_grad():
    x_BTD, _, _ = theirs(
      batch["tokens"],
      positions_BT=batch["positions"],
      segment_ids_BT=batch["segment_ids"],
      rules=their_rules,
    )
    got = theirs.logits(x_BTD).numpy()
  real = rows["segment_ids"] > 0
  assert want[real].std() > 0.3
  np.testing.assert_allclose(got[real], want[real], **CLOSE)


@pytest.mark.parametrize("name", OF_TRAINING)
def test_gradients_losses_and_buffers(name):
  cfg, ours, theirs = torch_cases.both(name)
  rows, batch = torch_cases.batch(cfg, rows=4)
  rules, their_rules = rules_of(cfg, training=True)
  run = jax.jit(functools.partial(sums_and_grads, Pretraining(cfg)), static_argnames="rules")
  whole = batch_totals(rows, rules)
  stacked = {n: a[None] for n, a in rows.items()}
  sums, stats, grads = run(ours, stacked, whole, jax.random.key(0), rules=rules)
  found = objective.forward(theirs, batch, their_rules)
  their_whole = objective.totals(batch, their_rules)
  for field, value in their_whole._asdict().items():
    np.testing.assert_allclose(value, getattr(whole, field), err_msg=field)
  objective.loss_of(cfg, found, their_whole).backward()
  for field, value in sums._asdict().items():
    np.testing.assert_allclose(getattr(found.sums, field).detach(), value, rtol=1e-5, err_msg=field)
  want = torch_cases.arrays(cfg, merge(grads, ours))  # by the names that it has with buffers
  parameters = dict(theirs.named_parameters())
  for own, value in want.items():
    name = weights.their_name(own, theirs.state_dict())
    if name in parameters:
      got = weights.as_ours(name, parameters.pop(name).grad, value.shape).numpy()
      scale = max(1.0, np.abs(value).max())
      np.testing.assert_allclose(got / scale, value / scale, **CLOSE, err_msg=own)
      assert np.abs(value).max() > 1e-6, own  # it does something
  assert not parameters

  after = with_buffers(cfg, ours, stats, jax.numpy.asarray(3), rules)
  objective.set_buffers(theirs, found.stats, 3, their_rules)
  want = torch_cases.arrays(cfg, after)
  state = theirs.state_dict()
  for array, value in want.items():
    name = weights.their_name(array, state)
    got = weights.as_ours(name, state[name], value.shape)
    np.testing.assert_allclose(got, value, **CLOSE, err_msg=array)


@pytest.mark.parametrize("name", OF_CACHE)
def test_greedy_tokens_with_a_cache(name):
  cfg, ours, theirs = torch_cases.both(name)
  rules, their_rules = rules_of(cfg, training=False)
  prompt = np.random.default_rng(1).integers(0, cfg.model.vocab_size, (2, 9))
  want = our_greedy(ours, rules, prompt, 12)
  got = generate(theirs.eval(), torch.tensor(prompt), 12, rules=their_rules)
  np.testing.assert_array_equal(got.numpy(), want)
