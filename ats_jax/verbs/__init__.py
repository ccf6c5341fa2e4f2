"""The command line: the table of verbs, each of which is a module of this package.

The verb NAME is run by `ats_jax/verbs/NAME.py`, whose COMMANDS maps the word behind the verb (""
if there is none) to a `cli.Command`. `main` imports the module of the requested verb only, and this
file imports nothing heavy, so `ats-jax --help` answers at once.
"""

import importlib
import sys
from typing import NamedTuple

from ats_jax import __version__


class Verb(NamedTuple):
  """A row of the table of verbs.

  Attributes:
    group: the key in `GROUPS` of the heading under which `--help` lists the verb.
    summary: what the verb does, as the rest of its line of `--help`.
  """

  group: str
  summary: str


VERBS = {
  "train": Verb("train", "train a model, or go on with a run"),
  "finetune": Verb("train", "train a model on conversations, with settings chosen for it"),
  "launch": Verb("train", "train with several processes, here or on a cluster"),
  "evaluate": Verb("use", "loss of a trained run on held-out or other text"),
  "generate": Verb("use", "continue a text, or many, with a trained run"),
  "chat": Verb("use", "talk with a trained run in the terminal"),
  "decisions": Verb("watch", "what the orchestrator of a run saw and did, in words"),
  "report": Verb("watch", "what happened in runs, and how they compare, as one page"),
  "compare": Verb("watch", "variants of a config, trained with several seeds at equal cost"),
  "forecast": Verb("watch", "the final loss of a run that has begun"),
  "bridge": Verb("use", "weights from and to Hugging Face, and how equal they are"),
  "plan": Verb("plan", "parameters, FLOPs and memory of a config, or its token budget"),
  "check_env": Verb("plan", "what this machine is, and whether a run would do well on it"),
  "config": Verb("plan", "a config's settings, two compared, one imported"),
  "data": Verb("plan", "check, prepare, measure and audit the training text"),
  "bench": Verb("speed", "speed of a training step, or of settings in turn"),
  "tune": Verb("speed", "find the fastest tiles of the kernels on this GPU"),
}
GROUPS = {
  "train": "Train",
  "use": "Use a trained run",
  "watch": "Watch a run",
  "plan": "Before a run",
  "speed": "Speed",
}


def listing() -> str:
  """Return the text of `ats-jax --help`: the verbs by group, and which one to begin with."""
  lines = ["ats-jax VERB [--flag=value ...]; `ats-jax VERB --help` says more. Begin: ats-jax train"]
  for group, title in GROUPS.items():
    lines += ["", title]
    lines += [f"  {name:<10} {v.summary}" for name, v in VERBS.items() if v.group == group]
  return "\n".join(lines)


def main() -> int:
  """Run the verb that the command line names, and return the exit code of the process."""
  verb, *rest = sys.argv[1:] or ["--help"]
  if verb in ("-h", "--help", "help"):
    print(listing())
    return 0
  if verb == "--version":
    print(f"ats_jax {__version__}")
    return 0
  from ats_jax.verbs import cli  # here: `--help` does not wait for its imports

  if verb not in VERBS:
    near = cli.nearest(verb, VERBS)
    hint = f"Did you mean {near}?" if near else f"There are {', '.join(VERBS)}."
    print(f"error: no command {verb!r}. {hint}", file=sys.stderr)
    return cli.exits.REFUSED
  with cli.user_errors():
    commands = importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS
  return cli.dispatch(verb, commands, rest)
