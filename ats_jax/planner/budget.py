"""How many tokens a run wants, what they cost and what they buy: scaling laws with exact counts.

N is what a token is multiplied with: the active parameters without the input embedding. Losses of
published laws hold for their data and tokenizer; their differences and ratios travel further.
"""

import dataclasses
import math
import textwrap
from typing import Any

from ats_jax.config.schema import Config
from ats_jax.model.count import count
from ats_jax.planner.abstract import abstract_mesh, abstract_state, resolve_without_data
from ats_jax.sharding.mesh import on_mesh

# How fast repeated tokens lose their worth: R*_D of Muennighoff et al. 2023, arXiv:2305.16264.
REPETITION_DECAY = 15.387756
CURVE_MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # multiples of the budget
GOOD_EPOCHS = 4  # repeated tokens are worth nearly as much as fresh ones
FEW_EPOCHS = 8  # beyond it, watch the validation loss
MOST_EPOCHS = 16  # beyond it, further epochs win next to nothing


@dataclasses.dataclass(frozen=True)
class Law:
  """Loss of N parameters after D fresh tokens: E + A/N^alpha + B/D^beta, in nats per token.

  Hoffmann et al. 2022, arXiv:2203.15556, approach 3. Compute is 6 N D throughout, so attention
  counts on neither side of a comparison.
  """

  E: float
  A: float
  B: float
  alpha: float
  beta: float

  def loss(self, parameters: float, tokens: float) -> float:
    """The loss in nats per token."""
    return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

  def optimal_tokens(self, parameters: float) -> float:
    """The number of tokens for which this model size is compute-optimal."""
    ratio = self.beta * self.B / (self.alpha * self.A)
    return (ratio * parameters**self.alpha) ** (1 / self.beta)

  def optimum(self, flops: float) -> tuple[float, float]:
    """The compute-optimal numbers of parameters and tokens for `flops`."""
    ratio = self.alpha * self.A / (self.beta * self.B)
    scale = ratio ** (1 / (self.alpha + self.beta))
    parameters = scale * (flops / 6) ** (self.beta / (self.alpha + self.beta))
    return parameters, flops / (6 * parameters)

  def flops_for(self, loss: float) -> float:
    """The least compute that reaches `loss`, which is above E.

    At the optimum both terms fall as C^-gamma, gamma = alpha beta / (alpha + beta).
    """
    gamma = self.alpha * self.beta / (self.alpha + self.beta)
    return ((self.loss(*self.optimum(1.0)) - self.E) / (loss - self.E)) ** (1 / gamma)


# Hoffmann's printed constants are rounded and contradict the paper's other two approaches;
# Besiroglu et al. 2024 (arXiv:2404.10102) fitted its data again.
LAWS = {
  "besiroglu": Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
  "hoffmann": Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28),
}


def parse_law(text: str) -> Law:
  """A published law by name, or one's own: "E,A,B,alpha,beta".

  Raises:
    ValueError: if it is neither.
  """
  if text in LAWS:
    return LAWS[text]
  try:
    numbers = [float(number) for number in text.split(",")]
  except ValueError:
    numbers = []
  if len(numbers) != 5 or not all(1e-3 <= n <= 1e6 for n in numbers):
    raise ValueError(
      f"--law={text}: expected {' or '.join(LAWS)}, or five positive numbers "
      "E,A,B,alpha,beta between 0.001 and 1e6."
    )
  return Law(*numbers)


def effective_tokens(tokens: float, unique: float) -> float:
  """Fresh tokens that `tokens` are worth when only `unique` differ.

  U (1 + R* (1 - exp(-R/R*))) with R = D/U - 1 repetitions (Muennighoff et al. 2023, eq. 5; their
  law for excess parameters is not applied).
  """
  repeats = max(0.0, tokens / unique - 1)
  once = min(tokens, unique)
  return once - unique * REPETITION_DECAY * math.expm1(-repeats / REPETITION_DECAY)


def tokens_worth(effective: float, unique: float) -> float:
  """The inverse of `effective_tokens`; infinite where no number of epochs is worth so much."""
  if effective <= unique:
    return effective
  share = (effective / unique - 1) / REPETITION_DECAY
  return math.inf if share >= 1 else unique * (1 - REPETITION_DECAY * math.log1p(-share))


