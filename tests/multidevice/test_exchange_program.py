"""What XLA makes of a layer whose experts are spread: its collectives, and what waits for what."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_test_mesh, tiny_config

from ats_jax.model.moe import MoE
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.rules import use_plan

pytestmark = pytest.mark.compat

BATCH, SEQ, WIDTH, FF, WAYS = 8, 6, 24, 4, 4
TOKENS = BATCH * SEQ // WAYS
LAYER = {
  "model.d_model": WIDTH,
  "model.num_heads": 2,
  "moe.d_ff": FF,
  "moe.num_experts": 8,
  "moe.num_shared": 1,
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)(.*)$")


def forward(layer, x_BTD, valid_BT):
  return layer(x_BTD, valid_BT, training=True, key=None)[0]


def with_gradients(layer, x_BTD, valid_BT):
  """Of a linear objective: what goes back does not depend on the output."""
  weight_BTD = jnp.sin(x_BTD)
  total = lambda params, x: jnp.sum(weight_BTD * forward(merge(params, layer), x, valid_BT))
  return jax.value_and_grad(total, argnums=(0, 1))(trainable(layer), x_BTD)


@functools.cache
def program(how, factor):
  """The text of a compiled layer and its gradients."""
  cfg = tiny_config(LAYER | {"moe.exchange": how, "moe.exchange.factor": factor})
  plan = use_plan("default", hosts=2 if how == "hierarchical" else 1)
  with jax.set_mesh(make_test_mesh(1, 1, 1, WAYS)), plan:
    layer = MoE(cfg, numerics(cfg), nnx.Rngs(params=jax.random.key(0)))
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
    x = reshard(jnp.array(x), "batch", "seq", "act_embed")
    valid = reshard(jnp.ones((BATCH, SEQ), bool), "batch", "seq")
    return jax.jit(with_gradients).lower(layer, x, valid).compile().as_text()


def collectives_of_rows(text):
  """(kind, shape of the result, is it in a loop) of those that move activations."""
  loops = set(re.findall(r"\bbody=%([\w.-]+)", text))
  found, computation = [], ""
  for line in text.splitlines():
    if line.endswith("{"):
      computation = line.removeprefix("ENTRY ").split()[0].removeprefix("%")
    elif match := _INSTRUCTION.match(line):
      kind, shape = match[3].removesuffix("-start"), re.search(r"\[([\d,]+)\]", match[2])
      shape = tuple(map(int, shape[1].split(","))) if shape else ()
      moves = kind in ("all-gather", "reduce-scatter", "all-to-all")  # not sums of gradients
      is_weight = shape == (FF, WIDTH)  # of the shared expert, gathered
      if moves and shape[-1:] == (WIDTH,) and len(shape) == 2 and not is_weight:
        found.append((kind, shape, computation in loops))
  return sorted(found)


GATHER = ("all-gather", (WAYS * TOKENS, WIDTH))
SCATTER = ("reduce-scatter", (TOKENS, WIDTH))


@pytest.mark.thorough
def test_one_gather_of_tokens_and_one_sum_of_blocks_each_way():
  """The gather's derivative is a sum of blocks, and that of the sum a gather."""
  once = [GATHER, GATHER, SCATTER, SCATTER]
  in_loop = lambda found, inside: [(kind, shape) for kind, shape, loop in found if loop == inside]
  whole = collectives_of_rows(program("allgather", float(WAYS)))
  assert in_loop(whole, False) == once
  assert not in_loop(whole, True)  # room for all: there are no further passes
  bounded = collectives_of_rows(program("allgather", 1.0))
  assert in_loop(bounded, False) == once  # what a further pass needs stays in its loop
  assert len(in_loop(bounded, True)) == 5


@pytest.mark.parametrize("how", ["allgather", pytest.param("hierarchical", marks=pytest.mark.mesh)])
def test_the_shared_expert_and_the_exchange_do_not_wait_for_each_other(how):
  """So that a scheduler can run them at the same time."""
  text = program(how, float(WAYS))
  entry = text[text.index("\nENTRY ") :]
  operands, shared, exchange = {}, set(), set()
  for line in entry.splitlines():
    if match := _INSTRUCTION.match(line):
      name, shape, kind, args, rest = match.groups()
      operands[name] = re.findall(r"%([\w.-]+)", args)
      called = re.search(r"calls=%([\w.-]+)", rest)
      body = text[text.index(f"%{called[1]} (") :].split("\n}", 1)[0] if called else line
      if re.search(r' dot\(.*op_name="[^"]*TK,', body):
        shared.add(name)
      moves = kind in ("all-gather", "reduce-scatter", "all-to-all")
      if moves and f"{WIDTH}]" in shape and f"[{FF},{WIDTH}]" not in shape:
        exchange.add(name)

  @functools.cache
  def ancestors(name):
    return {name}.union(*(ancestors(o) for o in operands.get(name, ())))

  assert len(shared) >= 8
  assert len(exchange) >= 4
  assert not any(ancestors(name) & exchange for name in shared)
  assert not any(ancestors(name) & shared for name in exchange)
