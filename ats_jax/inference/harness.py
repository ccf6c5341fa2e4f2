"""Tasks of lm-evaluation-harness, which the engine of a trained run does.

Texts become tokens as with the harness's own model `hf` on the exported folder, so numbers are the
same: a context begins with bos and loses its beginning where it is too long, and the likelihood of
a whole document (`loglikelihood_rolling`) counts its bos too.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml  # pyright: ignore[reportMissingModuleSource]
from absl import logging
from lm_eval import evaluator, utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.api.task import Task  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from ats_jax.inference.engine.options import Options
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.score import Text
from ats_jax.inference.forward import logprobs_of
from ats_jax.inference.load import ROWS, TrainedRun, load_run
from ats_jax.store import paths

SAMPLES, SAMPLE_TOKENS = 4, 256  # texts, and tokens of each, that the forward pass is run on too
MAX_TOKENS = 256  # of an answer, where the task does not say, as with `hf`
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("ats_jax")
class RunLM(TemplateLM):
  """A trained run as a model of the harness.

  In Python: `lm_eval.simple_evaluate("ats_jax", {"workdir": "runs/debug"}, tasks=[...])` behind
  `import ats_jax.inference.harness`.
  """

  def __init__(
    self,
    workdir: str,
    step: str = "latest",
    compute_dtype: str = "",
    pages: str = "",
    speculate: int = 0,
    draft: str = "",
    tensor: int = 1,
    expert: int = 1,
    batch_size: Any = None,
    max_batch_size: Any = None,
    device: Any = None,
  ):
    """Load a run; its mesh is set until `close`.

    Args:
      workdir: of the run.
      step: as of `load_run`.
      compute_dtype: likewise.
      pages: as of `Options`.
      speculate: likewise.
      draft: likewise.
      tensor: likewise.
      expert: likewise.
      batch_size: the harness passes it to every model; the engine makes its own batches.
      max_batch_size: likewise.
      device: likewise; jax chooses.
    """
    super().__init__()
    del batch_size, max_batch_size, device
    self._stack = contextlib.ExitStack()
    options = Options(pages, speculate, draft, tensor, expert)
    loading = load_run(paths.parse(workdir), str(step), compute_dtype, 1, options)
    self._run = self._stack.enter_context(loading)
    self._compared = False
    self.max_length = self._run.program.cfg.data.seq_len

  @property
  def run(self) -> TrainedRun:
    """What does the tasks."""
    return self._run

  def with_run(self, run: TrainedRun) -> Self:
    """The same with a run that shares arrays of its own one; it is not closed by itself."""
    other = copy.copy(self)
    other._run, other._compared = run, False
    return other

  def close(self) -> None:
    """Let go of the run."""
    self._stack.close()

  @property
  def eot_token_id(self) -> int:
    """What ends a document."""
    return self._run.tokenizer.of_text.eos_id

  @property
  def prefix_token_id(self) -> int:
    """What begins one."""
    return self._run.tokenizer.of_text.bos_id

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """The ids of a text, bos first unless it is to have none."""
    ids = self._run.tokenizer.of_text.encode(string)
    return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

  def loglikelihood_rolling(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """The logarithms of the probabilities of whole documents."""
    windows, owners = [], []
    for number, request in enumerate(requests):
      (text,) = request.args
      for window in utils.get_rolling_token_windows(
        self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
      ):
        windows.append((None, *utils.make_disjoint_window(window)))
        owners.append(number)
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [logprob for logprob, _ in self._loglikelihood_tokens(windows)])
    for request, total in zip(requests, sums.tolist(), strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return sums.tolist()

  def _loglikelihood_tokens(
    self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    texts = [self._fitted(context, continuation) for _, context, continuation in requests]
    pairs = zip(texts, requests, strict=True)
    if shortened := sum(len(text.context) < len(context) for text, (_, context, _) in pairs):
      logging.warning(
        "%d of %d contexts lose their beginning: with what follows they are longer than the %d "
        "tokens that the model was trained with", shortened, len(texts), self.max_length,
      )  # fmt: skip
    self._compare(texts)
    scores = self._run.scorer(ROWS).score(texts)
    answers = [(score.logprob, score.greedy) for score in scores]
    for (asked, *_), answer in zip(requests, answers, strict=True):
      if asked is not None:  # a window of a document is no request
        self.cache_hook.add_partial("loglikelihood", asked, answer)
    return answers

  def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> Text:
    room = self.max_length + 1 - len(continuation)  # the last token is not read
    if room < 1:
      raise ValueError(
        f"a continuation has {len(continuation):,} tokens, but the model was trained with "
        f"{self.max_length:,} (data.seq_len). Leave the task out."
      )
    return Text(context[-room:], continuation)

  def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
    """The continuations of contexts, each up to what ends it."""
    asked = [self._request(*request.args) for request in requests]
    self._compare([Text(request.prompt[:1], request.prompt[1:]) for request in asked])
    engine = self._run.engine(ROWS)
    texts = {engine.submit(request): "" for request in asked}
    for event in engine.events():
      if event.message:
        raise ValueError(event.message)
      texts[event.id] += event.text
    for request, text in zip(requests, texts.values(), strict=True):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return list(texts.values())

  def _request(self, context: str, options: Mapping[str, Any]) -> Request:
    given = normalize_gen_kwargs(dict(options), MAX_TOKENS)
    most = given.pop("max_gen_toks")
    stop = tuple(text for text in given.pop("until", None) or () if text)
    given.pop("do_sample")  # without it the temperature is 0
    if unknown := given.keys() - set(_DRAWING):
      raise ValueError(
        f"generation_kwargs: {', '.join(sorted(unknown))} has no counterpart here. There are "
        f"until, max_gen_toks, do_sample, {', '.join(_DRAWING)}."
      )
    room = self.max_length - most
    if room < 1:
      raise ValueError(
        f"the task asks for answers of up to {most:,} tokens (max_gen_toks), but the model was "
        f"trained with {self.max_length:,} (data.seq_len), prompt included. Leave the task out."
      )
    drawing = {"temperature": 0.0, "top_p": 1.0} | given
    return Request(
      self.tok_encode(context)[-room:], Sampling(max_tokens=most, stop=stop, **drawing)
    )

  def _compare(self, texts: Sequence[Text]) -> None:
    """Say once how far the engine is from the forward pass of the training."""
    if self._compared or not texts:
      return
    self._compared = True
    samples, length = [], lambda text: len(text.context) + len(text.continuation)
    for context, continuation in sorted(texts, key=length)[-SAMPLES:]:
      ids = [*context, *continuation][: min(SAMPLE_TOKENS, self.max_length)]
      samples.append(Text(ids[:1], ids[1:]))
    run = self._run  # first, as the engine packs its weights
    wanted = [logprobs_of(run.model, run.program.rules(run.step), *text) for text in samples]
    found = [score.logprobs for score in run.scorer(ROWS).score(samples)]
    found, wanted = np.concatenate(found), np.concatenate(wanted)
    apart = np.abs(found - wanted)
    if apart.size:
      logging.info(
        "engine beside the forward pass of the training: log-probabilities of %d tokens differ by "
        "%.2g at most, %.2g on average; perplexity %.6g instead of %.6g", apart.size, apart.max(),
        apart.mean(), np.exp(-found.mean()), np.exp(-wanted.mean()),
      )  # fmt: skip


def evaluate_tasks(
  model: RunLM, tasks: Sequence[str], num_fewshot: int | None, limit: int | None
) -> dict[str, float]:
  """The metrics of tasks, as TASK/METRIC, with their standard errors.

  Args:
    model: what does them.
    tasks: names of the harness, YAML files, or folders of these.
    num_fewshot: examples before each question, in place of the task's own number.
    limit: documents of each task at most.

  Raises:
    ValueError: for a task that there is not, or that cannot be done.
  """
  loaded = _tasks_of(tasks)
  results = evaluator.simple_evaluate(
    model,
    tasks=loaded,
    num_fewshot=num_fewshot,
    limit=limit,
    log_samples=False,
    task_manager=TaskManager(include_defaults=False),
  )
  return {
    f"{task}/{metric.removesuffix(',none')}": float(value)
    for task, metrics in results["results"].items()
    for metric, value in metrics.items()
    if "," in metric and isinstance(value, (int, float))  # the others are descriptions
  }


def _tasks_of(tasks: Sequence[str]) -> list[Task]:
  """The tasks that are named."""
  found, packaged = list[Task](), None
  for name in tasks:
    folder, wanted = name if Path(name).is_dir() else None, [name]
    manager = TaskManager(include_path=folder, include_defaults=False)
    if folder:
      wanted = manager.all_subtasks
      if not wanted:
        raise ValueError(f"{name} holds no task: a YAML file with `task: NAME` was expected.")
    elif not Path(name).is_file():
      manager = packaged = packaged or TaskManager()  # reads thousands of files
      if name not in manager.all_tasks:
        raise ValueError(
          f"{name!r} is no task of lm-evaluation-harness (`lm-eval ls tasks` lists them), and no "
          "YAML file or folder of such."
        )
    try:
      found += manager.load(wanted)["tasks"].values()
    except (OSError, KeyError, yaml.YAMLError) as e:  # of its documents, its metrics, its file
      said = " ".join(str(e).split())
      raise ValueError(f"{name}: the task cannot be used: {type(e).__name__}: {said}") from e
  names = [task.task_name for task in found]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise ValueError(f"there are several tasks with the name {twice[0]!r}. Rename one.")
  return found