def budget(
  cfg: Config,
  *,
  tokens: float = 0,
  flops: float = 0,
  gpu_hours: float = 0,
  unique_tokens: float = 0,
  tokens_per_sec: float = 0,
  law: Law = LAWS["besiroglu"],
) -> dict[str, Any]:
  """Compute what a budget buys with the model of a config, and whether it suits the model.

  Args:
    cfg: the config, resolved or not. Without a budget the tokens are those of its run: its
      steps, what `train_flops` buys with `length=flops`, or with `length=budget` the optimum,
      between `least_epochs` and `most_epochs` of the data.
    tokens: the budget in tokens; give at most one of three.
    flops: the budget in training FLOPs, causal attention included.
    gpu_hours: the budget in hours of one device; needs `tokens_per_sec`.
    unique_tokens: the tokens of the training data; 0 = not known, as if none were seen twice.
    tokens_per_sec: the measured speed of one device; 0 = not known, so times are None.
    law: the scaling law of dense models.

  Returns:
    Sections of numbers: `model`, `budget`, `data`, `optimal` and `curve`, and `notes` in words.

  Raises:
    ValueError: for more than one budget, amounts that are no amounts, hours without a speed.
  """
  asked = {"tokens": tokens, "flops": flops, "gpu_hours": gpu_hours}
  _check(asked | {"unique_tokens": unique_tokens, "tokens_per_sec": tokens_per_sec})
  given = {name: amount for name, amount in asked.items() if amount}
  if len(given) > 1:
    raise ValueError(f"--{' and --'.join(given)} are several budgets. Give one.")
  if gpu_hours and not tokens_per_sec:
    raise ValueError(
      f"--gpu_hours={gpu_hours:g} needs --tokens_per_sec, that of one device, measured "
      "(train/tokens_per_sec of a run of this config, divided by its devices)."
    )
  cfg = resolve_without_data(cfg)
  with on_mesh(cfg, abstract_mesh(cfg)):
    counts = count(cfg, abstract_state(cfg).model, cfg.data.seq_len)
  table = 0 if cfg.model.tie_embeddings else counts.parts["embedding"].total
  parameters, per_token = counts.active - table, counts.flops_causal
  per_step = cfg.data.batch_size * cfg.data.seq_len
  wanted = law.optimal_tokens(parameters)
  to_see = tokens_worth(wanted, unique_tokens or wanted)
  configured = cfg.num_steps * per_step
  if cfg.length == "flops":
    configured = cfg.train_flops / per_token
  if cfg.length == "budget":
    least, most = cfg.least_epochs * unique_tokens, cfg.most_epochs * unique_tokens or math.inf
    configured = min(max(to_see, least), most)
  tokens = tokens or flops / per_token or gpu_hours * 3600 * tokens_per_sec or configured

  def row(amount: float) -> dict[str, float | None]:
    worth = effective_tokens(amount, unique_tokens or amount)
    return {
      "tokens": amount,
      "epochs": amount / unique_tokens if unique_tokens else None,
      "effective_tokens": worth,
      "tokens_per_parameter": amount / parameters,
      "flops": amount * per_token,
      "gpu_hours": amount / tokens_per_sec / 3600 if tokens_per_sec else None,
      "loss": law.loss(parameters, worth),
    }

  here = row(tokens)
  worth, loss = here["effective_tokens"], here["loss"]
  assert worth and loss
  best_parameters, best_tokens = law.optimum(6 * parameters * tokens)
  plan = {
    "model": {
      "parameters": counts.parameters,
      "active": counts.active,
      "law_parameters": parameters,
      "flops_per_token": per_token,
    },
    "budget": {
      "given_as": next(iter(given), "config"),
      **here,
      "steps": math.ceil(tokens / per_step),
      "tokens_per_step": per_step,
    },
    "optimal": {
      "tokens": wanted,
      "coverage": worth / wanted,
      "tokens_to_see": to_see if to_see < math.inf else None,
      "epochs": to_see / unique_tokens if unique_tokens and to_see < math.inf else None,
      "parameters_at_this_compute": best_parameters,
      "tokens_at_this_compute": best_tokens,
      "loss_at_this_compute": law.loss(best_parameters, best_tokens),
      "compute_efficiency": law.flops_for(loss) / (6 * parameters * tokens),
    },
    "curve": [row(multiple * tokens) for multiple in CURVE_MULTIPLES],
  }
  return plan | {"notes": _notes(cfg, plan, unique_tokens)}


def budget_reason(plan: dict[str, Any]) -> str:
  """Explain the length of a run with `length=budget`; `plan` is the result of `budget`."""
  wanted = plan["optimal"]["epochs"]
  return (
    f"{plan['budget']['epochs']:.2f} epochs: {_amount(plan['model']['law_parameters'])} parameters "
    f"want {_amount(plan['optimal']['tokens'])} fresh tokens, which are "
    + (f"{wanted:.2f} epochs" if wanted else "more than any number of epochs")
    + " of this text"
  )


def _check(amounts: dict[str, float]) -> None:
  for name, amount in amounts.items():
    if amount and not 1e-3 <= amount <= 1e40:
      raise ValueError(f"--{name}={amount}: expected a positive number, such as 20e9.")


