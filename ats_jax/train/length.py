"""How long a run is."""

from ats_jax.config import Config
from ats_jax.config.build import count_epochs, resolve
from ats_jax.data.rows.mixture import Mixture
from ats_jax.data.rows.rows import TrainRows


def with_length(cfg: Config, train_set: TrainRows) -> tuple[Config, str]:
  """`cfg` with its number of steps, and what said it.

  Raises:
    ValueError: as `count_epochs`.
  """
  if not cfg.counts_epochs:
    return cfg, "num_steps"
  if cfg.length == "phases":
    assert isinstance(train_set, Mixture), "a rule of validation"
    return count_epochs(cfg, 1.0, train_set.turns.end), "the phases of data.mixture"
  epochs, why = cfg.num_epochs, f"num_epochs={cfg.num_epochs}"
  if cfg.length == "budget":
    from ats_jax.planner.budget import budget, reason  # here: other runs need no planner

    sized = resolve(cfg, train_set.tokenizer.vocab_size)
    plan = budget(sized, unique_tokens=train_set.num_tokens)
    bounds = f"least_epochs={cfg.least_epochs:g}, most_epochs={cfg.most_epochs:g}"
    epochs, why = plan["budget"]["epochs"], f"{reason(plan)}; {bounds}"
  return count_epochs(cfg, epochs, train_set.num_rows), why
