r"""Speed of the inference engine, with random weights or those of a run, one JSON line a case.

Cases: `one` continues one prompt of 256 tokens; `N` as many prompts of 1,024 tokens at once;
`requests` is 256 requests of 1,000 tokens in and 256 out; `first` is 32 prompts of 1,000 tokens at
once, and how long until the first token of each; `texts` continues one text after the other, with
prompts from the beginnings of files (`--texts`). Rates are of drawn tokens: while all texts are
drawn, and from the first request to the last token; `tokens_per_step` is how many a text has of a
step that goes on with it. Other prompts are distinct, of random bytes. With `--speculate` each case
runs without guesses and with them, of `--draft` if it is given, a model or a run; `same_texts` is
the share of texts that are equal, and `as_read` the tokens per step by lookup of a model that would
continue the files as they go on.
Command: python -m lab.decode_speed --model=1.5b [--cases=one,64,requests,first] \
  [--kernels=paged_attention=xla] [--pages=int8] [--tokens=256] [--layers=0] [--speculate=4] \
  [--tensor=2] [--expert=1] [--draft=toy]
  python -m lab.decode_speed --workdir=runs/debug --cases=texts --texts='docs/*.md' --speculate=4
"""

import contextlib
import dataclasses
import glob
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from ats_jax.cluster import runtime
from ats_jax.config import Config, base_config
from ats_jax.config.build import resolve
from ats_jax.config.extend import build
from ats_jax.config.tree import updated
from ats_jax.data.tokens.tokenizer import ByteTokenizer, Tokenizer
from ats_jax.inference.engine.draft_model import DraftModel
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.layout import Served
from ats_jax.inference.engine.lookup import PromptLookup
from ats_jax.inference.engine.options import PAGES
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, Size, served
from ats_jax.inference.engine.schedule import Draft, Step
from ats_jax.inference.generator import prompt_ids
from ats_jax.inference.load import load_run
from ats_jax.metrics.profiler import kernel_table, kernel_times
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.program import Program, make_program, new_base
from ats_jax.store import paths
from lab.runs import llama_8b

VOCAB = 128_256
MODELS = {
  "toy": {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128},
  "1.5b": {"num_layers": 16, "d_model": 2048, "num_heads": 32, "num_kv_heads": 8, "d_ff": 8192},
  "8b": llama_8b(32, 4096, VOCAB),
  "moe": {"num_layers": 24, "d_model": 2048, "num_heads": 16, "num_kv_heads": 4, "d_ff": 7168},
}
MODELS["mod"] = MODELS["1.5b"]
SETTINGS = {
  "moe": {"moe.num_experts": 8, "moe.top_k": 2, "moe.d_ff": 7168},
  "mod": {"mod.routing": "learned", "mod.capacity": 0.125},
}

