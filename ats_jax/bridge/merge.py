"""A workdir of the model that a run with adapters computes, without them."""

import dataclasses
from typing import Any

import numpy as np

from ats_jax.bridge.convert import ROOT, copy_kept
from ats_jax.checkpoint import deferred, layout, workdir
from ats_jax.config.schema import Config, FinetuneConfig
from ats_jax.data.tokens.file import load_tokenizer, save_tokenizer
from ats_jax.model.adapters import merged
from ats_jax.model.layout import stacks
from ats_jax.store.paths import Path


def write_merged(source: Path, cfg: Config, model: Any, step: int, target: Path) -> None:
  """Write a workdir with one checkpoint of merged weights.

  Args:
    source: workdir of the run.
    cfg: its resolved config.
    model: its weights and adapters.
    step: of these.
    target: the workdir.
  """
  names = layout.named_arrays(merged(model), stacks=stacks(cfg))
  plain = dataclasses.replace(cfg, finetune=FinetuneConfig(), optimizer=Config().optimizer)

  def array(part: layout.StoredArray) -> deferred.Deferred:
    make = lambda: np.asarray(part.leaf if part.layer is None else part.leaf[part.layer])
    return deferred.Deferred(part.shape, np.dtype(part.leaf.dtype), make)

  with workdir.claim(target, plain) as run:
    save_tokenizer(load_tokenizer(source / workdir.TOKENIZER), target / workdir.TOKENIZER)
    copy_kept(source, target)
    arrays = {f"{ROOT}/{name}": array(part) for name, part in names.items()}
    deferred.write(target / workdir.CHECKPOINTS, step, arrays, run=run, source="", extra={})
