"""Our own format: every model of this program, for its decoder in PyTorch.

A folder of it is one that `transformers` loads with `trust_remote_code`, and `bridge import` reads.
"""

import dataclasses
from typing import Any

from ats_jax.bridge.family import Family, Values, WeightRow
from ats_jax.bridge.transforms import FLAT, SAME, TRANSPOSED, TRANSPOSED_2, Transform
from ats_jax.config.names import flatten, settings, to_dict
from ats_jax.config.schema import Config
from ats_jax.pytorch import remote_code

MODEL_TYPE = "ats_jax"
AUTO_MAP = {
  "AutoConfig": f"{remote_code.MODULE}.AtsJaxConfig",
  "AutoModelForCausalLM": f"{remote_code.MODULE}.AtsJaxForCausalLM",
}
SECTIONS = ("model", "moe", "mod")
L = "layers/{layer}"


def _is_of_model(name: str) -> bool:
  return name.split(".")[0] in SECTIONS or name == "data.seq_len"


@dataclasses.dataclass(frozen=True)
class Settings:
  """Every setting of the model, as it is resolved, in sections under "settings".

  `data.seq_len` is one: it says how many places a text has in a layer that skips tokens.
  """

  keys: tuple[str, ...] = (
    "settings",
    "auto_map",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
  )

  def read(self, theirs: Values) -> Values:
    """Return our settings for a config.json, by dotted name."""
    values = flatten(theirs["settings"])
    fields = settings(values)
    wanted = {name for name in fields if _is_of_model(name)}
    if differing := sorted(wanted ^ set(values)):
      raise ValueError(
        f"config.json was written by another version of ats_jax: settings {differing[:4]} are on "
        "one side only. Use that version, or export the run again."
      )
    annealing = ("mod.anneal_fraction", "mod.start_capacity", "mod.rungs")
    return values | {name: fields[name].default for name in annealing}

  def write(self, cfg: Config) -> Values:
    """Return the fields of config.json for a resolved config."""
    nested = {name: section for name, section in to_dict(cfg).items() if name in SECTIONS}
    nested["data"] = {"seq_len": cfg.data.seq_len}
    return {
      "settings": nested,
      "auto_map": AUTO_MAP,
      "vocab_size": cfg.model.vocab_size,
      "hidden_size": cfg.model.d_model,
      "num_hidden_layers": cfg.model.num_layers,
      "num_attention_heads": cfg.model.num_heads,
      "tie_word_embeddings": cfg.model.tie_embeddings,
    }


def _row(
  ours: str, transform: Transform = SAME, *, leaf: str = "", wide: bool = False
) -> WeightRow:
  theirs = ours.replace("/", ".") + (f".{leaf}" if leaf else "")
  return WeightRow(ours, f"model.{theirs}", transform, wide)


def _linear(ours: str, transform: Transform = TRANSPOSED) -> tuple[WeightRow, ...]:
  """A matrix alone, or with a bias."""
  return (
    _row(ours, transform, leaf="weight"),
    _row(f"{ours}/weight", transform),
    _row(f"{ours}/bias", FLAT),
  )


def _rows(settings: Values) -> tuple[WeightRow, ...]:
  attention = tuple(
    row
    for name in ("q", "k", "v", "q_down", "kv_down", "kv")
    for row in _linear(f"{L}/attn/{name}")
  )
  norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
  norms += ("attn/q_norm", "attn/k_norm", "attn/kv_norm")
  router = ("offset", "bias_E", "load_E", "active_S", "side_S", "penalty_S", "direction_SD")
  depth = ("weight", "threshold", "updates", "capacity", "predict_out")
  return (
    _row("embed", leaf="weight"),
    _row("head", leaf="weight"),
    _row("final_norm/scale"),
    *(_row(f"{L}/{name}/scale") for name in norms),
    *attention,
    *_linear(f"{L}/attn/out", TRANSPOSED_2),
    _row(f"{L}/attn/sinks"),
    *(row for name in ("gate", "up", "down") for row in _feed_forward(name)),
    *(row for name in ("gate", "up", "down") for row in _linear(f"{L}/mlp/shared/{name}")),
    _row(f"{L}/mlp/router/weight", TRANSPOSED, wide=True),
    *(_row(f"{L}/mlp/router/{name}", wide=True) for name in router),
    *(_row(f"{L}/depth/{name}", wide=True) for name in depth),
    _row(f"{L}/depth/predict_in", TRANSPOSED, wide=True),
  )


@dataclasses.dataclass(frozen=True)
class Stack:
  """`TRANSPOSED` of a dense layer's matrix; the same of a stack of experts' [experts, in, out]."""

  def their_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of their array for our shape."""
    return self._of(ours).their_shape(ours)

  def to_ours(self, theirs: Any, ours: tuple[int, ...]) -> Any:
    """Return our array, of shape `ours`; maybe a view."""
    return self._of(ours).to_ours(theirs, ours)

  def to_theirs(self, ours: Any) -> Any:
    """Return their array; maybe a view."""
    return self._of(ours.shape).to_theirs(ours)

  def _of(self, shape: tuple[int, ...]) -> Transform:
    return TRANSPOSED if len(shape) == 2 else SAME


def _feed_forward(name: str) -> tuple[WeightRow, ...]:
  ours = f"{L}/mlp/{name}"
  stack = Stack()
  return (
    _row(ours, stack, leaf="weight"),
    _row(f"{ours}/weight", stack),
    _row(f"{ours}/bias"),  # of experts, [experts, out]
  )


FAMILY = Family(
  name="ats_jax",
  model_type=MODEL_TYPE,
  architecture="AtsJaxForCausalLM",
  rates=False,
  rows=(),
  fields=(Settings(),),
  training=(),
  fitted_rows=_rows,
  files=lambda: {f"{remote_code.MODULE}.py": remote_code.source()},
)