_MODEL = flags.DEFINE_enum("model", "toy", list(MODELS), "Shape of the model.")
_CASES = flags.DEFINE_list("cases", ["one"], "What is measured.")
_TOKENS = flags.DEFINE_integer("tokens", 256, "Drawn of each prompt.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 0, "Tokens of a prompt in place of those of the case.")
_LAYERS = flags.DEFINE_integer("layers", 0, "In place of the model's; 0 = those.")
_KERNELS = flags.DEFINE_list("kernels", [], "OP=IMPLEMENTATION, as ops.kernels.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens of prompts that are read in a step.")
_PAGE = flags.DEFINE_integer("page", 64, "Tokens of a page.")
_PAGES = flags.DEFINE_enum("pages", "", ["", *PAGES], "In what they are stored.")
_SPECULATE = flags.DEFINE_integer("speculate", 0, "Tokens to guess at most.", 0)
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices that share each layer of a model.", 1)
_EXPERT = flags.DEFINE_integer("expert", 1, "Devices that share the experts of a model.", 1)
_DRAFT = flags.DEFINE_string("draft", "", "A model or a workdir whose model guesses.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Of a run, in place of a model.")
_TEXTS = flags.DEFINE_string("texts", "", "Files of which --cases=texts continues beginnings.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the draws.", 0.0)
_TRACE = flags.DEFINE_bool("trace", False, "Then print which kernels a run spends its time in.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Of each case, after one that compiles.")


def config(name: str) -> Config:
  """The config of a model in bfloat16."""
  vocab = VOCAB if _MODEL.value != "toy" else 512
  model = MODELS[name] | {"vocab_size": vocab}
  changed = {f"model.{name}": value for name, value in model.items()}
  changed |= {"model.num_layers": _LAYERS.value} if _LAYERS.value else {}
  changed |= SETTINGS.get(name, {})
  changed |= {"mesh.tensor": _TENSOR.value, "mesh.expert": _EXPERT.value}
  changed |= {"data.tokenizer": "bytes", "precision.param_dtype": "bfloat16"}
  changed |= {"precision.compute_dtype": "bfloat16"}
  changed |= {"ops.kernels": dict(item.split("=") for item in _KERNELS.value)}
  return build(updated(base_config().to_dict(), changed))


class Counted(ModelRunner):
  """A runner that counts how often a text goes on."""

  num_rows = 0

  def run(self, step: Step) -> Any:
    """As of `ModelRunner`."""
    self.num_rows += len(step.decode)
    return super().run(step)


def run(
  engine: Engine, runner: Counted, requests: list[Request]
) -> tuple[dict[str, float], list[list[int]]]:
  """Rates of some requests that come at once, and the tokens that were drawn."""
  before, began = runner.num_rows, time.perf_counter()
  numbers = [engine.submit(request) for request in requests]
  jobs, ids = {number: [] for number in numbers}, {number: [] for number in numbers}
  for event in engine.events():
    assert not event.message, event.message
    if event.ids:
      jobs[event.id].append(time.perf_counter())
      ids[event.id] += event.ids
  times = list(jobs.values())
  all_begun, one_ended = max(t[0] for t in times), min(t[-1] for t in times)
  drawn = [t for of in times for t in of]
  within = sum(all_begun < t <= one_ended for t in drawn)
  together = {}
  if one_ended > all_begun:  # else there is no time at which all texts are drawn
    together["while_all_draw"] = within / (one_ended - all_begun)
  rates = together | {
    "end_to_end": len(drawn) / (max(drawn) - began),
    "first_token_median": statistics.median(t[0] for t in times) - began,
    "tokens_per_step": (len(drawn) - len(times)) / (runner.num_rows - before),
  }
  return rates, list(ids.values())


def prompts(name: str, tokenizer: Tokenizer) -> tuple[list[list[int]], int, list[list[int]]]:
  """Prompts of a case, how many tokens are drawn of each, and how those from files go on."""
  number, length, drawn = {
    "one": (1, 256, _TOKENS.value),
    "requests": (256, 1000, _TOKENS.value),
    "first": (32, 1000, 4),
    "texts": (0, 256, _TOKENS.value),
  }.get(name) or (int(name), 1024, _TOKENS.value)
  length = _PROMPT.value or length
  if name == "texts":
    files = sorted(glob.glob(_TEXTS.value, recursive=True))
    end = length + drawn
    texts = [prompt_ids(tokenizer, Path(path).read_text("utf-8")[: 20 * end]) for path in files]
    long = [ids for ids in texts if len(ids) >= end]
    return [ids[:length] for ids in long], drawn, [ids[length:end] for ids in long]
  rng = np.random.default_rng(number * length)
  return rng.integers(0, 256, (number, length)).tolist(), drawn, []


def guesses(of_draft: ModelRunner | None, most: int) -> Draft:
  """What guesses: another model, or the text itself."""
  return PromptLookup(most) if of_draft is None else DraftModel(of_draft, most)


def as_read(draft: PromptLookup, texts: list[list[int]], rests: list[list[int]]) -> float:
  """Tokens per step if texts go on with `rests`."""
  steps = 0
  for number, (text, rest) in enumerate(zip(texts, rests, strict=True)):
    at = 1  # the prompt's step draws one
    while at < len(rest):
      guess = draft.guess({number: text + rest[:at]})[number][: len(rest) - at - 1]
      wrong = (i for i, token in enumerate(guess) if token != rest[at + i])
      at, steps = at + next(wrong, len(guess)) + 1, steps + 1
  return (sum(map(len, rests)) - len(rests)) / steps


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[Served, Program, Tokenizer, Pass]]:
  """A model of `MODELS` or of a workdir, packed, and what belongs to it."""
  if name not in MODELS:
    with load_run(paths.parse(name), devices=1) as loaded:
      program = loaded.program
      yield served(loaded.model, program), program, loaded.tokenizer, program.rules(loaded.step)
    return
  cfg = config(name)
  cfg = resolve(cfg, cfg.model.vocab_size)
  devices = jax.devices()[: _TENSOR.value * _EXPERT.value]
  with runtime.configured(cfg), on_mesh(cfg, make_mesh(cfg, devices)):
    program = make_program(cfg)
    model = jax.jit(lambda key: new_base(cfg, program.num, key))(jax.random.key(0))
    yield served(model, program), program, ByteTokenizer(), program.rules(1)


