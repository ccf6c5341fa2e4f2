"""The section `finetune`: which weights train, and adapters beside those that do not."""

import dataclasses
import math
import re
from typing import Any

from ats_jax.config.schema.optimizer import check_roles
from ats_jax.config.schema.setting import Kinds, section, setting, when

ADAPTERS = Kinds(
  "finetune.adapter",
  "small matrices that train in place of the weights beside which they stand: 'lora' adds a "
  "product of two, 'dora' also trains the length of each column",
)


@dataclasses.dataclass(frozen=True)
class Adapter:
  """What every kind has: its name."""

  name: str = ADAPTERS.tag("none")


@ADAPTERS.register
@dataclasses.dataclass(frozen=True)
class NoAdapter(Adapter):
  """The weights themselves train."""


@ADAPTERS.register
@dataclasses.dataclass(frozen=True)
class LoRA(Adapter):
  """y = x W + scale * x A B (Hu et al. 2021, arXiv:2106.09685); the weights are frozen."""

  name: str = ADAPTERS.tag("lora")
  rank: int = setting(16, "width between the two matrices", low=1)
  alpha: float = setting(32.0, "what the product is multiplied with, before it is divided", low=0.0)
  scale: str = setting(
    "lora",
    "what alpha is divided by: 'lora' the rank, 'rslora' its root (arXiv:2312.03732)",
    choices=("lora", "rslora"),
  )
  targets: tuple[str, ...] = setting(
    (),
    "what gets one: attention, mlp, experts, embedding, head, router, or single matrices such as q "
    "and down; () = the first three as far as the model has them",
  )
  train: tuple[str, ...] = setting(
    (), "roles of parameters that train themselves, beside the adapters, e.g. norm,router"
  )
  base: str = setting(
    "plain",
    "how the frozen matrices of attention, mlp and experts are stored: plain = in "
    "precision.param_dtype; int8, int4 or nf4 = quantised (arXiv:2305.14314)",
    choices=("plain", "int8", "int4", "nf4"),
  )

  @property
  def factor(self) -> float:
    """What the product is multiplied with."""
    return self.alpha / (self.rank if self.scale == "lora" else math.sqrt(self.rank))

  def check(self, cfg: Any) -> None:
    """Refuse roles that there are not."""
    del cfg
    check_roles("finetune.adapter.train", self.train)


@ADAPTERS.register
@dataclasses.dataclass(frozen=True)
class DoRA(LoRA):
  """LoRA that trains the length of each column beside its direction (arXiv:2402.09353)."""

  name: str = ADAPTERS.tag("dora")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
  """What trains, where it is not all of the model."""

  adapter: Adapter = section(ADAPTERS, "none")
  freeze: tuple[str, ...] = setting(
    (),
    "roles of parameters that do not train, e.g. embedding,norm; with an adapter all do not",
    needs=when("finetune.adapter.name", "none"),
  )
  layers: str = setting(
    "",
    "the layers that train or have adapters, from 0, e.g. 16-31; '' = all. What belongs to no "
    "layer goes by its role alone",
  )

  @property
  def is_on(self) -> bool:
    """Whether something of the model is frozen."""
    return bool(self.adapter.name != "none" or self.freeze or self.layers)

  @property
  def base_format(self) -> str:
    """In what the frozen matrices are quantised; "" = in nothing."""
    base = getattr(self.adapter, "base", "plain")
    return "" if base == "plain" else base

  @property
  def keeps_embedding(self) -> bool:
    """Whether the embedding itself stays as it is, beside adapters."""
    return "embedding" not in getattr(self.adapter, "train", ("embedding",))

  def tunes(self, layer: int) -> bool:
    """Whether a layer trains, or has adapters."""
    return is_within(self.layers, layer)

  def check(self, cfg: Any) -> None:
    """Refuse roles and layers that there are not, a pipeline, and surgery on experts."""
    check_roles("finetune.freeze", self.freeze)
    check_layers("finetune.layers", self.layers, cfg.model.num_layers)
    if self.is_on and cfg.moe.spare_experts:
      raise ValueError(
        f"finetune with moe.spare_experts={cfg.moe.spare_experts}: frozen experts and adapters are "
        "not split or merged. Set moe.spare_experts=0."
      )
    if self.is_on and cfg.mesh.stage > 1:
      raise ValueError(
        f"finetune with mesh.stage={cfg.mesh.stage}: a pipeline trains all of its weights. Set "
        "mesh.stage=1 and divide the weights by mesh.fsdp."
      )


def is_within(layers: str, layer: int) -> bool:
  """Whether a range of layers, such as 16-31, has one; '' has all."""
  first, _, last = layers.partition("-")
  return not layers or int(first) <= layer <= int(last or first)


def check_layers(setting_name: str, layers: str, number: int) -> None:
  """Refuse what is no range of `number` layers."""
  match = re.fullmatch(r"(\d+)(?:-(\d+))?", layers)
  if layers and (match is None or not int(match[1]) <= int(match[2] or match[1]) < number):
    raise ValueError(
      f"{setting_name}={layers} is no range of the layers 0-{number - 1} "
      f"(model.num_layers={number}). Write FIRST-LAST, e.g. {number // 2}-{number - 1}."
    )
