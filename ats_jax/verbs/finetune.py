r"""Fine-tune a model on conversations, with settings that suit them, the model and the device.

  ats-jax finetune --init_from=hf://Qwen/Qwen3-0.6B --data=chats.jsonl
  ats-jax finetune --init_from=FOLDER --data=chats.jsonl --workdir=runs/mine \
    --config.optimizer.learning_rate=1e-4 --config.num_epochs=2
  ats-jax finetune --init_from=runs/debug --data=chats.jsonl --config=finetune:24gb

The log says each setting that was chosen, and why; what flags or a --config say stays. At the end
there are the held-out loss and some answers before and after, and the commands that export the
result. The same command goes on with a run that was stopped.
"""

import dataclasses
import functools
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging

from ats_jax.bridge.convert import config_of, tokenizer_of
from ats_jax.bridge.folder import is_model_folder
from ats_jax.checkpoint import workdir
from ats_jax.checkpoint.reader import best_step
from ats_jax.cluster import job, runtime
from ats_jax.config import Config, base_config
from ats_jax.config.build import from_config_dict, resolve
from ats_jax.config.extend import build
from ats_jax.config.names import flatten, to_dict
from ats_jax.config.tree import updated
from ats_jax.config.validate import check_given
from ats_jax.data.chat.tokenizer import has_own_template
from ats_jax.data.corpus.corpus import nothing_left
from ats_jax.data.sources import open_data
from ats_jax.data.splits import counts_of, open_documents
from ats_jax.data.tokens.file import load_tokenizer
from ats_jax.inference.load import load_run
from ats_jax.metrics.memory import GIB, memory_metrics
from ats_jax.metrics.rows import read_jsonl
from ats_jax.planner.finetune import Chooser, Texts
from ats_jax.planner.hardware import TYPICAL, typical
from ats_jax.step.program import Program
from ats_jax.store import paths
from ats_jax.train.answers import Question, answer, questions
from ats_jax.train.evaluate import score_all
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import End, train_to_end
from ats_jax.train.run import Run
from ats_jax.verbs import cli
from ats_jax.verbs.train import code_of

ANSWERS = "answers.json"  # in `samples` of the workdir
NUMBER = 3  # of questions
SHAPE = ("model", "moe", "mod")  # sections that the weights determine
MARKS = 2  # tokens that chatml adds
FORMATS = ("param_dtype", "compute_dtype")
FLAGS = flags.FlagValues()
CONFIG = cli.ConfigFlag(FLAGS)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run; default: runs/NAME-finetuned.", flag_values=FLAGS
)
_INIT_FROM = flags.DEFINE_string(
  "init_from",
  None,
  "What to fine-tune: a folder of Hugging Face's, hf://OWNER/NAME of its Hub, or a workdir.",
  flag_values=FLAGS,
)
_INIT_STEP = flags.DEFINE_string(
  "init_step", "latest", "Checkpoint of a workdir: a step, 'latest' or 'best'.", flag_values=FLAGS
)
_DATA = flags.DEFINE_string(
  "data", None, "The conversations, as data.paths: files, folders, globs.", flag_values=FLAGS
)
_IGNORED = cli.define_ignored_fields_flag(FLAGS)


class Weights(NamedTuple):
  """What weights say of a run that begins with them.

  Attributes:
    settings: those that they determine, by dotted name.
    template: of conversations.
    why: it is that one.
    positions: they know so many; 0 = any number.
  """

  settings: dict[str, Any]
  template: str
  why: str
  positions: int


def weights_of(initial: InitialWeights) -> Weights:
  """What the weights of a folder or a run say.

  Raises:
    ValueError: if there are no weights of a known model.
  """
  positions = 0
  if is_model_folder(initial.folder):
    cfg = config_of(initial.source)
    file, tokenizer = cfg.data.tokenizer, tokenizer_of(cfg, initial.source)
    has_template = has_own_template(file)
    positions = int(initial.source.fields.get("max_position_embeddings", 0))
  else:
    cfg, path = workdir.load_config(initial.folder), initial.folder / workdir.TOKENIZER
    file, tokenizer = str(path), load_tokenizer(path)
    has_template = cfg.data.format.name != "text"
    cfg = resolve(cfg, tokenizer.vocab_size)
  settings = {n: v for n, v in flatten(cfg).items() if n.partition(".")[0] in SHAPE}
  settings |= {f"precision.{name}": getattr(cfg.precision, name) for name in FORMATS}
  settings["data.tokenizer"] = file
  if has_template:
    return Weights(settings, "tokenizer", "the template of the model", positions)
  if cfg.model.vocab_size >= tokenizer.vocab_size + MARKS:
    return Weights(settings, "chatml", "the model has no template", positions)
  why = "the model has no template, and its vocabulary no room for one with tokens of its own"
  return Weights(settings, "plain", why, positions)


def chooser_of(initial: InitialWeights, data: str) -> tuple[Chooser, int]:
  """What is known of a new run before its conversations are read; and its positions, or 0."""
  given, values = CONFIG.given(), base_config().to_dict()
  changed: dict[str, Any] = {}
  if FLAGS["config"].present:
    usual, file = flatten(values), flatten(CONFIG.nested())
    changed = {n: v for n, v in file.items() if n not in usual or v != usual[n]}
    changed = {n: v for n, v in changed.items() if n.partition(".")[0] not in SHAPE}
  weights = weights_of(initial)
  settings = weights.settings | {"data.paths": tuple(data.split(",")), "data.format.name": "chat"}
  if "finetune.freeze" not in {*given, *changed}:
    settings["finetune.adapter.name"] = "lora"
  values = updated(updated(values, settings), changed)  # kinds first: flags may say more of them
  chooser = Chooser(CONFIG.applied(values), frozenset({*given, *changed}))
  chooser.choose(weights.why, {"data.format.template": weights.template})
  chooser.choose("a share by hash, whatever their order", {"data.validation_fraction": 0.1})
  return chooser, weights.positions


