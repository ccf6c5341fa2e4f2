"""Continue a text with a trained run, streaming to the terminal.

  ats-jax generate --workdir=runs/debug --prompt='def main('
  ats-jax generate --workdir=runs/debug --step=best --temperature=0 --max_tokens=100 --prompt=import
  ats-jax generate --workdir=runs/chat --chat --prompt='What is a row?' --system='Be brief.'
  ats-jax generate --workdir=runs/base --adapter=math=adapters/a,code=adapters/b --prompt=import
  ats-jax generate --workdir=runs/debug --prompts=prompts.jsonl

With --chat the prompt is a user's turn, written as in training, and the answer ends by itself.
--prompts names a file of many: a text a line, or a .jsonl with "prompt" or "messages"; the answers
are JSON lines in the same order. --adapter names folders of peft: the run answers alone, as base,
then with each. How it draws, where nothing is given, is as the run's own config says (`sample.*`).
"""

import functools
import json
from typing import TYPE_CHECKING, Any

from absl import flags

from ats_jax.data.chat.conversation import Message
from ats_jax.inference.engine.options import DEFAULT
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.store import paths
from ats_jax.verbs import cli
from ats_jax.verbs.adapters import by_name, define_adapter_flag, each
from ats_jax.verbs.drawing import DrawingFlags

if TYPE_CHECKING:  # what imports jax is imported while the device starts
  from ats_jax.inference.load import TrainedRun
  from ats_jax.verbs.prompts import Prompt

FLAGS = flags.FlagValues()
_DRAWING = DrawingFlags(FLAGS)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.", flag_values=FLAGS)
_PROMPTS = flags.DEFINE_string("prompts", None, "File of texts to continue.", flag_values=FLAGS)
_ADAPTER = define_adapter_flag(FLAGS)
_CHAT = flags.DEFINE_boolean(
  "chat", False, "The prompt is what a user says; print the answer alone.", flag_values=FLAGS
)
_SYSTEM = flags.DEFINE_string(
  "system", "", "With --chat: what the system says before.", flag_values=FLAGS
)


def main(argv: list[str]) -> None:
  """Print the prompt and its continuation, or the answer to it."""
  del argv
  if _SYSTEM.value and not _CHAT.value:
    raise ValueError("--system is a turn of a conversation: it needs --chat.")
  if _PROMPTS.value is not None and _PROMPT.value is not None:
    raise ValueError("--prompt and --prompts both say what to continue. Use one of them.")
  folder = paths.parse(cli.require(_DRAWING.workdir.value, "workdir", "runs/debug"))
  given, adapters = _DRAWING.given(), by_name(_ADAPTER.value)
  options = _DRAWING.engine.value
  meanwhile, prompt = None, _PROMPT.value
  if _PROMPTS.value is None:
    answer, devices = _print_one, 0 if options == DEFAULT else 1  # of several, none has an engine
    if prompt is not None:
      given["prompt"] = prompt
      meanwhile = lambda run: run.compile(_turns(prompt), **given)
  else:
    from ats_jax.verbs.prompts import read_prompts

    prompts = read_prompts(paths.parse(_PROMPTS.value))
    answer, devices = functools.partial(_answer_all, prompts=prompts), 1
  step, dtype = _DRAWING.step.value, _DRAWING.compute_dtype.value
  from ats_jax.inference.begin import begun

  with begun(folder, step):
    from ats_jax.inference.load import load_run

    with load_run(folder, step, dtype, devices, options, meanwhile) as run:
      for name, one in each(run, folder, adapters):
        answer(one, given, name)


def _system() -> list[Message]:
  return [Message("system", _SYSTEM.value)] if _SYSTEM.value else []


def _turns(prompt: str) -> list[Message] | None:
  """With --chat what is answered."""
  return [*_system(), Message("user", prompt)] if _CHAT.value else None


def _print_one(run: "TrainedRun", given: dict[str, Any], name: str) -> None:
  prompt, seed = run.sampling(**given).prompt, _DRAWING.seed.value
  if "prompt" not in given:  # that of the run is for the sample at its end
    raise ValueError(
      "there is no prompt. Give --prompt='some text' (--prompt= is the beginning of a document) or "
      "--prompts=FILE; `ats-jax chat` is a dialogue."
    )
  if name:
    print(f"{name}:")
  turns = _turns(prompt)
  if turns is None:
    print(prompt, end="", flush=True)
    pieces = run.generate(seed, **given)
  else:
    pieces = run.answer(seed, turns, **given)
  for piece in pieces:
    print(piece, end="", flush=True)
  print(flush=True)


def _answer_all(
  run: "TrainedRun", given: dict[str, Any], name: str, prompts: "list[Prompt]"
) -> None:
  from ats_jax.inference.load import ROWS
  from ats_jax.verbs.prompts import answers

  sampling = Sampling.of(run.sampling(**given), _DRAWING.seed.value)
  if _CHAT.value:
    prompts = [p.asked(_system()) for p in prompts]
  requests = [Request(p.ids(run.tokenizer), sampling) for p in prompts]
  engine = run.engine(rows=min(ROWS, len(requests)))
  for row in answers(engine, prompts, requests):
    row |= {"adapter": name} if name else {}
    # In one piece with its end: between the two a Ctrl-C would leave half a line.
    print(f"{json.dumps(row, ensure_ascii=False)}\n", end="", flush=True)


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
