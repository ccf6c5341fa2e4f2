"""Continue a text with a trained run, streaming to the terminal.

python -m ats_jax generate --workdir=runs/debug --prompt='def main('
"""

import dataclasses
import os
import sys

from absl import flags

from ats_jax import cli, paths
from ats_jax.config.schema import MAX_SEED
from ats_jax.inference.generator import generate
from ats_jax.inference.load import load_run

_WORKDIR = cli.define_workdir_flag()
_STEP = cli.define_step_flag()
_PROMPT = flags.DEFINE_string(
  "prompt", None, "Text to continue (default: the run's sample.prompt)."
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Tokens at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 = the likeliest token.", lower_bound=0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Keep the k likeliest tokens; 0 = all.", lower_bound=0)
_TOP_P = flags.DEFINE_float("top_p", None, "Keep the likeliest that sum to p.", 0.0, 1.0)
_STOP = flags.DEFINE_string("stop", None, "Comma-separated texts that end the generation.")
_SEED = flags.DEFINE_integer(
  "seed", 0, "Of the draws: the same seed gives the same text.", 0, MAX_SEED
)


def main(argv: list[str]) -> None:
  """Print the prompt and its continuation."""
  del argv
  folder = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/debug"))
  given = {
    "prompt": _PROMPT.value,
    "max_tokens": _MAX_TOKENS.value,
    "temperature": _TEMPERATURE.value,
    "top_k": _TOP_K.value,
    "top_p": _TOP_P.value,
    "stop": _STOP.value,
  }
  try:
    (_PROMPT.value or "").encode()
  except UnicodeEncodeError as e:
    raise ValueError(f"--prompt is not UTF-8 at character {e.start}.") from e
  with load_run(folder, _STEP.value) as run:
    cfg = dataclasses.replace(
      run.program.cfg.sample, **{k: v for k, v in given.items() if v is not None}
    )
    try:
      print(cfg.prompt, end="", flush=True)
      pieces = generate(
        run.model,
        run.tokenizer,
        cfg,
        rules=run.program.rules(run.step),
        prompt=cfg.prompt,
        seed=_SEED.value,
      )
      for piece in pieces:
        print(piece, end="", flush=True)
      print(flush=True)
    except BrokenPipeError:  # a reader like `head` has enough; Python would flush again at its exit
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
  cli.run(main)
