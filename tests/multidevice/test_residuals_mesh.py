"""Positions of the residual stream cut over `tensor`: ops of one device, in less memory."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, every_equation, traced_step
from equality import ROWS, RTOL, config_of, mesh_of
from helpers import make_decoder

from ats_jax.config.schema import SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.generator import generate_tokens
from ats_jax.ops.cross_entropy import HEAD_AXES, linear_cross_entropy, token_logprobs
from ats_jax.ops.linear import linears
from ats_jax.planner.abstract import abstract_state
from ats_jax.planner.memory import activations
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.rules import spec, use_plan
from ats_jax.step.program import make_program

CUT = {"tensor": 2, "shard_residuals": True}
STREAM_AXES = ("batch", "residual_seq", "act_embed")


@pytest.mark.compat
@pytest.mark.parametrize(("sizes", "fp8"), [({"fsdp": 2}, False), ({"context": 2}, True)], ids=str)
def test_linear_layers_gather_and_scatter_positions(sizes, fp8):
  """In 8 bits too: a device scales the same block of numbers."""
  rng = np.random.default_rng(0)
  x, dy = (rng.normal(size=(4, 32, 32)).astype(np.float32) for _ in range(2))
  gate, up = (rng.normal(size=(32, 64)).astype(np.float32) for _ in range(2))
  down = rng.normal(size=(64, 32)).astype(np.float32)

  def loss(x, weights):
    wide = linears(x, weights[:2], inputs=("act_embed",), outputs=(("ff",), ("ff",)), fp8=fp8)
    (y,) = linears(
      wide[0] * jnp.tanh(wide[1]), weights[2:], inputs=("ff",), outputs=(("act_embed",),), fp8=fp8
    )
    return jnp.sum(y * reshard(jnp.asarray(dy), *STREAM_AXES)), y

  results = []
  for cut in (False, True):
    with jax.set_mesh(mesh_of({"tensor": 2} | sizes)), use_plan("default", cut_residuals=cut):
      lie = reshard(jnp.asarray(x), *STREAM_AXES)
      weights = [reshard(jnp.asarray(w), "embed", "ff") for w in (gate, up)]
      weights.append(reshard(jnp.asarray(down), "ff", "embed"))
      grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(lie, weights)
      assert y.sharding.spec == grads[0].sharding.spec == spec(*STREAM_AXES)
      results.append([np.asarray(a) for a in jax.tree.leaves((y, grads))])
  for whole, cut in zip(*results, strict=True):
    np.testing.assert_allclose(cut, whole, RTOL, RTOL / 10 * np.abs(whole).max())


@pytest.mark.parametrize("vocab", [64, 63])
def test_losses_read_a_cut_stream(vocab):
  """Where the vocabulary is not cut, a device scores its own positions alone."""
  rng = np.random.default_rng(0)
  x, head = (rng.normal(size=s).astype(np.float32) for s in ((4, 16, 32), (vocab, 32)))
  targets, mask = rng.integers(vocab, size=(4, 16)), rng.integers(2, size=(4, 16))
  targets, mask = targets.astype(np.int32), mask.astype(np.float32)

  def loss(x, head):
    logprobs = token_logprobs(x, head, targets, 64)
    sums = linear_cross_entropy(x, head, targets, mask, 0.1, 0.2, 64, per_token=True)
    terms = jax.lax.stop_gradient(sums.cross_entropy)
    return sums.objective + jnp.sum(mask * logprobs**2), (logprobs, terms)

  results = []
  for sizes in ({}, {"tensor": 2, "context": 2}):
    plan = use_plan("default", whole_vocabulary=vocab % 2 > 0, cut_residuals=bool(sizes))
    with jax.set_mesh(mesh_of(sizes)), plan:
      given = reshard(jnp.asarray(x), *STREAM_AXES), reshard(jnp.asarray(head), *HEAD_AXES)
      grads, terms = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*given)
      assert grads[0].sharding.spec == spec(*STREAM_AXES)
      assert all(a.sharding.spec == spec("batch", "seq") for a in terms)
      results.append([np.asarray(a) for a in (*grads, *terms)])
  for one, many in zip(*results, strict=True):
    np.testing.assert_allclose(many, one, RTOL, RTOL / 10 * np.abs(one).max())


LAYERS = 3
PLAIN = {
  "step.accum_steps": 1,
  "step.remat": "full",
  "model.num_layers": LAYERS,
  "model.dropout": 0.0,
}
STREAM = ROWS * 16 * 32  # numbers


class Traced(NamedTuple):
  sums: list[jax.P]
  text: str
  temporary: int
  kept: int


def over_tensor(spec: jax.P, dims: Iterable[int]) -> bool:
  entries = [spec.partitions[d] for d in dims]
  return any("tensor" in (e if type(e) is tuple else (e,)) for e in entries)


def sums_over_tensor(jaxpr: Any) -> Iterator[jax.P]:
  """How the products lie whose shares the devices along `tensor` have."""
  for eqn in every_equation(jaxpr):
    if eqn.primitive.name == "dot_general":
      specs = [v.aval.sharding.spec for v in eqn.invars]
      over = eqn.params["dimension_numbers"][0]
      if all(map(over_tensor, specs, over)):
        yield eqn.outvars[0].aval.sharding.spec


def traced(*, cut: bool) -> Traced:
  sizes = CUT | {"shard_residuals": cut}
  cfg, mesh = config_of("dense", sizes, PLAIN), mesh_of(sizes)
  with on_mesh(cfg, mesh):
    step = traced_step(cfg, mesh)
    compiled = step.lower().compile()
    return Traced(
      list(sums_over_tensor(step.jaxpr.jaxpr)),
      compiled.as_text(),
      compiled.memory_analysis().temp_size_in_bytes,
      activations(cfg, abstract_state(cfg), ROWS),
    )


@pytest.mark.mesh
def test_a_layer_scatters_its_sums_gathers_its_inputs_and_keeps_less():
  """Each product asks for a scattered sum; a CPU's XLA writes it as a sum and a slice."""
  cut, whole = traced(cut=True), traced(cut=False)
  assert cut.sums and all(spec.unreduced == {"tensor"} for spec in cut.sums)
  assert whole.sums and not any(spec.unreduced for spec in whole.sums)
  every = [c for c in collectives(cut.text) if c.in_loop]
  count = lambda kind: sum(a.size == STREAM for c in every if c.kind == kind for a in c.arrays)
  # Into attention and feed-forward: forward, and again; backward, and gradients of what leaves
  # them.
  assert count("all-gather") == 2 + 2 + 4
  assert count("all-reduce") == 2 + 1 + 2
  # Of each layer its input; the last norm's input, and the gradient of what the loss reads.
  assert whole.kept - cut.kept == (LAYERS + 2) * STREAM * 4 // 2
  assert cut.temporary < whole.temporary


@pytest.mark.mesh
def test_a_text_is_drawn_with_whole_rows_and_a_whole_stream():
  """Each token is one position, which nothing can cut; experts are where they are."""
  texts = []
  for sizes in ({}, CUT | {"context": 2, "expert": 2}):
    cfg = config_of("hybrid", sizes, {"model.vocab_size": 384, "model.num_layers": 1})
    with on_mesh(cfg, mesh_of(sizes)):
      how = {"rules": make_program(cfg).rules(cfg.num_steps), "prompt": "some prompt", "seed": 3}
      drawn = generate_tokens(make_decoder(cfg), ByteTokenizer(), SampleConfig(max_tokens=5), **how)
      texts.append(list(drawn))
  assert texts[0] == texts[1] and len(texts[0]) > 2
