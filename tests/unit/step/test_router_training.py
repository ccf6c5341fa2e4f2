"""Routers that train alone, as settings of freezing say."""

import canonical
import numpy as np

from ats_jax.model.param import Role, params_of

ALL_OTHERS = ("matrix", "expert", "embedding", "head", "norm")


def test_routers_alone_lower_the_loss():
  """Nothing else has a gradient, so a batch that comes again is predicted better by them."""
  cfg = canonical.config(
    "experts", {"finetune.freeze": ALL_OTHERS, "optimizer.learning_rate": 1e-2}
  )
  state, rows, losses = canonical.state(cfg), canonical.rows(cfg), []
  first = {path: np.asarray(p[...]) for path, p in enumerate(params_of(state.model))}
  for _ in range(8):
    state, metrics = canonical.step(cfg, state, rows)
    losses.append(float(metrics["train/loss"]))
  params = params_of(state.model)
  assert params and all(param.role == Role.ROUTER for param in params)
  assert all(np.any(first[n] != param[...]) for n, param in enumerate(params))
  assert losses[-1] < losses[0]
