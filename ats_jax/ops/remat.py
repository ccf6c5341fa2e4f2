"""What a layer keeps for its backward pass under each value of `step.remat`.

Ops and layers give their results these names (`checkpoint_name`), a policy lists those that it
keeps. All names are here, so that a policy is known without the modules of layers that a run has
none of.
"""

from collections.abc import Callable
from typing import Any

import jax

ATTENTION_INPUTS = ("attn_q", "attn_k", "attn_v")
# The output, and statistics of the softmax: with both, no backward pass runs attention again.
ATTENTION_RESULTS = ("attn_y", "attn_lse")
ATTENTION_OUT = "attn_out"  # the output projected to the width of the residual stream
MLP_HIDDEN = ("mlp_gate", "mlp_up")
ADAPTER_HIDDEN = "adapter_hidden"  # as narrow as the rank, of a product that reads a whole input
EXPERT_RESULTS = ("expert_gate", "expert_up", "expert_out")
FP8_MAXIMA = "fp8_amax"  # the largest values of a forward pass

# Results of kernels: 'dots' and 'names' keep them, so that none runs twice.
_KERNEL_RESULTS = (*ATTENTION_RESULTS, *EXPERT_RESULTS, FP8_MAXIMA, ADAPTER_HIDDEN)


def remat_policy(name: str) -> Callable[..., Any]:
  """Return the `jax.checkpoint` policy of this name in `step.remat`, of which 'none' has none."""
  policies = jax.checkpoint_policies
  products = policies.save_only_these_names(*_KERNEL_RESULTS)
  dots = policies.dots_with_no_batch_dims_saveable
  of_attention = *ATTENTION_RESULTS, FP8_MAXIMA
  return {
    "full": policies.nothing_saveable,
    "dots": policies.save_from_both_policies(dots, products),
    "names": policies.save_only_these_names(*ATTENTION_INPUTS, *MLP_HIDDEN, *_KERNEL_RESULTS),
    "qkv": policies.save_only_these_names(*ATTENTION_INPUTS, *of_attention, ATTENTION_OUT),
    "attention": policies.save_only_these_names(*of_attention),
  }[name]