def _notes(cfg: Config, plan: dict[str, Any], unique: float) -> list[str]:
  """Warnings and advice that the numbers alone do not give."""
  notes, coverage, epochs = [], plan["optimal"]["coverage"], plan["budget"]["epochs"]
  if coverage < 0.5:
    notes.append("The budget is short for this size: a smaller model reaches a lower loss with it.")
  elif coverage > 2:
    notes.append(
      "More than this size makes the best of: right if the model is used a lot, where being small "
      "pays (Sardana et al. 2023, arXiv:2401.00448)."
    )
  if unique and plan["optimal"]["tokens_to_see"] is None:
    most = unique * (1 + REPETITION_DECAY)
    notes.append(
      f"{_amount(unique)} unique tokens are never worth the optimal "
      f"{_amount(plan['optimal']['tokens'])}: the limit is {_amount(most)}. Find more data, or "
      "take a smaller model."
    )
  if epochs and epochs > MOST_EPOCHS:
    notes.append(
      f"{epochs:.1f} epochs: past {MOST_EPOCHS} more of them buy next to nothing and overfit "
      "(Lovelace et al. 2026, arXiv:2605.01640), which this law leaves out. Train less, or find "
      "more data."
    )
  elif epochs and epochs > FEW_EPOCHS:
    notes.append(
      f"{epochs:.1f} epochs: watch the validation loss, and try a weight decay several times "
      "higher (Lovelace et al. 2026, arXiv:2605.01640)."
    )
  elif epochs and epochs > GOOD_EPOCHS:
    notes.append(f"{epochs:.1f} epochs: past {GOOD_EPOCHS} a repeated token is worth visibly less.")
  if cfg.moe.num_experts:
    notes.append(
      "Experts: the law is of dense models, here with the active parameters. Laws of experts want "
      "more tokens per active parameter (Ludziejewski et al. 2025, arXiv:2502.05172): take the "
      "optimum as the least, and the loss as the highest."
    )
  if cfg.mod.routing != "none":
    notes.append(
      "Layers that skip tokens count by the share that goes through, in parameters and FLOPs."
    )
  return notes


def render_budget(plan: dict[str, Any]) -> str:
  """Render the result of `budget` as text."""
  model, here, best = plan["model"], plan["budget"], plan["optimal"]
  source = {"config": "config", "tokens": "tokens", "flops": "FLOPs", "gpu_hours": "GPU-hours"}
  lines = [
    f"model: {_amount(model['parameters'])} parameters, {_amount(model['active'])} active, "
    f"{_amount(model['law_parameters'])} of them in the law; "
    f"{model['flops_per_token'] / 1e9:,.3f} GFLOPs a token",
    f"budget, by {source[here['given_as']]}: {_amount(here['tokens'])} tokens, "
    f"{here['steps']:,} steps of {here['tokens_per_step']:,}, {here['flops']:.3g} FLOPs"
    + (f", {here['gpu_hours']:,.1f} GPU-hours" if here["gpu_hours"] is not None else ""),
    f"tokens a parameter: {here['tokens_per_parameter']:.3g}",
  ]
  if here["epochs"] is not None:
    lines.append(
      f"epochs: {here['epochs']:.2f}, worth {_amount(here['effective_tokens'])} fresh tokens"
    )
  lines.append(
    f"coverage: {best['coverage']:.1%} of the {_amount(best['tokens'])} fresh tokens with which "
    "this size is compute-optimal" + (f": {best['epochs']:.2f} epochs" if best["epochs"] else "")
  )
  lines += [
    f"the same compute at its best: {_amount(best['parameters_at_this_compute'])} parameters, "
    f"{_amount(best['tokens_at_this_compute'])} fresh tokens, loss "
    f"{here['loss'] - best['loss_at_this_compute']:.3f} lower",
    f"compute efficiency: {best['compute_efficiency']:.1%} (the least compute for the same loss "
    "over what is spent)",
    "",
    _line("tokens", "a parameter", "epochs", "worth", "FLOPs", "GPU-hours", "loss"),
  ]
  for row in plan["curve"]:
    change = row["loss"] - here["loss"]
    lines.append(
      _line(
        _amount(row["tokens"]),
        f"{row['tokens_per_parameter']:.3g}",
        "-" if row["epochs"] is None else f"{row['epochs']:.2f}",
        _amount(row["effective_tokens"]),
        f"{row['flops']:.2e}",
        "-" if row["gpu_hours"] is None else f"{row['gpu_hours']:,.1f}",
        f"{change:+.4f}" if row["tokens"] != here["tokens"] else "this budget",
      )
    )
  return "\n".join([*lines, *("\n" + textwrap.fill(note, 100) for note in plan["notes"])])


def _line(*cells: str) -> str:
  return "".join(f"{cell:>13}" for cell in cells)


def _amount(number: float) -> str:
  """Three digits and a unit: 1.32B."""
  for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
    if number >= size:
      scaled = number / size
      return f"{scaled:,.{max(0, 2 - int(math.log10(scaled)))}f}{unit}"
  return f"{number:.0f}"
