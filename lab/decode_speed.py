r"""Speed of the inference engine with random weights, one JSON line a case.

Cases: `one` continues one prompt of 256 tokens; `N` as many prompts of 1,024 tokens at once;
`requests` is 256 requests of 1,000 tokens in and 256 out; `first` is 32 prompts of 1,000 tokens at
once, and how long until the first token of each. Rates are of drawn tokens: while all texts are
drawn, and from the first request to the last token. Prompts are distinct, of random bytes.
Command: python -m lab.decode_speed --model=1.5b [--cases=one,64,requests,first] \
  [--kernels=paged_attention=xla] [--pages=int8] [--tokens=256] [--layers=0]
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from ats_jax.cluster import runtime
from ats_jax.config import Config, base_config
from ats_jax.config.build import resolve
from ats_jax.config.extend import build
from ats_jax.config.tree import updated
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.engine.engine import Engine
from ats_jax.inference.engine.request import Request, Sampling
from ats_jax.inference.engine.runner import ModelRunner, Size, served
from ats_jax.metrics.profiler import kernel_table, kernel_times
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.program import make_program, new_base
from lab.runs import llama_8b

VOCAB = 128_256
MODELS = {
  "toy": {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128},
  "1.5b": {"num_layers": 16, "d_model": 2048, "num_heads": 32, "num_kv_heads": 8, "d_ff": 8192},
  "8b": llama_8b(32, 4096, VOCAB),
  "moe": {"num_layers": 24, "d_model": 2048, "num_heads": 16, "num_kv_heads": 4, "d_ff": 7168},
}
EXPERTS = {"num_experts": 8, "top_k": 2, "d_ff": 7168}

_MODEL = flags.DEFINE_enum("model", "toy", list(MODELS), "Shape of the model.")
_CASES = flags.DEFINE_list("cases", ["one"], "What is measured.")
_TOKENS = flags.DEFINE_integer("tokens", 256, "Drawn of each prompt.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 0, "Tokens of a prompt in place of those of the case.")
_LAYERS = flags.DEFINE_integer("layers", 0, "In place of the model's; 0 = those.")
_KERNELS = flags.DEFINE_list("kernels", [], "OP=IMPLEMENTATION, as ops.kernels.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens of prompts that are read in a step.")
_PAGE = flags.DEFINE_integer("page", 64, "Tokens of a page.")
_PAGES = flags.DEFINE_enum("pages", "", ["", "int8", "fp8"], "In what they are stored.")
_TRACE = flags.DEFINE_bool("trace", False, "Then print which kernels a run spends its time in.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Of each case, after one that compiles.")


def config() -> Config:
  """The config of the model in bfloat16."""
  vocab = VOCAB if _MODEL.value != "toy" else 512
  model = MODELS[_MODEL.value] | {"vocab_size": vocab}
  changed = {f"model.{name}": value for name, value in model.items()}
  changed |= {"model.num_layers": _LAYERS.value} if _LAYERS.value else {}
  if _MODEL.value == "moe":
    changed |= {f"moe.{name}": value for name, value in EXPERTS.items()}
  changed |= {"data.tokenizer": "bytes", "precision.param_dtype": "bfloat16"}
  changed |= {"precision.compute_dtype": "bfloat16"}
  changed |= {"ops.kernels": dict(item.split("=") for item in _KERNELS.value)}
  return build(updated(base_config().to_dict(), changed))


def prompts(number: int, length: int) -> list[list[int]]:
  """Distinct prompts."""
  rng = np.random.default_rng(number * length)
  return rng.integers(0, 256, (number, length)).tolist()


def run(engine: Engine, requests: list[Request]) -> dict[str, float]:
  """Rates of some requests that come at once."""
  began = time.perf_counter()
  jobs = {engine.submit(request): [] for request in requests}
  for event in engine.events():
    assert not event.message, event.message
    if event.ids:
      jobs[event.id].append(time.perf_counter())
  times = list(jobs.values())
  all_begun, one_ended = max(t[0] for t in times), min(t[-1] for t in times)
  drawn = [t for of in times for t in of]
  within = sum(all_begun < t <= one_ended for t in drawn)
  together = {}
  if one_ended > all_begun:  # else there is no time at which all texts are drawn
    together["while_all_draw"] = within / (one_ended - all_begun)
  return together | {
    "end_to_end": len(drawn) / (max(drawn) - began),
    "first_token_median": statistics.median(t[0] for t in times) - began,
  }


def case(name: str) -> tuple[int, int, int]:
  """How many prompts of how many tokens, and how many are drawn."""
  if name == "one":
    return 1, _PROMPT.value or 256, _TOKENS.value
  if name == "requests":
    return 256, _PROMPT.value or 1000, _TOKENS.value
  if name == "first":
    return 32, _PROMPT.value or 1000, 4
  return int(name), _PROMPT.value or 1024, _TOKENS.value


def main(argv: list[str]) -> None:
  """Measure each case."""
  del argv
  cfg = config()
  cfg = resolve(cfg, cfg.model.vocab_size)
  with runtime.configured(cfg), on_mesh(cfg, make_mesh(cfg, jax.devices()[:1])):
    program = make_program(cfg)
    cases = {name: case(name) for name in _CASES.value}
    context = max(length + drawn for _, length, drawn in cases.values())
    size = Size(
      context,
      max(number for number, *_ in cases.values()),
      page=_PAGE.value,
      chunk=_CHUNK.value,
      narrow=_PAGES.value,
    )
    model = jax.jit(lambda key: new_base(cfg, program.num, key))(jax.random.key(0))
    runner = ModelRunner(
      served(model, program), program, ByteTokenizer(), program.rules(1), size
    )  # fmt: skip
    del model
    for name, (number, length, drawn) in cases.items():
      engine = Engine(runner, ByteTokenizer(), share=False)
      sampling = Sampling(max_tokens=drawn, temperature=0.0, ignore_end=True)
      requests = [Request(ids, sampling) for ids in prompts(number, length)]
      began = time.perf_counter()
      run(engine, requests)
      compiled = time.perf_counter() - began
      found = [run(engine, requests) for _ in range(_REPEATS.value)]
      keys = [key for key in found[0] if all(key in f for f in found)]
      row = {key: round(statistics.median(f[key] for f in found), 4) for key in keys}
      facts = {"model": _MODEL.value, "case": name}
      facts |= {"kernels": _KERNELS.value, "pages": _PAGES.value}
      device = jax.devices()[0].device_kind
      row |= {"first_run": round(compiled, 1), "device": device, "jax": jax.__version__}
      print(json.dumps(facts | row), flush=True)
      if _TRACE.value:
        with tempfile.TemporaryDirectory() as folder:
          with jax.profiler.trace(folder):
            run(engine, requests)
          print(kernel_table(kernel_times(Path(folder)), 30), flush=True)


if __name__ == "__main__":
  app.run(main)
