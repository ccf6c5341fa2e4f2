"""The frozen weights of a run with adapters, which its checkpoints name and do not hold."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, override

import jax
from absl import logging

from ats_jax.checkpoint import keep_for, workdir
from ats_jax.checkpoint.rest import Rest
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.inference.weights import Weights
from ats_jax.model.param import with_frozen, without_frozen
from ats_jax.step.program import Program
from ats_jax.step.state import TrainState
from ats_jax.store import paths

# Where `extra` of a checkpoint names them, and the workdir may have them.
BASE = "base"


@dataclasses.dataclass(frozen=True)
class Base(Rest):
  """They are read again from where the run had them at its beginning.

  Attributes:
    weights: where that is.
    digest: `weights.digest` as it was then.
    program: program of the run.
    tokenizer: tokenizer of the run.
    pick: the part of a state that is saved and restored.
  """

  weights: Weights
  digest: str
  program: Program
  tokenizer: Tokenizer
  pick: Callable[[TrainState], Any] = lambda state: state

  @classmethod
  def at_first(
    cls, weights: Weights, program: Program, tokenizer: Tokenizer, run: paths.Path
  ) -> Self:
    """That of a new run; all processes of a job call it together.

    A checkpoint that has the weights is marked, so that its own run does not delete it.

    Args:
      weights: where they are.
      program: program of the run.
      tokenizer: tokenizer of the run.
      run: workdir of the run.

    Raises:
      ValueError: if there are no weights.
    """
    weights = Weights(paths.absolute(weights.folder), weights.found_step, weights.ignored)
    digest = weights.digest
    if weights.step and jax.process_index() == 0:
      checkpoint = weights.folder / workdir.CHECKPOINTS / weights.step
      keep_for(checkpoint, f"the frozen weights of {paths.absolute(run)}")
    logging.info(
      "checkpoints will not hold the frozen weights: those of %s (SHA-256 %s) must stay",
      _name(weights), digest[:12],
    )  # fmt: skip
    return cls(weights, digest, program, tokenizer)

  @classmethod
  def named(
    cls,
    saved: Mapping[str, Any],
    program: Program,
    tokenizer: Tokenizer,
    run: paths.Path,
    *,
    folder: paths.Path | None = None,
    pick: Callable[[TrainState], Any] = lambda state: state,
  ) -> Self:
    """That which a checkpoint names; all processes of a job call it together.

    Args:
      saved: what `saved` gave.
      program: program of the run.
      tokenizer: tokenizer of the run.
      run: workdir of the run.
      folder: where it is now; None = in `base` of the workdir, or else where it was.
      pick: as of the class.

    Raises:
      ValueError: if it is not there, or is not the same.
    """
    moved = run / BASE
    folder = paths.absolute(folder or (moved if moved.exists() else paths.parse(saved["folder"])))
    weights = Weights(folder, saved["step"], tuple(saved["ignored"]))
    begin = f"checkpoints of this run leave out its frozen weights, those of {_name(weights)}"
    advice = f"Put them back, or make {moved} a copy of them or a link to them"
    try:
      digest = weights.digest
    except (ValueError, *paths.errors()) as e:
      raise ValueError(f"{begin}, which cannot be read: {e} {advice}.") from e
    if digest != saved["digest"]:
      raise ValueError(
        f"{begin}, which have changed since it began: their SHA-256 is {digest[:12]}, expected "
        f"{saved['digest'][:12]}. {advice}."
      )
    return cls(weights, digest, program, tokenizer, pick)

  @override
  def left_out(self, state: Any) -> Any:
    return without_frozen(state)

  @override
  def put_back(self, part: Any) -> Any:
    model = self.weights.load(self.program, self.tokenizer)
    return with_frozen(part, self.pick(self.program.init(model=model)))

  @override
  def saved(self) -> dict[str, Any]:
    weights = self.weights
    named = {"folder": str(weights.folder), "step": weights.step, "ignored": weights.ignored}
    return {BASE: named | {"digest": self.digest}}


def _name(weights: Weights) -> str:
  return f"step {weights.step} of {weights.folder}" if weights.step else str(weights.folder)
