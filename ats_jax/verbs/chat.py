"""Talk with a trained run in the terminal.

  ats-jax chat --workdir=runs/chat
  ats-jax chat --workdir=runs/chat --system='Be brief.' --temperature=0
  ats-jax chat --workdir=runs/chat --adapter=adapters/math

Turns are written as in training. Ctrl-C stops an answer, Ctrl-D or /quit ends. /reset forgets what
was said, /system TEXT says what the system says before it. --adapter names folders of peft: the run
answers alone, as base, then with each. What is not given is that of the run's own config
(`sample.*`).
"""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from absl import flags

from ats_jax.data.chat.conversation import Message, utf8
from ats_jax.inference.engine.request import Finished, Request, Sampling
from ats_jax.store import paths
from ats_jax.verbs import cli
from ats_jax.verbs.adapters import by_name, define_adapter_flag, each
from ats_jax.verbs.drawing import DrawingFlags

if TYPE_CHECKING:  # what imports jax is imported while the device starts
  from ats_jax.data.tokens.tokenizer import Tokenizer
  from ats_jax.inference.engine.engine import Engine

FLAGS = flags.FlagValues()
_DRAWING = DrawingFlags(FLAGS)
_ADAPTER = define_adapter_flag(FLAGS)
_SYSTEM = flags.DEFINE_string(
  "system", "", "What the system says before the first turn.", flag_values=FLAGS
)


def _system_turn(system: str) -> list[Message]:
  """The turn of the system, if it says anything."""
  return [Message("system", system)] if system else []


@dataclasses.dataclass
class Dialogue:
  """Turns so far, and what answers them.

  Attributes:
    engine: what answers.
    tokenizer: of the model.
    sampling: how answers are drawn.
    system: what the system says before all; "" = nothing.
    turns: those of user and assistant.
  """

  engine: "Engine"
  tokenizer: "Tokenizer"
  sampling: Sampling
  system: str = ""
  turns: list[Message] = dataclasses.field(default_factory=list)

  def say(self, text: str) -> Generator[str]:
    """The answer to a user's turn, piece by piece.

    Who stops to listen ends the answer; what came of it is the assistant's turn.

    Raises:
      ValueError: if the turn cannot be answered; it is as if it had not been said.
    """
    from ats_jax.data.chat.tokenizer import prompt_of

    turns = [*self.turns, Message("user", utf8(text, "the turn"))]
    request = Request(
      prompt_of(self.tokenizer, [*_system_turn(self.system), *turns]), self.sampling
    )
    number, answer = self.engine.submit(request), ""
    try:
      for event in self.engine.events():
        if event.id != number:  # what is left of an answer that was stopped
          continue
        if event.finished is Finished.REFUSED:
          raise ValueError(f"{event.message} (/reset forgets what was said.)")
        answer += event.text
        if event.text:
          yield event.text
    finally:
      self.engine.cancel(number)
      if answer:
        self.turns = [*turns, Message("assistant", answer)]


def talk(dialogues: Mapping[str, Dialogue], read: Callable[[], str]) -> None:
  """Answer what is said until there is no more.

  Args:
    dialogues: what was said before to each model, by its name, which is shown if it has one.
    read: gives a line; raises EOFError if there is none.
  """
  while True:
    try:
      line = read().strip()
      command, _, rest = line.partition(" ")
      if command == "/quit":
        return
      for name, dialogue in dialogues.items() if line else ():
        if command.startswith("/"):
          _obey(dialogue, command, rest.strip())
          continue
        if name:
          print(f"{name}:")
        _answer(dialogue, line)
    except EOFError:
      print(flush=True)
      return
    except KeyboardInterrupt:
      print(flush=True)
    except ValueError as error:
      print(f"error: {error}", file=sys.stderr, flush=True)


def _obey(dialogue: Dialogue, command: str, rest: str) -> None:
  """Do what begins with a slash."""
  if command == "/reset" and not rest:
    dialogue.turns = []
  elif command == "/system":
    dialogue.system = utf8(rest, "the turn")
  else:
    raise ValueError(f"no command {command!r}: there are /reset, /system TEXT and /quit.")


def _answer(dialogue: Dialogue, text: str) -> None:
  with contextlib.closing(dialogue.say(text)) as pieces:
    for piece in pieces:
      print(piece, end="", flush=True)
  print(flush=True)


def main(argv: list[str]) -> None:
  """Load the run, and talk."""
  del argv
  folder = paths.parse(cli.require(_DRAWING.workdir.value, "workdir", "runs/chat"))
  adapters = by_name(_ADAPTER.value)
  step, dtype, options = _DRAWING.step.value, _DRAWING.compute_dtype.value, _DRAWING.engine.value
  from ats_jax.inference.begin import begun

  with begun(folder, step), contextlib.ExitStack() as stack:
    from ats_jax.inference.load import load_run

    # A first turn that is short needs the same programs. A run that knows no turns is refused.
    turns = [*_system_turn(_SYSTEM.value), Message("user", "")]
    meanwhile = lambda run: run.compile(turns, **_DRAWING.given())
    run = stack.enter_context(load_run(folder, step, dtype, 1, options, meanwhile))
    sampling = Sampling.of(run.sampling(**_DRAWING.given()), _DRAWING.seed.value)
    if isinstance(sys.stdin, io.TextIOWrapper):
      sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused by line
    prompt = "> " if sys.stdin.isatty() else ""
    dialogues = {
      name: Dialogue(one.engine(rows=1), run.tokenizer, sampling, _SYSTEM.value)
      for name, one in each(run, folder, adapters)
    }
    talk(dialogues, lambda: input(prompt))


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
