r"""The fastest way to run a config here: every combination of some settings, each timed.

  ats-jax bench sweep --try=step.accum_steps=1,2
  ats-jax bench sweep --config=dense_1_5b --try=step.remat=dots,names,full \
    --try=step.scan_unroll=1,4 --try=precision.fp8=false,true --steps=10 --out=runs/sweep
  ats-jax bench sweep --try=config=dense_1_5b,llama_7b --try=mesh.fsdp=1,4 --out=runs/mfu

Each candidate is `ats-jax bench` in a process of its own: one that is out of memory
or does not compile is a row of the table. Those that cannot fit are left out before they are
compiled, or before they run. The best is that with the most model FLOPs a second, which for
one model is the most tokens a second. The last command is for the MFU of sizes on meshes. Prints
the table and the flags that the best one needs; --out keeps sweep.md, and sweep.jsonl, to which
each candidate is added as it ends.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags, logging

from ats_jax.config.file import load_file
from ats_jax.config.names import all_settings
from ats_jax.config.text import parse_as, text_of
from ats_jax.config.tree import updated
from ats_jax.verbs import cli
from ats_jax.verbs.bench import step

CONFIG = "config"  # tried like a setting
DEFAULT_TRIES = ("step.remat=dots,names,full", "step.accum_steps=1,2")
_ERROR = re.compile(r"^(?:error: (.*)|([\w.]+Error: .*))$", re.MULTILINE)  # ours, or a traceback's
_COLUMNS = {
  "tokens/s": ("tokens_per_sec", "{:,.0f}", 1),
  "ms": ("step_secs", "{:,.1f}", 1e3),
  "model TFLOP/s": ("model_flops_per_sec", "{:,.2f}", 1e-12),
  "mfu": ("mfu", "{:.1%}", 1),
  "GiB planned": ("memory/planned_gib", "{:,.2f}", 1),
  "compiled": ("memory/predicted_gib", "{:,.2f}", 1),
  "used": ("memory/device_peak_gib", "{:,.2f}", 1),
  "compile s": ("compile_secs", "{:,.1f}", 1),
}


class Candidate(NamedTuple):
  """One combination.

  Attributes:
    changes: settings by dotted name.
    found: what `bench step` printed; empty if it failed.
    error: why it has no figures; "" if it has.
  """

  changes: dict[str, Any]
  found: dict[str, Any]
  error: str


def parse_tries(tries: list[str]) -> dict[str, list[Any]]:
  """["step.remat=dots,full"] -> {"step.remat": ["dots", "full"]}, of the settings' types.

  Raises:
    ValueError: for what is neither a setting nor `config`, or none of its values.
  """
  known, found = all_settings(), {}
  for text in tries:
    name, _, values = text.partition("=")
    if name == CONFIG and values:
      found[name] = values.split(",")
      continue
    if name not in known or not values:
      raise ValueError(f"--try={text}: expected SETTING=VALUE,VALUE, such as {DEFAULT_TRIES[0]}.")
    kind = known[name][0].field.type
    found[name] = [parse_as(kind, value, name) for value in values.split(",")]
  return found


def combinations(tries: dict[str, list[Any]]) -> list[dict[str, Any]]:
  """Every choice of one value for each setting."""
  return [dict(zip(tries, values, strict=True)) for values in itertools.product(*tries.values())]


def measure(
  config: dict[str, Any], changes: dict[str, Any], options: list[str], limit: int
) -> Candidate:
  """Run `bench step` with some settings changed.

  Args:
    config: nested values, those of a config to try among them.
    changes: settings by dotted name.
    options: other flags of `bench step`.
    limit: seconds after which it is given up.
  """
  settings = {name: value for name, value in changes.items() if name != CONFIG}
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "candidate.py")
    file.write_text(
      "from ats_jax.config.tree import edited\n"
      f"def get_config():\n  return edited({updated(config, settings)!r})\n",
      encoding="utf-8",
    )
    command = [sys.executable, "-m", "ats_jax", "bench", f"--config={file}", *options]
    try:
      done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
      return Candidate(changes, {}, f"given up after {limit} s (--limit_secs)")
  if done.returncode == 0:
    return Candidate(changes, json.loads(done.stdout.splitlines()[-1]), "")
  return Candidate(changes, {}, reason(done.stderr) or f"ended with {done.returncode}")


def reason(stderr: str) -> str:
  """The last error that a process wrote."""
  found = _ERROR.findall(stderr)
  return "".join(found[-1]) if found else ""


def best(candidates: list[Candidate]) -> Candidate | None:
  """The one with the most model FLOPs a second; None if none ran."""
  ran = [c for c in candidates if c.found]
  return max(ran, key=lambda c: c.found["model_flops_per_sec"], default=None)


def table(candidates: list[Candidate]) -> str:
  """A table in Markdown, the best in bold."""
  winner, names = best(candidates), list(candidates[0].changes)
  columns = {
    title: of
    for title, of in _COLUMNS.items()
    if any(c.found.get(of[0]) is not None for c in candidates)
  }
  lines = [[*names, *columns, ""], ["---"] * len(names) + ["--:"] * len(columns) + ["---"]]
  for c in candidates:
    cells = [text_of(value) for value in c.changes.values()]
    if c is winner:
      cells = [f"**{cell}**" for cell in cells]
    for key, form, scale in columns.values():
      value = c.found.get(key)
      cells.append("" if value is None else form.format(scale * value))
    lines.append([*cells, c.error.replace("|", "/")[:200]])
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_flags(changes: dict[str, Any]) -> str:
  """What to add to a command line."""
  flag = lambda name: "--config" if name == CONFIG else f"--config.{name}"
  return " ".join(f"{flag(name)}={text_of(value)}" for name, value in changes.items())


FLAGS = flags.FlagValues()
_CONFIG, _OPTIONS = step.define_flags(FLAGS)
_TRIES = flags.DEFINE_multi_string(
  "try",
  list(DEFAULT_TRIES),
  "A setting and the values to try, e.g. step.remat=dots,full; may come several times. So may "
  "configs: config=NAME,NAME.",
  flag_values=FLAGS,
)
_LIMIT = flags.DEFINE_integer(
  "limit_secs", 900, "Longest time of a candidate.", lower_bound=1, flag_values=FLAGS
)
_OUT = flags.DEFINE_string(
  "out", "", "Folder for sweep.md and sweep.jsonl; must be new or empty.", flag_values=FLAGS
)


def main(argv: list[str]) -> None:
  """Print the table and the best one's flags."""
  del argv
  tries = parse_tries(_TRIES.value)
  of_name = lambda name: _CONFIG.applied(load_file(name).to_dict())
  configs = {name: of_name(name) for name in tries.get(CONFIG, [])}
  usual = {} if configs else _CONFIG.nested()
  out = Path(_OUT.value) if _OUT.value else None
  if out is not None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
      raise ValueError(f"--out={out} is not empty. Name another folder.")
  options = [f"--{flag.name}={flag.value}" for flag in _OPTIONS]
  todo, done = combinations(tries), []
  for number, changes in enumerate(todo, 1):
    config = configs[changes[CONFIG]] if configs else usual
    candidate = measure(config, changes, options, _LIMIT.value)
    done.append(candidate)
    speed = f"{candidate.found['tokens_per_sec']:,.0f} tokens/s" if candidate.found else ""
    logging.info("%d of %d, %s: %s", number, len(todo), as_flags(changes), speed or candidate.error)
    if out is not None:
      with (out / "sweep.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(candidate._asdict()) + "\n")
  winner = best(done)
  verdict = f"best: {as_flags(winner.changes)}" if winner else "none of them ran"
  text = f"{table(done)}\n\n{verdict}"
  if winner:
    text = f"{winner.found['device']}, jax {winner.found['jax']}:\n\n{text}"
  if out is not None:
    (out / "sweep.md").write_text(text + "\n", encoding="utf-8")
  print(text)


COMMAND = cli.Command(main, FLAGS, __doc__)
