"""What the verbs do, as functions for scripts and notebooks: docs/reference/api.md shows them.

They leave the process as it was: jax's settings, the environment, handlers of signals and logs.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, overload

from ats_jax.cluster import job, runtime
from ats_jax.config import Config
from ats_jax.config.extend import build
from ats_jax.config.file import load_file
from ats_jax.config.tree import updated
from ats_jax.config.validate import check_given
from ats_jax.data.chat.conversation import read_question
from ats_jax.data.chat.tokenizer import prompt_of
from ats_jax.inference.engine import engine
from ats_jax.inference.engine.options import Options
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.generator import prompt_ids
from ats_jax.inference.load import ROWS, TrainedRun, load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.planner.budget import budget
from ats_jax.planner.describe import describe as plan
from ats_jax.step.state import TrainState
from ats_jax.store import paths
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train as train_run
from ats_jax.verbs import cli
from ats_jax.verbs.evaluate import evaluate_run

__all__ = ["Engine", "budget", "config", "evaluate", "generate", "metrics", "plan", "train"]


def config(source: str = cli.DEFAULT_CONFIG, settings: Mapping[str, Any] | None = None) -> Config:
  """A run to make.

  Args:
    source: a config file, with a variant behind a colon, as for `--config`.
    settings: values by dotted name, e.g. {"model.num_layers": 4}.

  Raises:
    ValueError: for a file that cannot be read, an unknown name, or a value that no setting allows.
  """
  settings = settings or {}
  cfg = build(updated(load_file(source).to_dict(), settings))
  check_given(cfg, settings)
  return cfg


def train(
  cfg: Config,
  workdir: str,
  *,
  init_from: str | None = None,
  init_step: str = "latest",
  resume_step: int | None = None,
) -> TrainState:
  """Train, or go on with the run in `workdir`; Ctrl-C saves and returns.

  Args:
    cfg: of `config`.
    workdir: the folder of the run, also on a store.
    init_from: the workdir of another run, a folder of Hugging Face's or hf://OWNER/NAME of its
      Hub, whose weights a new one begins with.
    init_step: its checkpoint: a step, "latest" or "best".
    resume_step: the checkpoint to go on from in place of the newest one; later ones are set aside.

  Returns:
    The last state: `step`, the updates done; `model`, the weights.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite.
  """
  initial = InitialWeights.of(init_from, init_step) if init_from else None
  folder = paths.parse(workdir)
  with cli.short_log(), runtime.configured(cfg):
    job.join(cfg)
    return train_run(cfg, folder, initial, resume_step)


def evaluate(
  workdir: str,
  *,
  step: int | str = "latest",
  text: str | Sequence[str] | Mapping[str, Sequence[str]] = (),
) -> dict[str, float]:
  """Metrics of a trained run on its validation split, or on other text.

  Args:
    workdir: of the run.
    step: a step, "latest" or "best".
    text: a file, folder or glob, or several, in place of the validation split; by name, if there
      are several sets.

  Returns:
    `eval/loss` (nats per token), `eval/perplexity`, `eval/accuracy` and others.

  Raises:
    ValueError: if there is no such run, checkpoint or text.
  """
  several = (text,) if isinstance(text, str) else text
  with cli.short_log():
    return evaluate_run(paths.parse(workdir), str(step), several)[1]


@overload
def generate(
  workdir: str, prompt: str, *, step: int | str = "latest", seed: int = 0, **sampling: Any
) -> str: ...


@overload
def generate(
  workdir: str, prompt: list[str], *, step: int | str = "latest", seed: int = 0, **sampling: Any
) -> list[str]: ...


def generate(
  workdir: str,
  prompt: str | list[str],
  *,
  step: int | str = "latest",
  seed: int = 0,
  **sampling: Any,
) -> str | list[str]:
  """The prompt, or each of several, continued by a trained run.

  Args:
    workdir: of the run.
    prompt: text to continue; of several, all at once and on one device.
    step: a step, "latest" or "best".
    seed: of the draws: the same seed gives the same text.
    **sampling: in place of the run's own `sample.*`, by the names of these settings.

  Raises:
    ValueError: if there is no such run or checkpoint, or sampling is not allowed so.
  """
  devices = 0 if isinstance(prompt, str) else 1
  with cli.short_log(), load_run(paths.parse(workdir), str(step), devices=devices) as run:
    if isinstance(prompt, str):
      return prompt + "".join(run.generate(seed, prompt=prompt, **sampling))
    texts = run.continue_all(prompt, seed, **sampling)
    return [begin + rest for begin, rest in zip(prompt, texts, strict=True)]


class Engine:
  """A trained run that continues many texts at once.

  What is asked may come and end at any time. Use it as a context, or `close` it.
  """

  def __init__(
    self,
    workdir: str,
    *,
    step: int | str = "latest",
    rows: int = ROWS,
    context: int = 0,
    pages: str = "",
    speculate: int = 0,
    draft: str = "",
    tensor: int = 1,
    expert: int = 1,
  ):
    """Load a run.

    Args:
      workdir: of the run.
      step: a step, "latest" or "best".
      rows: texts at once; others wait.
      context: tokens of a prompt and its answer at least; never less than the length of the
        training's rows, and `sample.max_tokens` behind it.
      pages: "int8" or "fp8", in which keys and values are stored with a scale for each token and
        head; "" = in the compute dtype.
      speculate: tokens at most that are guessed from what followed the same few before, and
        verified in one step; 0 = none. Texts stay as they are, but for rounding. For answers that
        repeat parts of their text, and few at once.
      draft: the workdir of a smaller run whose model guesses instead, with the same tokenizer.
      tensor: devices that share each layer's heads and widths, and the vocabulary.
      expert: devices, or groups of `tensor` of them, that share the experts.

    Raises:
      ValueError: for other pages or guesses, if there is no such run or checkpoint, if its model
        writes no text or cannot be divided so, or if its layers skip tokens and `speculate` is
        not 0.
    """
    options = Options(pages, speculate, draft, tensor, expert)
    with contextlib.ExitStack() as stack:
      stack.enter_context(cli.short_log())
      loading = load_run(paths.parse(workdir), str(step), devices=1, options=options)
      run = stack.enter_context(loading)
      self._opened: tuple[TrainedRun, engine.Engine] | None = run, run.engine(rows, context)
      self._stack = stack.pop_all()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def close(self) -> None:
    """Let go of the run and its memory; what was asked and has not ended is forgotten."""
    self._opened = None
    self._stack.close()

  def _open(self) -> tuple[TrainedRun, engine.Engine]:
    if self._opened is None:
      raise ValueError("this engine was closed. Make another one.")
    return self._opened

  def submit(
    self,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    logprobs: int = 0,
    **sampling: Any,
  ) -> int:
    """Ask for what follows; its events have the number that is returned.

    Args:
      prompt: a text to continue, or the turns of a conversation to answer, each with `role` and
        `content`.
      seed: of the draws: the same seed gives the same text.
      logprobs: how many of the likeliest tokens are reported at each place.
      **sampling: in place of the run's own `sample.*`, by the names of these settings.

    Raises:
      ValueError: for a prompt that is no text, turns that the run does not know, or sampling that
        is not allowed so. What there is no room for is refused by an event.
    """
    run, continues = self._open()
    tokenizer, drawing = run.tokenizer, Sampling.of(run.sampling(**sampling), seed)
    if isinstance(prompt, str):
      ids = prompt_ids(tokenizer, prompt)
    else:
      ids = prompt_of(tokenizer, read_question(prompt))
    return continues.submit(Request(ids, dataclasses.replace(drawing, logprobs=logprobs)))

  def events(self) -> Iterator[engine.Event]:
    """What comes of all that was asked, until it has ended; more may be asked meanwhile.

    An event has `id`, `text` (what is new), `ids` and `logprobs` of the tokens, and in the last one
    of a text `finished`: "end", "stop", "length", "cancelled", or "refused" with `message`. Who
    stops to listen may listen again, also after a Ctrl-C, and misses nothing.
    """
    return self._open()[1].events()

  def cancel(self, number: int) -> None:
    """End a text; nothing happens if it has ended."""
    self._open()[1].cancel(number)


def metrics(workdir: str) -> list[dict[str, Any]]:
  """The rows of a run's metrics.jsonl, oldest first: `step`, `wall_time` and the metrics.

  Raises:
    ValueError: if there are none.
  """
  path = paths.parse(workdir) / "metrics.jsonl"
  if not path.exists():
    raise ValueError(f"{path} is missing. Train there first, with jsonl in log.writers.")
  return read_jsonl(path)
