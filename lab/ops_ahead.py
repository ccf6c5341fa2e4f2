r"""Which kernels compile for which GPU or TPU: each op tried in every implementation, none run.

Prints a line for each op, pass and implementation, and adds it to the table of --record. Beside
what the compiler says stands what the registry says of the device. Printed too, and not added, are
the FLOPs that XLA counts and the temporary arrays. A kernel that the registry
allows has to compile, else the exit code is 1. Those that it refuses are tried with --refused: the
compiler may end the process at an instruction that a GPU lacks. `lab.ahead` says what must be
installed; kernels_cuda needs nvcc.
Command: python -m lab.ops_ahead --gpu=A100 [--only=attention,rope] \
  [--refused] [--record=docs/lab/records/compiled_ops.csv]
"""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags

from ats_jax import exits
from ats_jax.config.schema import Config
from ats_jax.ops.implementations import OPS
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.verbs import cli
from ats_jax.verbs.bench.cases import Case, real_cases
from lab.ahead import DEVICES, device_of, pretending, topology
from lab.attention_cases import attention_case
from lab.compiled_program import add_line, commit

FIELDS = ("device", "op", "pass", "implementation", "compiles", "registry")
FIELDS += ("commit", "software", "date")
YES = "yes"
ANY_RUN = Config(moe=dataclasses.replace(Config().moe, num_experts=8, d_ff=1024))

_GPU = flags.DEFINE_enum("gpu", "H200", list(DEVICES), "Which GPU or TPU.")
_ONLY = flags.DEFINE_list("only", [], "Of these ops; [] = of all.")
_REFUSED = flags.DEFINE_bool("refused", False, "Try what the registry refuses too.")
_RECORD = flags.DEFINE_string("record", "", "Table (CSV) that gets the lines.")


def first_cases() -> list[Case]:
  """The first shape of each op."""
  of_op: dict[str, Case] = {}
  for case in (attention_case(2, 4096, 1), *real_cases()):
    of_op.setdefault(case.op, case)
  return list(of_op.values())


def try_all(
  case: Case, name: str, mesh: jax.sharding.Mesh, *, with_refused: bool = False
) -> Iterator[tuple[str, str, str, str, str]]:
  """Pass, implementation, what the compiler says, what is needed, what the registry says."""
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  for of_pass, work in case.passes.items():
    args = [
      jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), arg)
      for arg in jax.eval_shape(lambda of_pass=of_pass: case.arguments(of_pass, 0))
    ]
    said, needs = _said(case, of_pass, XLA, args)
    yield of_pass, "xla", said, needs, YES
    for kernel in OPS[case.op].kernels:
      if slots := [s for s in work.slots if s in kernel.where]:
        kernels = Kernels(tuple((f"{case.op}.{s}", kernel.name) for s in slots))
        allowed = kernel.obstacle(ANY_RUN, device_of(name)) or YES
        is_tried = allowed == YES or with_refused
        said, needs = _said(case, of_pass, kernels, args) if is_tried else ("not tried", "")
        yield of_pass, kernel.name, said, needs, allowed


def _said(case, of_pass, kernels, args) -> tuple[str, str]:
  try:
    made = jax.jit(case.compute(of_pass, kernels)).lower(*args).compile()
  except (ValueError, RuntimeError) as e:  # the answer; the next one goes on
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:160]}", ""
  temporary = made.memory_analysis().temp_size_in_bytes
  flops = made.cost_analysis().get("flops", 0.0)
  return YES, f"{flops / 1e12:.2f} TFLOP, {temporary / 2**30:.2f} GiB of temporary arrays"


def main(argv: list[str]) -> int:
  """Print what was found."""
  del argv
  name, wrong = _GPU.value, 0
  software = f"jax {jax.__version__}"
  with pretending(name), on_mesh(Config(), mesh := make_mesh(Config(), topology(name))):
    for case in first_cases():
      if _ONLY.value and case.op not in _ONLY.value:
        continue
      found = try_all(case, name, mesh, with_refused=_REFUSED.value)
      for of_pass, implementation, said, needs, allowed in found:
        print(
          f"{case.op}.{of_pass} {implementation}: {said}; registry: {allowed}; {needs}", flush=True
        )
        wrong += allowed == YES != said
        if _RECORD.value:
          of_op = (DEVICES[name].name, case.op, of_pass, implementation, said, allowed)
          made = (commit(), software, f"{datetime.date.today()}")
          row = dict(zip(FIELDS, (*of_op, *made), strict=True))
          add_line(Path(_RECORD.value), row)
  return exits.FAULT if wrong else exits.DONE


if __name__ == "__main__":
  cli.run(main)
