"""Continue a text with a trained run, streaming to the terminal.

  ats-jax generate --workdir=runs/debug --prompt='def main('
  ats-jax generate --workdir=runs/debug --step=best --temperature=0 --max_tokens=100
  ats-jax generate --workdir=runs/chat --chat --prompt='What is a row?' --system='Be brief.'

With --chat the prompt is a user's turn, written as in training, and the answer ends by itself. What
is not given is that of the run's own config (`sample.*`).
"""

from absl import flags

from ats_jax.config.schema import MAX_SEED
from ats_jax.config.text import parse
from ats_jax.data.chat.conversation import Message
from ats_jax.inference.load import load_run
from ats_jax.store import paths
from ats_jax.verbs import cli

FLAGS = flags.FlagValues()
_WORKDIR = cli.define_workdir_flag(FLAGS)
_STEP = cli.define_step_flag(FLAGS)
_COMPUTE_DTYPE = cli.define_compute_dtype_flag(FLAGS)
_SAMPLING = (
  flags.DEFINE_string("prompt", None, "Text to continue.", flag_values=FLAGS),
  flags.DEFINE_integer("max_tokens", None, "Tokens at most.", lower_bound=1, flag_values=FLAGS),
  flags.DEFINE_float(
    "temperature", None, "0 = the likeliest token.", lower_bound=0, flag_values=FLAGS
  ),
  flags.DEFINE_integer(
    "top_k", None, "Keep the k likeliest tokens; 0 = all.", lower_bound=0, flag_values=FLAGS
  ),
  flags.DEFINE_float(
    "top_p", None, "Keep the likeliest that sum to p.", 0.0, 1.0, flag_values=FLAGS
  ),
  flags.DEFINE_string(
    "stop", None, "Comma-separated texts that end the generation.", flag_values=FLAGS
  ),
)
_CHAT = flags.DEFINE_boolean(
  "chat", False, "The prompt is what a user says; print the answer alone.", flag_values=FLAGS
)
_SYSTEM = flags.DEFINE_string(
  "system", "", "With --chat: what the system says before.", flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Of the draws: the same seed gives the same text.",
  0,
  MAX_SEED,
  flag_values=FLAGS,
)


def main(argv: list[str]) -> None:
  """Print the prompt and its continuation, or the answer to it."""
  del argv
  if _SYSTEM.value and not _CHAT.value:
    raise ValueError("--system is a turn of a conversation: it needs --chat.")
  folder = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/debug"))
  given = {
    flag.name: parse(f"sample.{flag.name}", flag.value, {})
    for flag in _SAMPLING
    if flag.value is not None
  }
  with load_run(folder, _STEP.value, _COMPUTE_DTYPE.value) as run:
    prompt = run.sampling(**given).prompt
    if _CHAT.value:
      system = [Message("system", _SYSTEM.value)] if _SYSTEM.value else []
      pieces = run.answer(_SEED.value, [*system, Message("user", prompt)], **given)
    else:
      print(prompt, end="", flush=True)
      pieces = run.generate(_SEED.value, **given)
    for piece in pieces:
      print(piece, end="", flush=True)
    print(flush=True)


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
