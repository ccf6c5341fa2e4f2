"""What parameters know of themselves, and that they keep knowing it."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import named_leaves, tiny_config

from ats_jax.model.decoder import Decoder
from ats_jax.model.numerics import numerics
from ats_jax.model.param import Buffer, Param, Role, is_variable, params_of, roles, trainable, zeros

HYBRID = {
  "model.num_layers": 4,
  "model.qk_norm": True,
  "model.attn_out_bias": True,
  "model.attn_sinks": True,
  "moe.expert_bias": True,
  "moe.num_experts": 4,
  "moe.spare_experts": 2,
  "moe.top_k": 2,
  "moe.num_shared": 1,
  "moe.every": 2,
  "moe.router_bias": True,
  "mod.routing": "learned",
  "mod.capacity": 0.5,
  "mod.decision": "predictor",
}
AXES_AND_ROLES = {
  "embed.weight": (("vocab", "embed"), Role.EMBEDDING),
  "head.weight": (("vocab", "embed"), Role.HEAD),
  "final_norm.scale": (("norm",), Role.NORM),
  "attn_norm.scale": (("norm",), Role.NORM),
  "mlp_norm.scale": (("norm",), Role.NORM),
  "attn.q_norm.scale": (("norm",), Role.NORM),
  "attn.k_norm.scale": (("norm",), Role.NORM),
  "attn.q.weight": (("embed", "heads", "head_dim"), Role.MATRIX),
  "attn.k.weight": (("embed", "kv_heads", "head_dim"), Role.MATRIX),
  "attn.v.weight": (("embed", "kv_heads", "head_dim"), Role.MATRIX),
  "attn.out.weight": (("heads", "head_dim", "embed"), Role.MATRIX),
  "attn.out.bias": (("act_embed",), Role.BIAS),
  "attn.sinks": (("heads",), Role.SINK),
  "dense.gate.weight": (("embed", "ff"), Role.MATRIX),
  "dense.up.weight": (("embed", "ff"), Role.MATRIX),
  "dense.down.weight": (("ff", "embed"), Role.MATRIX),
  "experts.gate.weight": (("stored_experts", "expert_embed", "ff"), Role.EXPERT),
  "experts.up.weight": (("stored_experts", "expert_embed", "ff"), Role.EXPERT),
  "experts.down.weight": (("stored_experts", "ff", "expert_embed"), Role.EXPERT),
  "experts.gate.bias": (("experts", "ff"), Role.BIAS),
  "experts.up.bias": (("experts", "ff"), Role.BIAS),
  "experts.down.bias": (("experts", "act_embed"), Role.BIAS),
  "router.weight": (("embed", "router"), Role.ROUTER),
  "router.offset": (("router",), Role.BIAS),
  "router.bias_E": (("router",), Role.BUFFER),
  "router.load_E": (("router",), Role.BUFFER),
  "router.active_S": (("router",), Role.BUFFER),
  "router.side_S": (("router",), Role.BUFFER),
  "router.penalty_S": (("router",), Role.BUFFER),
  "router.direction_SD": (("router", None), Role.BUFFER),
  "depth.weight": (("norm",), Role.ROUTER),
  "depth.predict_in": (("embed", "router"), Role.ROUTER),
  "depth.predict_out": (("norm",), Role.ROUTER),
  "depth.threshold": ((), Role.BUFFER),
  "depth.updates": ((), Role.BUFFER),
  "depth.capacity": ((), Role.BUFFER),
}


@functools.cache
def abstract_decoder():
  cfg = tiny_config(HYBRID)
  make = lambda key: Decoder(cfg, numerics(cfg), nnx.Rngs(params=key))
  return jax.eval_shape(make, jax.random.key(0))


def told(tree):
  """Axes and role of every parameter and buffer, by path."""
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
  return {jax.tree_util.keystr(path): (v.axes, v.role) for path, v in found}


def short(path):
  """`attn.q.weight`, `router.offset`, `experts.up.weight`, whatever the layer."""
  name = re.sub(r"^\.(segments\[\d\]\.layers\[\d\]\.)?", "", path)
  return re.sub(r"^mlp\.(shared|router)\.", r"\1.", name)


def test_every_parameter_of_a_hybrid_model_knows_its_axes_and_role(mesh):
  found = {}
  for path, what in told(abstract_decoder()).items():
    name = short(path)
    if name.startswith("mlp."):
      name = name.replace("mlp", "experts" if what[0][0].endswith("experts") else "dense")
    name = name.replace("shared.", "dense.")
    assert found.setdefault(name, what) == what, path
  assert found == AXES_AND_ROLES
  # The axes are of one layer, and a stack has one more.
  found = jax.tree_util.tree_leaves_with_path(abstract_decoder(), is_leaf=is_variable)
  for path, variable in found:
    is_stacked = "segments" in jax.tree_util.keystr(path)
    assert variable.ndim == len(variable.axes) + is_stacked, path


def test_it_survives_jax(mesh):
  model = abstract_decoder()
  double = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
  assert told(jax.eval_shape(jax.jit(double), model)) == told(model)
  moments = jax.eval_shape(optax.scale_by_adam().init, trainable(model))
  of_params = {path: what for path, what in told(model).items() if what[1] is not Role.BUFFER}
  assert told(moments.nu) == of_params


class Two(nnx.Module):
  def __init__(self, rngs):
    del rngs
    self.a = zeros((2,), ("norm",), jnp.dtype("float32"), Role.BIAS)
    self.b = Buffer(jnp.ones(2), axes=("norm",))


def test_labels_are_for_parameters_alone(mesh):
  labels = named_leaves(roles(trainable(abstract_decoder())))
  assert set(labels.values()) == {
    Role.MATRIX, Role.EXPERT, Role.ROUTER, Role.EMBEDDING, Role.HEAD, Role.NORM, Role.BIAS,
    Role.SINK,
  }  # fmt: skip
  assert roles(Two(None).a).get_value() == "bias"
  assert [p.role for p in params_of(Two(None))] == [Role.BIAS]
  with pytest.raises(TypeError, match="Array"):
    roles({"a": jnp.ones(2)})
  with pytest.raises(TypeError, match="Buffer"):
    roles(Two(None))


def test_a_parameter_must_say_what_it_is():
  with pytest.raises(TypeError, match="role"):
    Param(jnp.ones(2), axes=("norm",))  # pyright: ignore[reportCallIssue]
