"""Weights that a new run begins with: of another run, or of a Hugging Face folder."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import override

from absl import logging

from ats_jax.bridge import hub
from ats_jax.bridge.convert import COMPANIONS, check_tokenizer, copy_kept, keep_companions
from ats_jax.bridge.export import choose_family
from ats_jax.bridge.folder import imported_fields, is_model_folder, tokenizer_in
from ats_jax.config.build import resolve
from ats_jax.config.names import flatten
from ats_jax.config.schema import Config
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer
from ats_jax.inference.weights import Weights
from ats_jax.model.decoder import Decoder
from ats_jax.step.program import Program
from ats_jax.step.state import TrainState
from ats_jax.store import paths
from ats_jax.store.paths import Path


@dataclasses.dataclass(frozen=True)
class InitialWeights(Weights):
  """Where they are, and what takes the place of some of them.

  Attributes:
    adapter: a folder of peft's whose adapters are those at first; "" = new ones.
    router: workdir of a run whose routers replace those of the weights; "" = none does.
  """

  adapter: str = ""
  router: str = ""

  @classmethod
  def of(
    cls,
    source: str,
    step: str = "latest",
    ignored: Sequence[str] = (),
    adapter: str = "",
    router: str = "",
  ) -> "InitialWeights":
    """From a path as a user writes it; hf://OWNER/NAME is fetched from the Hub.

    Raises:
      ValueError: for a name that the Hub does not have, or a path that cannot be read.
    """
    return cls(paths.parse(hub.local_folder(source)), step, tuple(ignored), adapter, router)

  def check(self, cfg: Config) -> None:
    """Refuse weights that do not fit a run before its text is read.

    A tokenizer that is trained on that text is another one than any folder's.

    Args:
      cfg: the run; its vocabulary need not be known.

    Raises:
      ValueError: if the model or the tokenizer of a Hugging Face folder is not the run's.
    """
    if is_model_folder(self.folder):
      source = self.source
      source.check_settings(resolve(cfg, source.settings["model.vocab_size"]))
      if cfg.data.tokenizer == "bpe":
        path = tokenizer_in(self.folder)
        raise ValueError(
          f"{self.folder}: data.tokenizer=bpe would train another tokenizer than that of its "
          f"weights. Use its own, --config.data.tokenizer={path or 'FILE'}."
        )
      check_tokenizer(self.folder, cfg, build_tokenizer(cfg.data, lambda: []))

  def keep_companions(self, folder: Path) -> None:
    """Keep in a run's workdir what a Hugging Face folder holds beside the weights, for exports."""
    if is_model_folder(self.folder):
      keep_companions(self.source, folder)
    else:
      copy_kept(self.folder, folder)

  @override
  def load(self, program: Program, tokenizer: Tokenizer) -> Decoder:
    model = super().load(program, tokenizer)
    if not self.router:
      return model
    from ats_jax.train.routers import with_routers  # here: few runs take them

    return with_routers(program.cfg, model, self.router)

  def with_adapter(self, program: Program, state: TrainState) -> TrainState:
    """The first state of a run, with the adapters of the folder `adapter` if there is one.

    Args:
      program: program of the run.
      state: as `program.init` makes it.

    Raises:
      ValueError: if they do not fit the run's.
    """
    if not self.adapter:
      return state
    cfg = program.cfg
    if is_model_folder(self.folder):
      family = self.source.family
    else:
      theirs = imported_fields(self.folder / COMPANIONS)
      family = choose_family(cfg, imported=theirs.get("model_type", ""))
    from ats_jax.bridge import peft_folder  # here: few runs begin with adapters

    family = family.fitted(flatten(cfg))
    read = functools.partial(peft_folder.read, pathlib.Path(self.adapter), cfg, family)
    logging.info("the adapters are those of %s", self.adapter)
    ema = None if state.ema is None else read(state.ema)
    return dataclasses.replace(state, model=read(state.model), ema=ema)
