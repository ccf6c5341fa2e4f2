"""How the layers of a model are divided into scans, and into rounds and stages of a pipeline."""

import dataclasses
import math
from typing import Any

import jax

from ats_jax.config.schema import Config
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.layer_kinds import LayerKind, layer_kinds


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive layers: a pattern of `kinds`, repeated; one `lax.scan` runs over the repeats.

  Attributes:
    first: index of the first layer.
    kinds: the kinds of the layers of one super-block.
    repeats: the number of super-blocks.
  """

  first: int
  kinds: tuple[LayerKind, ...]
  repeats: int

  def layer_indices(self, place: int) -> range:
    """Indices of the layers at position `place` of each super-block."""
    period = len(self.kinds)
    return range(self.first + place, self.first + period * self.repeats, period)


def place_of(path: Any) -> tuple[int, int] | None:
  """The segment of a path in a decoder's tree, and the place in its pattern; None = of no layer."""
  part, *rest = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
  return (int(rest[0]), int(rest[2])) if part == "segments" else None


def segments(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
  """Cut layers into segments: from the bottom, the pattern that repeats over the most layers.

  The number of programs that XLA compiles is the number of layers in all patterns, however deep
  the model is.
  """
  result, first = [], 0
  while first < len(kinds):
    rest = kinds[first:]
    options = [Segment(first, rest[:p], _repeats(rest, p)) for p in range(1, len(rest) + 1)]
    # A pattern without a repeat is no better than its first layer alone.
    repeated = [s for s in options if s.repeats > 1] or options[:1]
    best = max(repeated, key=lambda s: (len(s.kinds) * s.repeats, -len(s.kinds)))
    result.append(best)
    first += len(best.kinds) * best.repeats
  return tuple(result)


def segments_of(cfg: Config) -> tuple[Segment, ...]:
  """The segments of a model. Each round of a pipeline is one: the stages share the layers of each.

  Raises:
    ValueError: if the layers cannot be cut into so many rounds.
  """
  whole_model, rounds = segments(layer_kinds(cfg)), cfg.mesh.stage_rounds
  if rounds == 1:
    return whole_model
  check_stages(cfg, cfg.mesh.stage)
  (segment,) = whole_model
  number = segment.repeats // rounds
  firsts = segment.layer_indices(0)[::number]
  return tuple(Segment(first, segment.kinds, number) for first in firsts)


def check_stages(cfg: Config, stages: int) -> None:
  """Check that the layers can be divided over a pipeline of `stages` stages.

  All stages run one program, so they need the same layers in the same order, in each round.

  Raises:
    ValueError: if the layers cannot be divided so.
  """
  rounds = cfg.mesh.stage_rounds
  parts = stages * rounds
  if parts == 1:
    return
  number, patterns = cfg.model.num_layers, segments(layer_kinds(cfg))
  stages_text = f"mesh.stage={stages}" + (f" x mesh.stage_rounds={rounds}" if rounds > 1 else "")
  settings = "mesh.stage_rounds, model.num_layers" if rounds > 1 else "model.num_layers"
  if len(patterns) != 1 or patterns[0].repeats % parts:
    described = " + ".join(f"{s.repeats} x {len(s.kinds)}" for s in patterns)
    raise ValueError(
      f"{stages_text} does not cut model.num_layers={number} into equal parts: the layers "
      f"repeat as {described} (times x layers of a pattern), and each stage needs the same "
      f"number of whole patterns in each round. Change {settings}, or what makes layers differ: "
      "moe.every, moe.dense_first, moe.dense_last, mod.every, mod.start_layer, mod.end_layer, "
      "model.full_every."
    )
  stage_layers, fp8 = number // parts, fp8_layers(cfg)
  if fp8 != fp8[:stage_layers] * parts:
    precision = cfg.precision
    raise ValueError(
      f"{stages_text} with precision.fp8_keep_first={precision.fp8_keep_first} and "
      f"precision.fp8_keep_last={precision.fp8_keep_last}: the stages would multiply in different "
      "formats. Set both to 0, or precision.fp8=false."
    )


def _repeats(kinds: tuple[LayerKind, ...], period: int) -> int:
  repeats = 1
  while kinds[period * repeats : period * (repeats + 1)] == kinds[:period]:
    repeats += 1
  return repeats


def stacks(cfg: Config) -> dict[str, range]:
  """Map the path of each stack of parameters in a decoder to the indices of its layers."""
  return {
    f"segments/{number}/layers/{place}": segment.layer_indices(place)
    for number, segment in enumerate(segments_of(cfg))
    for place in range(len(segment.kinds))
  }


def mod_tokens(capacity: float, seq_len: int) -> int:
  """The number of tokens of a row of `seq_len` that go through a layer of this capacity."""
  # Not ceil(capacity * seq_len): 0.55 * 100 is a hair over 55 in binary.
  return min(seq_len, math.ceil(round(capacity * seq_len, 6)))


def expert_capacity(seq_len: int, top_k: int, factor: float, num_experts: int) -> int:
  """The number of places of one expert in a row (GShard, arXiv:2006.16668, section 2.2)."""
  return min(seq_len, math.ceil(round(factor * top_k * seq_len / num_experts, 6)))
