"""Measure tile parameters of kernels on the GPU at hand, and rewrite its tables.

  ats-jax tune
  ats-jax tune --only=grouped_matmul,routing

For each kernel, slot and shape of `cases.py`: one tile parameter after the other is varied, the
fastest kept; then the fastest kernel is compared with XLA. The tables go into the repository;
commit them.
"""

import json
from collections.abc import Mapping, Sequence

import jax
from absl import flags, logging

from ats_jax.config.schema import Config
from ats_jax.ops import implementations, registry
from ats_jax.ops.implementations import Kernel
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.ops.requirements import this_device
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.verbs import cli
from ats_jax.verbs.bench.cases import Case, real_cases, toy_cases
from ats_jax.verbs.bench.measure import device_secs, relative_errors

MAX_ERROR = 1e-2  # of a tiling against XLA; both round to bfloat16
MIN_GAIN = 1.02  # over the default tiles or XLA: less is noise

FLAGS = flags.FlagValues()
_ONLY = flags.DEFINE_list("only", [], "Ops to tune; all without it.", flag_values=FLAGS)
_TOY = flags.DEFINE_bool("toy", False, "Tiny shapes: tests the command.", flag_values=FLAGS)


def tune_case(case: Case, kernels: tuple[Kernel, ...]) -> dict[str, dict]:
  """Slot -> {implementation, tiles, ms, xla_ms}: the fastest in each slot at this shape."""
  best = {}
  for pass_name, of_pass in case.passes.items():
    (slot,) = of_pass.slots
    fitting = [k for k in kernels if slot in k.where]
    if not fitting:
      continue
    args = case.arguments(pass_name, seed=0)
    f = case.compute(pass_name, XLA)
    want, xla_secs = jax.jit(f)(*args), device_secs(f, args, feed=case.feed)
    entry = {"implementation": "xla", "tiles": {}, "ms": 1e3 * xla_secs, "xla_ms": 1e3 * xla_secs}
    for kernel in fitting:

      def secs(tiles, kernel=kernel, slot=slot, pass_name=pass_name, args=args, want=want):
        return _secs(case, pass_name, slot, kernel, tiles, args, want)

      tiles, found = search(kernel.tiles, secs)
      logging.info("%s.%s %s: %s %s %.4f ms", case.op, slot, case.shape, kernel.name, tiles, found)
      if found * MIN_GAIN < entry["ms"]:
        entry |= {"implementation": kernel.name, "tiles": tiles, "ms": found}
    best[slot] = entry
  return best


def search(choices: Mapping[str, tuple[int, ...]], ms) -> tuple[dict[str, int], float]:
  """Vary one parameter after the other from the defaults; `ms(tiles)` is inf where they fail."""
  tiles = {name: values[0] for name, values in choices.items()}
  best = ms(tiles)
  for name, values in choices.items():
    for value in values[1:]:
      trial = tiles | {name: value}
      found = ms(trial)
      if found * MIN_GAIN < best:
        tiles, best = trial, found
  return tiles, best


def _secs(case, pass_name, slot, kernel, tiles, args, want) -> float:
  chosen = Kernels(((f"{case.op}.{slot}", kernel.name),), tiles=tuple(tiles.items()))
  f = case.compute(pass_name, chosen)
  try:
    once = jax.jit(f).lower(*args).compile()
    errors = relative_errors(once(*args), want)
    if not max(errors) < MAX_ERROR:
      logging.warning("%s %s %s: WRONG, errors %s", case.op, slot, tiles, errors)
      return float("inf")
    return 1e3 * device_secs(f, args, once, case.feed)
  except (ValueError, RuntimeError) as e:  # tiles that do not fit this shape or the device
    logging.info("%s %s %s: %s", case.op, slot, tiles, str(e).splitlines()[0][:120])
    return float("inf")


def write(kind: str, op: str, shape: str, found: Mapping[str, dict]) -> None:
  """Put what was found at a shape class, slot -> entry, into the op's table; other shapes stay."""
  path = registry.tuning_file(kind, op)
  tables = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
  for slot, entry in found.items():
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}
    tables.setdefault(slot, {})[shape] = rounded | {"jax": jax.__version__}
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(tables, indent=2, sort_keys=True) + "\n", encoding="utf-8")
  logging.info("wrote %s", path)


def one_of_each(cases: Sequence[Case]) -> list[tuple[str, Case]]:
  """With its shape class, the first case of each class and set of passes.

  Uneven groups and empty ones share a class: the first one decides.
  """
  first = {}
  for case in cases:
    shape = registry.shape_class(**case.dims)
    first.setdefault((shape, *case.passes), (shape, case))
  return list(first.values())


def main(argv: list[str]) -> None:
  """Tune every op that has a kernel for this device."""
  del argv
  if unknown := sorted(set(_ONLY.value) - set(implementations.OPS)):
    raise ValueError(f"--only={','.join(unknown)}: no such op; {', '.join(implementations.OPS)}.")
  device = this_device()
  mesh = jax.make_mesh((1,) * len(MESH_AXES), MESH_AXES, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    for op, entry in implementations.OPS.items():
      if _ONLY.value and op not in _ONLY.value:
        continue
      obstacles = {k.name: k.obstacle(Config(), device) for k in entry.kernels}
      for name, obstacle in obstacles.items():
        if obstacle:
          logging.info("%s: not %s, %s", op, name, obstacle)
      fitting = tuple(k for k in entry.kernels if not obstacles[k.name])
      cases = [c for c in (toy_cases() if _TOY.value else real_cases()) if c.op == op]
      for shape, case in one_of_each(cases) if fitting else []:
        write(device.kind, op, shape, tune_case(case, fitting))  # now: a later case may fail


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
