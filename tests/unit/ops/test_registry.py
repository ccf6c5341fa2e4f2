"""Choices, tuning tables, and a kernel that is plugged in, on one device and on meshes."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema.setting import when
from ats_jax.ops import implementations, registry, requirements
from ats_jax.ops.adamw import UpdateScalars, adamw_update
from ats_jax.ops.dispatch import sort_by_expert, sum_rows, take_rows
from ats_jax.ops.registry import XLA, FallbackError, Kernels
from ats_jax.ops.requirements import Device, cudnn_attention, with_compute_dtype
from ats_jax.ops.rms_norm import rms_norm
from ats_jax.ops.rope import rope, rope_table
from ats_jax.ops.routing import RoutingRule, route
from ats_jax.ops.swiglu import swiglu
from ats_jax.sharding.apply import reshard
from ats_jax.step import program
from ats_jax.verbs.bench.cases import toy_cases
from kernels_triton.plan import FEW_ROWS

pytestmark = pytest.mark.compat

HOPPER = Device("gpu", "9.0", "NVIDIA Test")
SEEN = []  # shapes that the kernels below were called with


# Kernels as a package of kernels would have them: local arrays in, local arrays out.
def swiglu_forward(gate, up, block=1):
  SEEN.append(("swiglu.forward", gate.shape, block))
  return gate / (1 + jnp.exp(-gate)) * up


def swiglu_backward(gate, up, dy):
  SEEN.append(("swiglu.backward", gate.shape, 0))
  s = 1 / (1 + jnp.exp(-gate))
  return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def rms_norm_forward(x, scale, *, eps):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rms_norm_backward(x, scale, dy, *, eps):
  _, pull = jax.vjp(lambda x, s: rms_norm_forward(x, s, eps=eps), x, scale)
  dx, dscale = pull(dy)
  return dx, jnp.stack([dscale / 4] * 4)  # as four blocks that each saw some of the rows


def rotate(x, cos, sin):
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def route_forward(logits, selection, valid, *, top_k, score, renormalize, scale):
  return route(logits, selection, valid, RoutingRule(top_k, score, renormalize, scale))


def route_backward(logits, column, dweight, *, top_k, score, renormalize, scale):
  def weights(x):
    scores = jnp.take_along_axis(jax.nn.softmax(x), column, axis=-1)
    return scale * scores / scores.sum(-1, keepdims=True)

  return jax.vjp(weights, logits)[1](dweight)[0]


def adamw_kernel(param, grad, mu, nu, rates, **constants):
  out = adamw_update(param, grad, mu, nu, UpdateScalars(*rates), **constants)
  return *out[:3], out.squares[None]


def sort_kernel(expert_NK, *, num_experts):
  places, sizes = sort_by_expert(expert_NK, num_experts)
  return *places, sizes


def take_kernel(x, source):
  SEEN.append(("rows", source.shape, 0))
  return jnp.concatenate([x, jnp.zeros_like(x[:1])])[source]


def take_back_kernel(dout, slot):
  return take_kernel(dout, slot).sum(1)


def sum_kernel(y, weight, slot):
  return (take_kernel(y, slot) * weight[..., None]).sum(1)


def sum_back_kernel(y, weight, source, choice, slot, dout):
  _, pull = jax.vjp(lambda y, w: sum_kernel(y, w, slot), y, weight)
  return pull(dout)


def plug(monkeypatch, op, obstacle="", default=True, tiles=None, **where):
  """Adds a kernel "mine" of this file to the table."""
  entry = implementations.OPS[op]
  where = {slot: globals()[name] for slot, name in where.items()}
  kernel = implementations.Kernel(
    "mine", where, tuple(where) if default else (), "2x", lambda cfg, device: obstacle, tiles or {}
  )
  monkeypatch.setitem(implementations.OPS, op, dataclasses.replace(entry, kernels=(kernel,)))
  return Kernels(tuple((f"{op}.{slot}", "mine") for slot in where))


def test_the_table_is_consistent():
  for name, op in implementations.OPS.items():
    for kernel in op.kernels:
      assert set(kernel.default) <= set(kernel.where) <= set(op.slots), (name, kernel.name)
      assert kernel.why and kernel.name != "xla"
      for where in kernel.where.values():
        assert callable(where)
    for slot, first in op.first.items():
      assert slot in op.slots and op.preferred(slot)[0].name == first, (name, slot)


def test_docs_name_every_op_and_slot():
  text = (Path(__file__).parents[3] / "docs/reference/kernels.md").read_text()
  for name, op in implementations.OPS.items():
    for slot in op.slots:
      assert f"`{name}.{slot}`" in text


def test_default_obstacle_and_strict(monkeypatch):
  cfg, strict = tiny_config(), tiny_config({"ops.strict": True})
  no_kernel = implementations.Op(implementations.FORWARD_BACKWARD)
  monkeypatch.setitem(implementations.OPS, "rope", no_kernel)
  plug(monkeypatch, "swiglu", forward="swiglu_forward")
  chosen, choices = registry.choose(cfg, HOPPER)
  assert chosen.of("swiglu", "forward") == "mine"
  assert chosen.of("swiglu", "backward") == chosen.of("rope", "forward") == "xla"
  lines = [str(c) for c in choices]
  assert "swiglu.forward: mine (2x)" in lines
  assert "swiglu.backward: xla (reference: this slot has no kernel)" in lines
  assert not any("rope" in line for line in lines)  # nothing to choose there

  plug(monkeypatch, "swiglu", obstacle="it is broken", forward="swiglu_forward")
  assert registry.choose(cfg, HOPPER)[0].of("swiglu", "forward") == "xla"
  with pytest.raises(FallbackError, match="swiglu would fall back to xla because it is broken"):
    registry.choose_op(strict, HOPPER, "swiglu")
  assert registry.choose_op(strict, Device("cpu"), "swiglu")["forward"].implementation == "xla"
  forced = tiny_config({"ops.kernels": {"swiglu": "mine"}})
  with pytest.raises(
    ValueError, match=r"ops\.kernels=swiglu=mine: it is broken\. Use swiglu=xla, or leave it out"
  ):
    registry.choose(forced, HOPPER)


def test_an_op_says_which_configs_use_it(monkeypatch):
  _, choices = registry.choose(tiny_config(), Device("cpu"))  # is told nothing of speeds on a GPU
  assert choices and all("this is cpu" in c.reason for c in choices)
  ops = lambda cfg: {c.op.split(".")[0] for c in registry.choose(cfg, Device("cpu"))[1]}
  dense, of_experts = ops(tiny_config()), {"grouped_matmul", "routing", "sort_by_expert"}
  of_experts |= {"take_rows", "sum_rows"}
  assert "swiglu" in dense and not dense & (of_experts | {"quantise"})
  assert ops(tiny_config({"moe.num_experts": 4})) == dense | of_experts
  # One that is used by nothing in here is not chosen, and needs no edit elsewhere.
  entry = dataclasses.replace(implementations.OPS["swiglu"], used_by=when("step.z_loss"))
  monkeypatch.setitem(implementations.OPS, "swiglu", entry)
  assert ops(tiny_config()) == dense - {"swiglu"}
  assert ops(tiny_config({"step.z_loss": 1e-4})) == dense


def test_a_kernel_that_is_no_default_runs_when_asked_for(monkeypatch):
  plug(monkeypatch, "swiglu", default=False, forward="swiglu_forward", backward="swiglu_backward")
  choice = registry.choose_op(tiny_config({"ops.strict": True}), HOPPER, "swiglu")["forward"]
  assert str(choice) == "swiglu: xla (reference: mine is no default: 2x)"
  cfg = tiny_config({"ops.kernels": {"swiglu.backward": "mine", "rope": "xla"}})
  slots, _ = registry.choose(cfg, HOPPER)
  assert (slots.of("swiglu", "forward"), slots.of("swiglu", "backward")) == ("xla", "mine")


def test_kept_programs_stand_in_for_triton(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
  changes = {"ops.kernels": {"attention": "triton"}, "precision.compute_dtype": "bfloat16"}
  cfg, ampere = tiny_config(changes | {"model.head_dim": 16}), Device("gpu", "8.0")
  folder = tmp_path / "ats_jax" / "kernels"
  folder.mkdir(parents=True)
  (folder / "triton-9.0-0.json").touch()  # for another GPU
  with pytest.raises(
    ValueError, match=r"not installed, and no program for .* 8\.0 is in .*kernels"
  ):
    registry.choose(cfg, ampere)
  (folder / "triton-8.0-0.json").touch()
  assert registry.choose(cfg, ampere)[0].of("attention", "forward") == "triton"


@pytest.mark.parametrize(
  ("slots", "message"),
  [
    ({"gelu": "xla"}, "gelu=xla: no op 'gelu'; there are attention"),
    ({"swiglu.middle": "xla"}, "swiglu.middle=xla: swiglu has the slots forward, backward"),
    ({"swiglu": "mosaic"}, "swiglu=mosaic: 'mosaic' is not one of xla, cuda"),
  ],
)
def test_wrong_settings(slots, message):
  with pytest.raises(ValueError, match=f"ops.kernels: {message}"):
    registry.choose(tiny_config({"ops.kernels": slots}), Device("cpu"))


def test_tuning_tables(monkeypatch, tmp_path):
  plug(monkeypatch, "swiglu", tiles={"block": (1, 2)}, forward="swiglu_forward")
  monkeypatch.setattr(registry, "TUNING", tmp_path)
  path = registry.tuning_file("NVIDIA Test", "swiglu")
  path.parent.mkdir()
  entry = lambda name, **tiles: {"implementation": name, "tiles": tiles}
  shapes = {"rows<=16,d_ff=8": entry("mine", block=2), "rows<=1024,d_ff=8": entry("xla")}
  path.write_text(json.dumps({"forward": shapes}))
  registry.tuning_table.cache_clear()
  registry.tuned_choice.cache_clear()
  slots, _ = registry.choose(tiny_config(), HOPPER)
  find = lambda slots, rows: registry.kernel("swiglu", "forward", slots, rows=rows, d_ff=8)
  assert find(slots, 16).keywords == find(slots, 9).keywords == {"block": 2}
  assert find(slots, 17).keywords == {}  # not tuned: the kernel's own tiles
  assert find(slots, 600) is None  # measured: XLA is faster there
  asked, _ = registry.choose(tiny_config({"ops.kernels": {"swiglu": "mine"}}), HOPPER)
  assert find(asked, 600).keywords == {}  # unless it is asked for
  SEEN.clear()
  swiglu(jnp.ones((16, 8)), jnp.ones((16, 8)), slots)
  assert SEEN == [("swiglu.forward", (16, 8), 2)]


def cases():
  """name -> (kernels by slot, function of (slots, arrays), arrays with their axes)."""
  draw = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  x, y = draw(0, 8, 4, 16), draw(1, 8, 4, 16)
  btf, heads = ("batch", "seq", "ff"), ("batch", "seq", "heads", "head_dim")
  positions = jnp.broadcast_to(jnp.arange(4), (8, 4))
  rule = RoutingRule(2, "softmax", True, 2.0)

  def rope_of(slots, x):
    return rope(x, rope_table(reshard(positions, "batch", "seq"), 16, 100.0), slots)

  def route_of(slots, x):
    valid = reshard(positions < 3, "batch", "seq")
    columns, weights, load = route(x, x, valid, rule, slots)
    return weights, columns, load

  def adamw_of(slots, p, g):
    rates = UpdateScalars(0.5, 0.1, 0.3, 0.2)
    moments = jnp.zeros_like(p), jnp.zeros_like(p)
    return tuple(
      adamw_update(
        p, g, *moments, rates, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, kernels=slots
      )
    )

  both = lambda f, b: {"forward": f, "backward": b}
  return {
    "swiglu": (
      both("swiglu_forward", "swiglu_backward"),
      lambda s, gate, up: swiglu(gate, up, s),
      [(x, btf), (y, btf)],
    ),
    "rms_norm": (
      both("rms_norm_forward", "rms_norm_backward"),
      lambda s, x, w: rms_norm(x, w, eps=1e-3, kernels=s),
      [(x, ("batch", "seq", "act_embed")), (draw(2, 16), ("norm",))],
    ),
    "rope": (both("rotate", "rotate"), rope_of, [(draw(3, 8, 4, 4, 16), heads)]),
    "routing": (
      both("route_forward", "route_backward"),
      route_of,
      [(x, ("batch", "seq", "router"))],
    ),
    "adamw": ({"update": "adamw_kernel"}, adamw_of, [(a[0], ("embed", "ff")) for a in (x, y)]),
  }


@pytest.mark.parametrize(
  ("op", "only"),
  [(op, "both") for op in ("swiglu", "rms_norm", "rope", "routing", "adamw")]
  + [("swiglu", "forward"), ("rms_norm", "backward")],
)
def test_plugged_kernels_agree_with_xla(monkeypatch, op, only):
  where, f, placed = cases()[op]
  slots = plug(monkeypatch, op, **{k: v for k, v in where.items() if only in (k, "both")})
  SEEN.clear()

  def run(slots, args):
    first = lambda *a: jax.tree.leaves(f(slots, *a))[0]
    y, pull = jax.vjp(first, *args)
    grads = () if op == "adamw" else pull(jnp.cos(y))
    return jax.tree.leaves(f(slots, *args)), grads

  found = []
  for shape, given in (((1, 1, 1), XLA), ((2, 2, 2), slots)):
    with jax.set_mesh(make_test_mesh(*shape)):
      args = [reshard(jnp.asarray(a), *axes) for a, axes in placed]
      found.append(jax.jit(run, static_argnums=0)(given, args))
  for want, got in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
  if op == "swiglu":
    assert SEEN and all(shape == (2, 4, 8) for _, shape, _ in SEEN)  # of one device


@pytest.mark.parametrize("tokens", [FEW_ROWS // 2, FEW_ROWS // 2 + 1])
def test_dispatch_kernels(monkeypatch, tokens):
  """Few rows are taken and added up by XLA's version, which joins with what is around it."""
  shape = tokens, 2
  expert = jnp.asarray(np.random.default_rng(0).integers(0, 5, shape), jnp.int32)  # 4 = nowhere
  x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, 6)), jnp.float32)
  weight = np.random.default_rng(2).random(shape).astype(np.float32)
  slots = Kernels(
    plug(monkeypatch, "sort_by_expert", forward="sort_kernel").names
    + plug(monkeypatch, "take_rows", forward="take_kernel", backward="take_back_kernel").names
    + plug(monkeypatch, "sum_rows", forward="sum_kernel", backward="sum_back_kernel").names
  )

  def forward(slots, expert, x, weight):
    places, sizes = sort_by_expert(expert, 4, slots)
    return sum_rows(jnp.sin(take_rows(x, places, slots)), weight, places, slots), sizes

  @functools.partial(jax.jit, static_argnums=0)
  def run(slots, expert, *args):
    y, pull, sizes = jax.vjp(functools.partial(forward, slots, expert), *args, has_aux=True)
    return y, sizes, *pull(jnp.cos(y))

  SEEN.clear()
  jax.eval_shape(functools.partial(forward, slots), expert, x, weight)
  assert len(SEEN) == (2 if expert.size > FEW_ROWS else 0)

  for a, b in zip(*(run(given, expert, x, weight) for given in (slots, XLA)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_cases_know_the_shape_that_tuning_tables_are_asked_for(monkeypatch):
  asked = []
  monkeypatch.setattr(registry, "tuned_choice", lambda *key: asked.append(key) or ("xla", {}))
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    for case in toy_cases():
      where = {slot: "swiglu_forward" for slot in implementations.OPS[case.op].slots}
      slots = dataclasses.replace(plug(monkeypatch, case.op, **where), tuned_for="NVIDIA Test")
      for name, of_pass in case.passes.items():
        asked.clear()
        args = jax.eval_shape(lambda: case.arguments(name, 0))  # noqa: B023
        jax.eval_shape(case.compute(name, slots), *args)
        want = ("NVIDIA Test", case.op, of_pass.slots[0], registry.shape_class(**case.dims))
        assert want in asked


@pytest.mark.parametrize(
  ("device", "dtype"),
  [
    (Device("gpu", "7.5", "Tesla T4"), "float16"),
    (Device("gpu", "8.0", "NVIDIA A100"), "bfloat16"),
    (Device("gpu", "gfx942", "AMD"), "bfloat16"),
    (Device("tpu"), "bfloat16"),
    (Device("cpu"), "bfloat16"),
  ],
  ids=str,
)
def test_the_format_of_matmuls_by_device(device, dtype):
  config = base_config()
  config.precision.compute_dtype = "auto"
  asked = from_config_dict(config)
  assert with_compute_dtype(asked, device).precision.compute_dtype == dtype
  # A run goes on in the format in which it was begun.
  for before in ("bfloat16", "float16"):
    assert with_compute_dtype(asked, device, before).precision.compute_dtype == before


def test_a_device_without_bfloat16_is_named_before_xla_refuses_it(monkeypatch, mesh):
  turing = Device("gpu", "7.5", "Tesla T4")
  monkeypatch.setattr(program, "this_device", lambda: turing)
  with pytest.raises(ValueError, match=r"bfloat16: compute capability 7.5 .* Set float16 or auto"):
    program.make_program(tiny_config({"precision.compute_dtype": "bfloat16"}))


def test_kernels_say_whether_they_take_float16():
  cfg = tiny_config({"precision.compute_dtype": "float16"})
  assert cudnn_attention(cfg, HOPPER) == ""
  for op in implementations.OPS.values():
    for kernel in op.kernels:
      if kernel.name == "mosaic":
        assert "needs bfloat16, precision.compute_dtype is float16" in kernel.obstacle(cfg, HOPPER)
      if kernel.name == "triton":
        assert "precision.compute_dtype" not in kernel.obstacle(cfg, HOPPER)
