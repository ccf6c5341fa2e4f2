"""Verbs of the command in the process of a test: what they print, and the errors that they raise.

Without a process there is no exit code and no `error: ` on stderr: `commands` has those.
"""

import contextlib
import importlib
import io


def printed_by(verb: str, *words: str) -> str:
  """What `ats-jax VERB WORDS` prints; it is printed as well.

  Raises:
    ValueError: where the command would say what is wrong, and exit.
  """
  commands = importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS
  word = words[0] if words and words[0] in commands else ""
  command, out = commands[word], io.StringIO()
  for flag in command.flags:  # what an earlier call has set
    command.flags[flag].unparse()
  rest = command.parse(f"{verb} {word}".strip(), [*words[bool(word) :]])
  try:
    with contextlib.redirect_stdout(out):
      command.main(rest)
  finally:
    print(out.getvalue().rstrip())
  return out.getvalue()
