"""Copies of the weights on several devices, which must be equal to the bit."""

import functools

import canonical
import jax
import numpy as np
import pytest
from helpers import make_decoder, make_test_mesh, with_flipped_bit

from ats_jax.model.param import trainable
from ats_jax.sharding.apply import mesh_axes
from ats_jax.step import tensors


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 2)])
def test_a_flipped_bit_of_one_copy_names_the_tensor_and_the_device(sizes):
  mesh, cfg = make_test_mesh(*sizes), canonical.config("dense")
  with jax.set_mesh(mesh):
    params = trainable(jax.jit(lambda: make_decoder(cfg))())
    axes = mesh_axes("batch")
    odd = jax.jit(functools.partial(tensors.odd_copies, copied_along=axes))
    assert not np.asarray(odd(params)).any()
    for place in (0, 5):
      flipped = with_flipped_bit(params, ".attn_norm.", mesh.devices.flat[place], layer=1)
      marks = np.asarray(odd(flipped))
      (at,) = np.flatnonzero(marks)
      assert tensors.names(cfg, params)[at] == "layers/1/attn_norm/scale"
      copies = sizes[0] * sizes[1]
      assert marks[at] == place + 1 or copies == 2
