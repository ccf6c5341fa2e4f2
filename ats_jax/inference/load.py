"""A trained run, ready to use: its weights, tokenizer and config, from the workdir alone."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ats_jax.checkpoint import CheckpointError, abstract_like, load_extra, restore_tree, workdir
from ats_jax.checkpoint.reader import find
from ats_jax.checkpoint.rest import Rest
from ats_jax.cluster import runtime
from ats_jax.config import Config
from ats_jax.config.build import CHANGES, resolve, with_changes, with_settings
from ats_jax.config.identity import RunIdentity
from ats_jax.config.schema import PrecisionConfig, SampleConfig
from ats_jax.config.schema.exchange import Hierarchical
from ats_jax.config.schema.optimizer import AdamW
from ats_jax.config.schema.schedule import Constant
from ats_jax.config.schema.setting import Table
from ats_jax.data.tokens.file import has_same_ids, load_tokenizer
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.extensions import losses
from ats_jax.inference.engine.options import DEFAULT, Options
from ats_jax.inference.generator import generate, prompt_ids
from ats_jax.model.decoder import Decoder
from ats_jax.model.layout import stacks
from ats_jax.ops.requirements import this_device, with_compute_dtype
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.sharding.rules import under_this_plan
from ats_jax.step.program import Program, make_program
from ats_jax.store import paths
from ats_jax.store.paths import Path

if TYPE_CHECKING:  # imported by runs on conversations
  from ats_jax.data.chat.conversation import Message
  from ats_jax.inference.engine.engine import Engine
  from ats_jax.inference.engine.runner import ModelRunner
  from ats_jax.inference.engine.schedule import Draft
  from ats_jax.inference.engine.score import Scorer


ROWS = 64  # texts at once at most


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """A trained run that is loaded for evaluation and sampling; `load_run` makes one.

  Attributes:
    step: the step of its checkpoint.
    model: its weights; their average if the run keeps one (`optimizer.ema_decay`).
    tokenizer: the tokenizer of the training.
    program: the compiled functions of its config.
    extra: JSON that was saved with the checkpoint.
    shares: others have its arrays too, so that what packs them leaves them as they are.
    options: how the engine works.
    draft: the run whose model guesses (`Options.draft`), packed.
  """

  step: int
  model: Decoder
  tokenizer: Tokenizer
  program: Program
  extra: Mapping[str, Any]
  shares: bool = False
  options: Options = DEFAULT
  draft: "TrainedRun | None" = None
  # The packed model, and behind it the last runner with the engine that uses it.
  _packed: list[Any] = dataclasses.field(default_factory=list, repr=False)

  def sharing(self, model: Decoder) -> "TrainedRun":
    """The run with a model that may have arrays of its own one, or with that."""
    return dataclasses.replace(self, model=model, shares=True, _packed=[])

  def sampling(self, **given: Any) -> SampleConfig:
    """How the run samples (`sample.*` of its config), with what is given in its place.

    A run with `max_tokens` of 0 draws no sample at its end. What is asked of it later is as long as
    by default.

    Raises:
      ValueError: for what no setting allows.
    """
    values = {f"sample.{name}": value for name, value in given.items()}
    if not self.program.cfg.sample.max_tokens:
      values = {"sample.max_tokens": SampleConfig().max_tokens} | values
    return with_settings(self.program.cfg, values).sample

  def generate(self, seed: int, **given: Any) -> Iterator[str]:
    """The continuation of the prompt, piece by piece; `given` as of `sampling`."""
    cfg = self.sampling(**given)
    return self._continue(self._ids(cfg), seed, cfg)

  def compile(self, messages: "Sequence[Message] | None" = None, **given: Any) -> None:
    """Compile what `generate`, or `answer` to `messages`, needs for its first two tokens.

    Nothing is computed: shapes may stand for the weights.
    """
    if not self._for_engine:
      return
    from ats_jax.inference.engine import ahead
    from ats_jax.inference.engine.request import Request, Sampling

    cfg = self.sampling(**given)
    ids = self._ids(cfg, messages)
    asked = dataclasses.replace(Sampling.of(cfg, 0), ignore_end=True, stop=())
    with ahead.compiling():
      engine = self.engine(1, len(ids) + cfg.max_tokens)
      engine.submit(Request(ids, asked))
      for _ in itertools.islice(engine.events(), 2):
        pass

  def answer(self, seed: int, messages: "Sequence[Message]", **given: Any) -> Iterator[str]:
    """What follows turns of a conversation, piece by piece; `given` as of `sampling`.

    Raises:
      ValueError: if the run was not trained on conversations, or its template has no place for a
        turn.
    """
    cfg = self.sampling(**given)
    return self._continue(self._ids(cfg, messages), seed, cfg)

  def _ids(self, cfg: SampleConfig, messages: "Sequence[Message] | None" = None) -> list[int]:
    """Of the prompt, or of turns in its place."""
    if messages is None:
      return prompt_ids(self.tokenizer, cfg.prompt)
    from ats_jax.data.chat.tokenizer import prompt_of  # here: few runs are on conversations

    return prompt_of(self.tokenizer, messages)

  def engine(self, rows: int, context: int = 0) -> "Engine":
    """What continues many texts at once, or one after the other.

    The weights are packed for it, so that `model` is of no use afterwards.

    Args:
      rows: texts at once at most.
      context: tokens of a prompt and its answer at least; never less than the length of the
        training's rows, and `sample.max_tokens` behind it.

    Raises:
      ValueError: if the run was loaded on other devices than `options` say, its model writes no
        text, or guesses (`options`) are not for it.
    """
    # Here: a training that draws a sample at its end needs none of it.
    from ats_jax.inference.engine.engine import Engine

    draft = self._guesses(rows, context) if self.options.speculate else None
    runner = self._runner(rows, context)
    engine = Engine(runner, self.tokenizer, share=not runner.skips, draft=draft)
    self._packed.append((runner, weakref.ref(engine)))
    return engine

  def _guesses(self, rows: int, context: int) -> "Draft":
    if self.draft is None:
      from ats_jax.inference.engine.lookup import PromptLookup

      return PromptLookup(self.options.speculate)
    from ats_jax.inference.engine.draft_model import DraftModel

    runner = self.draft._runner(rows, self._context(context))
    draft = DraftModel(runner, self.options.speculate)
    self.draft._packed.append((runner, weakref.ref(draft)))
    return draft

  def scorer(self, rows: int, context: int = 0) -> "Scorer":
    """What tells how likely texts are, with the weights as `engine` packs them.

    Args:
      rows: as of `engine`, which raises the same errors.
      context: tokens of a text at least.
    """
    from ats_jax.inference.engine.score import Scorer

    runner = self._runner(rows, context)
    scorer = Scorer(runner, self.tokenizer.vocab_size, share=not runner.skips)
    self._packed.append((runner, weakref.ref(scorer)))
    return scorer

  def _context(self, asked: int) -> int:
    """Tokens of a prompt and its answer that an engine has room for."""
    return max(asked, self.program.cfg.data.seq_len + self.sampling().max_tokens)

  @property
  def _for_engine(self) -> bool:
    return jax.sharding.get_mesh().size == self.options.devices

  def _runner(self, rows: int, context: int) -> "ModelRunner":
    """The device's side of an engine: the one of before, if nobody uses it and it is large enough.

    Whoever takes it is to be noted in `_packed`.
    """
    from ats_jax.inference.engine.runner import ModelRunner, Size, served

    if not self._for_engine:
      raise ValueError(
        f"the engine runs on {self.options.devices} device(s), and this run was loaded on "
        f"{jax.sharding.get_mesh().size}. Use load_run(..., devices={self.options.devices})."
      )
    rules = self.program.rules(self.step)
    size = Size(
      self._context(context), rows, narrow=self.options.pages, guess=self.options.speculate
    )
    if not self._packed:
      if not self.model.predicts:
        raise ValueError("this model rates texts and writes none. `evaluate` takes it.")
      self._packed.append(served(self.model, self.program, keep=self.shares))
    model, *made = self._packed
    free = [runner for runner, used_by in made if used_by() is None and runner.holds(size)]
    del self._packed[1:], made  # the pages of one fill the memory
    return free[0] if free else ModelRunner(model, self.program, self.tokenizer, rules, size)

  def continue_all(self, prompts: "Sequence[str]", seed: int, **given: Any) -> list[str]:
    """What follows each of several texts, drawn side by side; `given` as of `sampling`.

    Raises:
      ValueError: as `engine`.
    """
    from ats_jax.inference.engine.request import Request, Sampling

    cfg = self.sampling(**given)
    known = [prompt_ids(self.tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, known), default=0)
    engine = self.engine(max(1, min(ROWS, len(known))), longest + cfg.max_tokens)
    texts = {engine.submit(Request(ids, Sampling.of(cfg, seed))): "" for ids in known}
    for event in engine.events():
      if event.message:
        raise ValueError(event.message)
      texts[event.id] += event.text
    return list(texts.values())

  def _continue(self, ids: "Sequence[int]", seed: int, cfg: SampleConfig) -> Iterator[str]:
    """What follows tokens, piece by piece: by the engine, where it has its devices."""
    if not self._for_engine:
      rules = self.program.rules(self.step)
      yield from generate(self.model, self.tokenizer, cfg, rules=rules, prompt=ids, seed=seed)
      return
    from ats_jax.inference.engine.request import Request, Sampling

    engine = self.engine(1, len(ids) + cfg.max_tokens)
    engine.submit(Request(ids, Sampling.of(cfg, seed)))
    for event in engine.events():
      if event.message:
        raise ValueError(event.message)
      if event.text:
        yield event.text


def fit_devices(cfg: Config, num_devices: int) -> Config:
  """Change mesh and batch of a run so that its model can be used on `num_devices` devices.

  Weights stay split as in training as far as the devices allow, and the batch of an evaluation is
  rounded up to a multiple of its shards.
  """
  tensor = math.gcd(cfg.mesh.tensor, num_devices)
  expert = math.gcd(cfg.mesh.expert, num_devices // tensor)
  fsdp = math.gcd(cfg.mesh.fsdp, num_devices // (tensor * expert))
  shards = num_devices // tensor
  micro, exchange = cfg.data.batch_size // cfg.step.accum_steps, cfg.moe.exchange
  if isinstance(exchange, Hierarchical):
    exchange = dataclasses.replace(exchange, hosts=0)  # it counts those of training
  return dataclasses.replace(
    cfg,
    mesh=dataclasses.replace(
      cfg.mesh,
      stage=1,
      stage_rounds=1,
      data=-1,
      fsdp=fsdp,
      expert=expert,
      context=1,
      tensor=tensor,
      keep_gathered=False,
      copy_engines=False,
      compress_gradients="none",
    ),
    moe=dataclasses.replace(cfg.moe, exchange=exchange),
    data=dataclasses.replace(cfg.data, batch_size=-(-micro // shards) * shards),
    step=dataclasses.replace(cfg.step, accum_steps=1, remat_stages="full"),
    eval=dataclasses.replace(cfg.eval, num_batches=cfg.eval.num_batches * cfg.step.accum_steps),
  )


def _divided(cfg: Config, options: Options) -> Config:
  """A run whose mesh is that of its engine."""
  asked, here = f"tensor={options.tensor} x expert={options.expert}", len(jax.devices())
  if options.devices > here:
    raise ValueError(f"the engine is to run on {asked} devices, and there are {here}.")
  if options.expert > 1 and not cfg.moe.num_experts:
    raise ValueError(
      f"the engine is to run on {asked} devices, but this model has no experts to share."
    )
  mesh = dataclasses.replace(cfg.mesh, tensor=options.tensor, expert=options.expert)
  return dataclasses.replace(cfg, mesh=mesh)


def as_data(cfg: Config) -> Config:
  """`cfg` without settings by which another user's workdir could run code or write files here.

  Compiled programs are machine code: they come from the user's own cache, never from a folder that
  a workdir names. So does tokenised text. Options of XLA may write files and name programs to run.
  Extensions are programs: what they add to training, weights can be used without.
  """
  same = {field.name for field in dataclasses.fields(AdamW)} & vars(cfg.optimizer).keys()
  of_optimizer = {name: getattr(cfg.optimizer, name) for name in same}
  return dataclasses.replace(
    cfg,
    extensions=(),
    optimizer=AdamW(**of_optimizer | {"name": "adamw", "schedule": Constant()}),
    compilation_cache="off" if cfg.compilation_cache == "off" else "auto",
    data=dataclasses.replace(cfg.data, cache_dir=""),
    step=dataclasses.replace(cfg.step, compiler_options=Table()),
  )


def known_of(checkpoints: Path, step: int | str, run: RunIdentity) -> tuple[int, Mapping[str, Any]]:
  """Step and `extra` of a checkpoint, before it is verified; 0 and nothing if it is damaged."""
  try:
    found = find(checkpoints, step)
    return found, load_extra(checkpoints, found, run)
  except CheckpointError:  # `restore_tree` falls back to an older one, or says what is damaged
    return 0, {}


@contextlib.contextmanager
def load_run(
  folder: Path,
  step: str = "latest",
  compute_dtype: str = "",
  devices: int = 0,
  options: Options = DEFAULT,
  meanwhile: Callable[[TrainedRun], None] | None = None,
) -> Iterator[TrainedRun]:
  """Restore the weights of a run; its mesh is set inside the context.

  Args:
    folder: the workdir.
    step: a step, "latest" or "best".
    compute_dtype: in place of that of the training, as `precision.compute_dtype`, without 8 bits;
      "" = as it was trained.
    devices: how many to use; 0 = all. If `options` name several, it is their number.
    options: how the engine works.
    meanwhile: is called in a thread while the weights are read, with the run as far as it is known:
      its model has shapes for weights. What it raises is raised if the run can be loaded.

  Raises:
    ValueError: if there is no run, no such checkpoint, none that is intact, or one of another run;
      if the model cannot be divided among the engine's devices, or that of `options.draft` cannot
      guess for it.
  """
  folder = Path(folder)
  draft = _draft_of(options, compute_dtype) if options.draft else None
  chosen = int(step) if step.isdecimal() else step
  known = known_of(folder / workdir.CHECKPOINTS, chosen, workdir.load_identity(folder))

  def early(run: TrainedRun) -> contextlib.AbstractContextManager[None]:
    if meanwhile is None:
      return contextlib.nullcontext()
    # What it makes for the draft has no arrays, and must not be used again.
    of_draft = draft and dataclasses.replace(draft, _packed=[*draft._packed])
    run = dataclasses.replace(run, options=options, draft=of_draft)
    return _in_thread(functools.partial(meanwhile, run))

  with contextlib.ExitStack() as stack:
    while True:
      run = _restored(folder, chosen, known, compute_dtype, devices, options, early, stack)
      if run.extra.get(CHANGES, {}) == known[1].get(CHANGES, {}):
        break
      # Another checkpoint than the newest of before: that is damaged, or there is a newer one.
      known = run.step, run.extra
      stack.close()
    if draft is not None and not has_same_ids(run.tokenizer, draft.tokenizer):
      raise ValueError(
        f"draft={options.draft}: its tokenizer is not that of {folder}, so its ids are other "
        "tokens. Use a run with the same tokenizer."
      )
    yield dataclasses.replace(run, options=options, draft=draft)


def _draft_of(options: Options, compute_dtype: str) -> TrainedRun:
  """The run that guesses: what is packed of it stays when its mesh is left."""
  from ats_jax.inference.engine.runner import served

  with load_run(paths.parse(options.draft), "latest", compute_dtype, devices=1) as run:
    if run.program.cfg.mod.routing != "none" or not run.model.predicts:
      why = "rates texts" if not run.model.predicts else "skips tokens in some layers (mod.routing)"
      raise ValueError(f"draft={options.draft}: this model {why}, so it cannot guess.")
    return dataclasses.replace(run, _packed=[served(run.model, run.program)])


def _restored(
  folder: Path,
  step: int | str,
  known: tuple[int, Mapping[str, Any]],
  compute_dtype: str,
  devices: int,
  options: Options,
  early: Callable[[TrainedRun], contextlib.AbstractContextManager[None]],
  stack: contextlib.ExitStack,
) -> TrainedRun:
  """The run with its settings as `known` changes them; its mesh is left set in `stack`."""
  cfg, (number, extra) = workdir.load_config(folder), known
  # In this order: a checkpoint may name folders too.
  cfg = as_data(with_changes(cfg, extra.get(CHANGES, {})))
  tokenizer = load_tokenizer(folder / workdir.TOKENIZER)
  if compute_dtype:
    # With the defaults of the rest: there are no gradients, and what was chosen was for training.
    cfg = dataclasses.replace(cfg, precision=dataclasses.replace(
      PrecisionConfig(), compute_dtype=compute_dtype, param_dtype=cfg.precision.param_dtype,
      deterministic=cfg.precision.deterministic,
    ))  # fmt: skip
  stack.enter_context(runtime.configured(cfg))
  cfg = resolve(with_compute_dtype(cfg, this_device()), tokenizer.vocab_size)
  if options.devices > 1:
    cfg, devices = _divided(cfg, options), options.devices
  used = jax.devices()[: devices or None]
  cfg = fit_devices(cfg, len(used))
  mesh = make_mesh(cfg, used)
  stack.enter_context(on_mesh(cfg, mesh))
  loss = cfg.step.loss.name  # that of an extension is not loaded
  program = make_program(cfg, losses.find(loss)(cfg) if loss in losses else None)
  shapes, later = shapes_of(program), program.continued(extra)
  with early(TrainedRun(number, shapes, tokenizer, later, extra, shares=True)):
    restored, model, extra = restored_weights(folder, program, tokenizer, step, shapes)
  return TrainedRun(restored, model, tokenizer, program.continued(extra), extra)


@contextlib.contextmanager
def _in_thread(task: Callable[[], None]) -> Iterator[None]:
  """Do a task during the block, on its mesh; what that raises is raised at the end of the block."""
  mesh, task = jax.sharding.get_mesh(), under_this_plan(task)

  def on_this_mesh() -> None:
    with jax.set_mesh(mesh):
      task()

  with concurrent.futures.ThreadPoolExecutor(1, "meanwhile") as pool:
    done = pool.submit(on_this_mesh)
    yield
    done.result()


def shapes_of(program: Program) -> Decoder:
  """The weights of a checkpoint, as shapes: their average if the run keeps one."""
  weights = operator.attrgetter(_part(program))(program.init(abstract=True))
  return abstract_like(weights, jax.sharding.get_mesh())


def _part(program: Program) -> str:
  """The part of a state that has its weights."""
  return "ema" if program.cfg.optimizer.has_average else "model"


def restored_weights(
  folder: Path, program: Program, tokenizer: Tokenizer, step: int | str, shapes: Decoder
) -> tuple[int, Decoder, dict[str, Any]]:
  """The step, weights and `extra` of a checkpoint.

  Args:
    folder: the workdir.
    program: program of the run on the current mesh.
    tokenizer: tokenizer of the run.
    step: a step, "latest" or "best".
    shapes: of the weights (`shapes_of`).

  Raises:
    ValueError: as `load_run`, or if the run has adapters and its frozen weights are not there.
  """
  cfg, checkpoints, part = program.cfg, folder / workdir.CHECKPOINTS, _part(program)

  def rest_of(extra: Mapping[str, Any]) -> Rest:
    if cfg.finetune.adapter.name == "none":
      return Rest()
    from ats_jax.inference.base import BASE, Base  # here: few runs have adapters

    named = extra.get(BASE)
    pick = operator.attrgetter(part)
    return Base.named(named, program, tokenizer, folder, pick=pick) if named else Rest()

  run = workdir.load_identity(folder)
  return restore_tree(checkpoints, shapes, step, part, run, stacks(cfg), rest_of)
