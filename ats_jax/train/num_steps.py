"""The number of steps of a run whose config counts epochs, phases or a budget."""

from ats_jax.config import Config
from ats_jax.config.build import count_epochs, resolve
from ats_jax.data.rows.contract import TrainRows


def with_num_steps(cfg: Config, train_set: TrainRows) -> tuple[Config, str]:
  """Return `cfg` with its number of steps, and what decided that number, in words.

  Raises:
    ValueError: as `count_epochs`.
  """
  if not cfg.counts_epochs:
    return cfg, "num_steps"
  info = train_set.info
  if cfg.length == "phases":
    return count_epochs(cfg, 1.0, info.scheduled_rows), "the lengths of data.phases"
  epochs, why = cfg.num_epochs, f"num_epochs={cfg.num_epochs}"
  if cfg.length == "budget":
    from ats_jax.planner.budget import budget, budget_reason  # here: other runs need no planner

    sized = resolve(cfg, info.tokenizer.vocab_size)
    plan = budget(sized, unique_tokens=info.num_tokens)
    bounds = f"least_epochs={cfg.least_epochs:g}, most_epochs={cfg.most_epochs:g}"
    epochs, why = plan["budget"]["epochs"], f"{budget_reason(plan)}; {bounds}"
  return count_epochs(cfg, epochs, info.num_rows), why
