"""Every command: `python -m ats_jax VERB [flags]`; `python -m ats_jax VERB --help` says more.

Only the module of the verb that is asked for is imported.
"""

import difflib
import runpy
import sys

from ats_jax import __version__

# Verb -> module, words that go before the user's, what it does.
VERBS = {
  "train": ("train", (), "train a model, or go on with a run"),
  "launch": ("launch", (), "train with several processes on this machine"),
  "evaluate": ("evaluate", (), "loss of a trained run on its validation split or other text"),
  "generate": ("generate", (), "continue a text with a trained run"),
  "decisions": ("decisions", (), "what the orchestrator of a run saw and did, in words"),
  "forecast": ("forecast", (), "the final loss of a run that has begun"),
  "data": ("data", (), "figures and an audit of the training text"),
  "plan": ("plan", (), "parameters, FLOPs and memory of a config, or its token budget"),
  "bench": ("bench", (), "speed of a training step, or of settings in turn"),
  "tune": ("bench", ("tune",), "find the fastest tiles of the kernels on this GPU"),
}


def main() -> int:
  """Run a verb as `python -m ats_jax.MODULE` would."""
  asked = sys.argv[1:]
  if not asked or asked[0] in ("-h", "--help", "help"):
    print(__doc__)
    print("\n".join(f"  {verb:<10} {what}" for verb, (_, _, what) in VERBS.items()))
    return 0
  if asked == ["--version"]:
    print(f"ats_jax {__version__}")
    return 0
  verb, *rest = asked
  if verb not in VERBS:
    from ats_jax.launch import REFUSED  # here: as a verb, that module is run and not imported

    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(VERBS)}."
    print(f"error: no command {verb!r}. {hint}", file=sys.stderr)
    return REFUSED
  module, words, _ = VERBS[verb]
  sys.argv = [f"ats_jax {verb}", *words, *rest]
  runpy.run_module(f"ats_jax.{module}", run_name="__main__", alter_sys=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