def main(argv: list[str]) -> None:
  """Measure each case."""
  del argv
  with opened(_WORKDIR.value or _MODEL.value) as (model, program, tokenizer, rules):
    cases = {name: prompts(name, tokenizer) for name in _CASES.value}
    size = Size(
      max(len(of[0]) + drawn for of, drawn, _ in cases.values()),
      max(len(of) for of, *_ in cases.values()),
      page=_PAGE.value,
      chunk=_CHUNK.value,
      narrow=_PAGES.value,
      guess=_SPECULATE.value,
    )
    of_draft: ModelRunner | None = None
    if _DRAFT.value:
      plain_size = dataclasses.replace(size, guess=0, narrow="")
      with opened(_DRAFT.value) as of_it:
        of_draft = ModelRunner(*of_it, plain_size)
    runner = Counted(model, program, tokenizer, rules, size)
    for name, (texts, drawn, rests) in cases.items():
      sampling = Sampling(max_tokens=drawn, temperature=_TEMPERATURE.value, ignore_end=True)
      requests, plain = [Request(ids, sampling) for ids in texts], list[list[int]]()
      for speculate in dict.fromkeys((0, _SPECULATE.value)):
        draft = guesses(of_draft, speculate) if speculate else None
        engine = Engine(runner, tokenizer, share=False, draft=draft)
        began = time.perf_counter()
        _, drawn_ids = run(engine, runner, requests)
        facts = {"first_run": round(time.perf_counter() - began, 1)}
        plain = plain or drawn_ids
        same = sum(map(list.__eq__, plain, drawn_ids)) / len(plain)
        found = [run(engine, runner, requests)[0] for _ in range(_REPEATS.value)]
        keys = [key for key in found[0] if all(key in f for f in found)]
        row = {key: round(statistics.median(f[key] for f in found), 4) for key in keys}
        row |= {"speculate": speculate, "same_texts": round(same, 3)} if _SPECULATE.value else {}
        if isinstance(draft, PromptLookup) and rests:
          row["as_read"] = round(as_read(draft, texts, rests), 3)
        row = {"model": _WORKDIR.value or _MODEL.value, "case": name} | row | facts
        row |= {"kernels": _KERNELS.value, "pages": _PAGES.value}
        row |= {"draft": _DRAFT.value} if speculate else {}
        row |= {"tensor": _TENSOR.value, "expert": _EXPERT.value}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(row), flush=True)
        if _TRACE.value:
          with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
              run(engine, runner, requests)
            print(kernel_table(kernel_times(Path(folder)), 30), flush=True)


if __name__ == "__main__":
  app.run(main)
