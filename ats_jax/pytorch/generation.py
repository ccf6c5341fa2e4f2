"""Tokens after tokens, with a cache. Letters: B batch, T seq, V vocab."""

import torch
from torch import Tensor

from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.settings import RoutingRules


@torch.no_grad()
def generate(
  model: Decoder,
  prompt_BT: Tensor,
  count: int,
  *,
  temperature: float = 0.0,
  rules: RoutingRules | None = None,
  generator: torch.Generator | None = None,
) -> Tensor:
  """Continue rows of one length.

  Args:
    model: in evaluation (`model.eval()`).
    prompt_BT: int [batch, seq].
    count: tokens to add.
    temperature: divides the logits; 0 = the likeliest token.
    rules: how sparse layers choose; None = those of evaluation.
    generator: generator of the draws.

  Returns:
    The new tokens [batch, count].
  """
  cache, tokens_BT, pieces = model.empty_cache(), prompt_BT, []
  for _ in range(count):
    x_BTD, _, _ = model(tokens_BT, rules=rules, cache=cache)
    logits_BV = model.logits(x_BTD[:, -1])
    if temperature:
      weights_BV = (logits_BV / temperature).softmax(dim=-1)
      tokens_BT = torch.multinomial(weights_BV, 1, generator=generator)
    else:
      tokens_BT = logits_BV.argmax(dim=-1, keepdim=True)
    pieces.append(tokens_BT)
  return torch.cat(pieces, dim=1)