def chosen(chooser: Chooser, most: int) -> Config:
  """The config of a new run; it looks at conversations and devices."""
  chooser.of_model()
  devices, cfg = jax.device_count(), chooser.cfg
  chooser.of_texts(_texts(cfg), most, devices)
  train_set, _ = open_data(chooser.cfg.data, cfg.seed)
  chooser.of_length(train_set.info.num_rows)
  kind = jax.devices()[0].device_kind
  names = [name for name, row in TYPICAL.items() if row.kind == kind]
  limit = round(memory_metrics().get("memory/device_limit_gib", 0) * GIB)
  if limit and not names:
    logging.warning("the speed of %s is not known: settings are compared as on an H100", kind)
  chooser.of_memory(limit, devices, typical(names[0] if names else "H100"))
  for choice in chooser.choices:
    logging.info("chosen: %s", choice.in_words())
  return build(chooser.nested)


def _texts(cfg: Config) -> Texts:
  """The size of the conversations, whatever the length of a row."""
  corpus = open_documents(cfg.data, 0.0).corpus
  lengths = np.asarray(corpus.length) + 1
  if not lengths.size:
    raise ValueError(nothing_left(counts_of(corpus.report)))
  return Texts(len(lengths), int(lengths.sum()), int(lengths.max()))


def look(run: Run, folder: paths.Path) -> None:
  """Score the weights that a run begins with, and ask them held-out questions."""
  program: Program = run.program
  asked = questions(run.valid_set, NUMBER) if run.valid_set.info.num_rows else []
  with run.aside("eval"):
    if run.eval_sets:
      scores = score_all(program, run.state.weights, run.eval_sets, run.step)
      run.writer.write_scalars(run.step, scores)
    tokenizer, rules = run.train_set.info.tokenizer, program.rules(run.step)
    asked = answer(run.state.weights, tokenizer, program.cfg.sample, rules, asked, "before")
  if jax.process_index() == 0:
    paths.make_folder(folder / "samples")
    file = folder / "samples" / ANSWERS
    workdir.write_json(file, [dataclasses.asdict(question) for question in asked])


def report(folder: paths.Path) -> None:
  """Print what came of a run that has ended."""
  best = best_step(folder / workdir.CHECKPOINTS)
  step = "latest" if best is None else "best"
  file = folder / "samples" / ANSWERS
  asked = [Question(**values) for values in paths.parse_json(paths.read(file))]
  with load_run(folder, step) as run:
    made, rules, sampling = run.step, run.program.rules(run.step), run.program.cfg.sample
    asked = answer(run.model, run.tokenizer, sampling, rules, asked, "after")
    has_adapters = run.program.cfg.finetune.adapter.name != "none"
  workdir.write_json(file, [dataclasses.asdict(question) for question in asked])
  losses = {
    row["step"]: row["eval/loss"]
    for row in read_jsonl(folder / "metrics.jsonl")
    if "eval/loss" in row
  }
  for number, question in enumerate(asked, 1):
    print(f"held-out question {number}: {question.text!r}")
    for name in ("before", "after", "answer"):
      said = {"answer": "in the data"}.get(name, name)
      print(f"  {said}: {getattr(question, name)!r}")
  if {0, made} <= losses.keys():
    print(f"held-out loss before: {losses[0]:.6g}")
    print(f"held-out loss after: {losses[made]:.6g} (step {made}, the {step})")
  export = f"ats-jax bridge export --workdir={folder} --step={step}"
  print(f"export the model: {export} --folder={folder}/model")
  if has_adapters:
    print(f"export the adapters alone: {export} --folder={folder}/adapters --format=peft")


def main(argv: list[str]) -> int:
  """Fine-tune, or go on with it."""
  del argv
  source = cli.require(_INIT_FROM.value, "init_from", "hf://Qwen/Qwen3-0.6B")
  data = cli.require(_DATA.value, "data", "chats.jsonl")
  folder = paths.parse(_WORKDIR.value or f"runs/{PurePath(source).name}-finetuned")
  initial = InitialWeights.of(source, _INIT_STEP.value, _IGNORED.value)
  if (known := _going_on(folder)) is None:
    chooser, most = chooser_of(initial, data)
    first, finish = chooser.cfg, lambda: chosen(chooser, most)
  else:
    first, finish = known, lambda: known
  with runtime.configured(first):
    job.join(first)
    cfg = finish()
    check_given(cfg, CONFIG.given())
    begin = functools.partial(look, folder=folder)
    _, end = train_to_end(cfg, folder, initial, begin=begin)
  if end is End.DONE and jax.process_index() == 0:
    report(folder)
  return code_of(end)


def _going_on(folder: paths.Path) -> Config | None:
  """The config of the run in a folder, with the flags; None if there is none to go on with."""
  if not any((folder / workdir.CHECKPOINTS).glob("[0-9]*")):
    return None
  if not (folder / "samples" / ANSWERS).exists():
    raise ValueError(
      f"--workdir={folder} holds a run that finetune did not begin. Name another folder; "
      "`ats-jax train` goes on with that run."
    )
  logging.info("%s holds a run, which goes on with its own settings", folder)
  return from_config_dict(CONFIG.applied(to_dict(workdir.load_config(folder))))


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
