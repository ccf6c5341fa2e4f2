"""Settings that let a model of any width train at the learning rate of a narrow one (muP).

Yang et al. 2022 (arXiv:2203.03466), table 8, with the head's multiplier folded into its
initialisation and rate, so that the model computes what any other does and can be exported. The
same function is trained but for Adam's eps.
"""

import math
from typing import Any

from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config

# Roles of matrices whose inputs grow with the width.
OF_WIDTH = ("matrix", "expert", "router", "head")
SCALED = ("num_heads", "num_kv_heads", "d_ff")


def widened(cfg: Config, d_model: int) -> Config:
  """A config with all widths in the ratio of `d_model`; heads are as wide, and there are more.

  Raises:
    ValueError: if the ratio does not give whole numbers.
  """
  model, sizes = cfg.model, {"model.d_model": d_model}
  of_experts = {"moe.d_ff": cfg.moe.d_ff} if cfg.moe.num_experts else {}
  for name, size in ({f"model.{n}": getattr(model, n) for n in SCALED} | of_experts).items():
    new, rest = divmod(size * d_model, model.d_model)
    if rest:
      raise ValueError(
        f"--widths={d_model}: {name}={size} of model.d_model={model.d_model} would be no whole "
        "number. Use multiples."
      )
    sizes[name] = new
  return with_settings(cfg, sizes)


def settings_of_width(cfg: Config, base_width: int) -> dict[str, Any]:
  """The settings, by dotted name, with which `cfg` trains at the rate of a model of `base_width`.

  The learning rate, the initialisation and the decay that `cfg` has are those of the narrow model.
  What an update takes off by decay stays the same share of a weight.

  Args:
    cfg: the wide model; `model.d_ff` and the like are resolved.
    base_width: `model.d_model` of the narrow one.

  Raises:
    ValueError: for tied embeddings, and optimizers without a rule.
  """
  model, optimizer = cfg.model, cfg.optimizer
  ratio = model.d_model / base_width
  if model.tie_embeddings:
    raise ValueError(
      "model.tie_embeddings=true: one table cannot have the initialisation and the rate of an "
      "embedding and of a head. Set it to false."
    )
  rule = _RATES.get(optimizer.name)
  if rule is None:
    raise ValueError(
      f"optimizer.name={optimizer.name}: there is a rule for {', '.join(_RATES)}. Use one of them."
    )
  rates = rule(optimizer, ratio)
  first_head = model.head_std or min(model.init_std, 0.25 / math.sqrt(base_width))
  of_adapted = lambda table, new: {**table, **{r: table.get(r, 1.0) * f for r, f in new.items()}}
  usual = lambda role: optimizer.decay_by_role.get(role, optimizer.weight_decay)
  return {
    "model.init_std": model.init_std / math.sqrt(ratio),
    "model.embed_std": model.embed_std or model.init_std,
    "model.head_std": first_head / ratio,
    "optimizer.rate_by_role": of_adapted(optimizer.rate_by_role, rates),
    "optimizer.decay_by_role": {
      **optimizer.decay_by_role, **{role: usual(role) / rate for role, rate in rates.items()}
    },
  }  # fmt: skip


def _adam(optimizer: Any, ratio: float) -> dict[str, float]:
  """Each element moves by the rate, and a sum over inputs adds up `ratio` times as many."""
  del optimizer
  return dict.fromkeys(OF_WIDTH, 1.0 / ratio)


def _muon(optimizer: Any, ratio: float) -> dict[str, float]:
  """The largest singular value of an update shall not depend on the width.

  With `update_size=spectral` it does not. With a fixed root mean square it grows with the root of
  the width. Other roles go by Adam.
  """
  of_matrices = 1.0 if optimizer.update_size == "spectral" else 1.0 / math.sqrt(ratio)
  is_matrix = lambda role: role in optimizer.matrix_roles
  return {role: of_matrices if is_matrix(role) else 1.0 / ratio for role in OF_WIDTH}


_RATES = {"adamw": _adam, "muon": _muon}
