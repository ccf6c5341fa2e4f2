"""Whole steps on meshes: losses, gradients, statistics and scores of one device.

`TABLE` is a pairwise covering: each two mesh axes meet in a row, the model with all kinds of layers
meets each axis, and each option meets the axes that it acts on.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from equality import WHOLE, assert_equal, assert_lies_still, run

from ats_jax.sharding import compressed
from ats_jax.sharding.compressed import Quantised

# kind of model, axes of size 2, options
TABLE = [
  ("dense", "data fsdp tensor", {}),
  ("latent", "data fsdp context", {"copies": 1, "kept": 1, "8 bits": 1, "unroll": 2}),
  ("latent", "tensor stage context", {"zero": 2, "stages": "dots"}),
  ("capacity", "data tensor expert", {"zero": 2, "8 bits": 1, "remat": "none"}),
  ("capacity", "fsdp expert stage", {"zero": 1, "rounds": 2}),
  ("hybrid", "tensor expert context", {"copies": 1, "hosts": 2, "remat": "qkv"}),
  ("hybrid", "data fsdp stage", {"zero": 1, "remat": "full"}),
]
SETTING_OF = {
  "copies": "copy_engines",
  "kept": "keep_gathered",
  "zero": "zero",
  "rounds": "stage_rounds",
  "8 bits": "compress_gradients",
  "unroll": "step.scan_unroll",
  "remat": "step.remat",
  "stages": "step.remat_stages",
  "hosts": "moe.exchange.hosts",
}
AXES = ("data", "fsdp", "tensor", "expert", "stage", "context")
ROWS = [
  pytest.param(kind, axes, options, marks=pytest.mark.mesh if number else (), id=f"{kind}, {axes}")
  for number, (kind, axes, options) in enumerate(TABLE)
]


def settings_of(axes, options):
  """As `equality.run` takes them."""
  words = {"8 bits": "fp8", "hosts": 2, "copies": True, "kept": True}
  found = [(axis, 2) for axis in axes.split()]
  found += [("moe.exchange", "hierarchical")] if "hosts" in options else []
  return found + [(SETTING_OF[name], words.get(name, v)) for name, v in options.items()]


def lossless(monkeypatch):
  """8 bits that hold everything: what remains are the sums over replicas."""
  whole = lambda x: Quantised(x, jnp.zeros(x.shape[:-1], jnp.float32))
  monkeypatch.setattr(compressed, "quantise", whole)
  monkeypatch.setattr(compressed, "dequantise", lambda q: q.bits)


@pytest.mark.compat
@pytest.mark.parametrize(("kind", "axes", "options"), ROWS)
def test_a_mesh_computes_what_one_device_does(kind, axes, options, monkeypatch):
  if "8 bits" in options:
    lossless(monkeypatch)
  many = run.__wrapped__(kind, *settings_of(axes, options))
  one = run(kind, *([("step.accum_steps", 1)] if kind == WHOLE else []))
  assert_equal(many, one)
  if options.get("zero", 3) == 3:
    assert_lies_still(many)
    if "context" in axes:  # weights are cut over it too
      read = [
        s.spec for name, s in many.of_model().items() if ".attn.out." in name or "embed" in name
      ]
      assert len(read) > 1 and all("context" in str(spec) for spec in read)
  assert many.shardings[0] == many.shardings[1]
  if kind == "latent":
    embed = ".model.embed.weight.value"
    assert one.shards[embed][0] == many.shards[embed][0] == 65  # no row of padding
  if axes == "data fsdp tensor":
    matrices = [n for n in many.shards if n.startswith(".model") and ".weight." in n]
    assert len(matrices) > 5
    assert all(np.prod(one.shards[n]) == 4 * np.prod(many.shards[n]) for n in matrices)


def test_the_table_is_a_pairwise_covering():
  """Of axes, kinds and options that go together."""
  found = {frozenset(p) for _, axes, _ in TABLE for p in itertools.combinations(axes.split(), 2)}
  assert found == {frozenset(p) for p in itertools.combinations(AXES, 2)}
  assert {axis for kind, axes, _ in TABLE if kind == WHOLE for axis in axes.split()} == set(AXES)
  with_option = {
    name: {a for _, axes, options in TABLE if name in options for a in axes.split()}
    for name in SETTING_OF
  }
  assert with_option["copies"] >= {"data", "fsdp", "tensor", "expert", "context"}
  assert with_option["kept"] >= {"data", "fsdp", "context"}
  assert with_option["zero"] == set(AXES)
  assert with_option["8 bits"] >= {"fsdp", "tensor", "expert", "context"}
  assert {options.get("zero", 3) for _, _, options in TABLE} == {1, 2, 3}
