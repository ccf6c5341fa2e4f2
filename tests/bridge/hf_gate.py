"""The gate: one import, its logits beside those of `transformers`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import hf_models
import jax
from flax import nnx

from ats_jax.bridge.convert import config_of, load_model
from ats_jax.bridge.folder import ModelFolder, open_model_folder
from ats_jax.bridge.parity import Reference, our_logits, reference
from ats_jax.checkpoint import abstract_like
from ats_jax.config import Config
from ats_jax.config.build import resolve
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import rules_at
from ats_jax.model.numerics import numerics


def settings(source: ModelFolder) -> Config:
  """The resolved config of an import; any tokens."""
  cfg = config_of(source, tokenizer="bytes")
  return resolve(cfg, 0)


@functools.cache
def abstract(cfg: Config) -> Any:
  build = lambda key: Decoder(cfg, numerics(cfg), nnx.Rngs(params=key))
  shapes = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
  return abstract_like(shapes, jax.sharding.get_mesh())


def imported(source: ModelFolder, cfg: Config | None = None) -> Decoder:
  cfg = cfg or settings(source)
  return load_model(source, cfg, abstract(cfg))


def rules(cfg: Config, *, training: bool = False) -> Any:
  return rules_at(cfg, 0, training=training)


def passes(source: ModelFolder, theirs: Reference) -> bool:
  """Whether `bridge verify` takes an import for the same model; False too where it is refused."""
  try:
    cfg = settings(source)
    model = imported(source, cfg)
  except ValueError:
    return False
  ours = our_logits(model, rules(cfg), theirs.tokens_BT, theirs.positions_P)
  return theirs.error(ours) <= theirs.bound


def with_setting(source: ModelFolder, name: str, value: Any) -> ModelFolder:
  settings = {**source.settings, name: value}
  if value == "none":  # a kind without settings: those of another one would be refused
    section = name.removesuffix("name")
    settings = {n: v for n, v in settings.items() if n == name or not n.startswith(section)}
  return dataclasses.replace(source, settings=settings)


def with_row(source: ModelFolder, number: int, row: Any) -> ModelFolder:
  rows = list(source.family.rows)
  rows[number] = row
  return dataclasses.replace(source, family=dataclasses.replace(source.family, rows=tuple(rows)))


@functools.cache
def case(name: str, folder: Path) -> tuple[ModelFolder, Reference]:
  """A saved case, and what `transformers` computes of some tokens."""
  hf_models.save(hf_models.make(name), folder)
  return open_model_folder(folder), reference(folder, seq_len=hf_models.SEQ_LEN)
