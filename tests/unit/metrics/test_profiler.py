import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from ats_jax.metrics.profiler import (
  KernelTime,
  ProfileWindow,
  kernel_table,
  kernel_times,
  spans,
  summarise_trace,
  summary,
)


def run(window, steps):
  double = jax.jit(lambda x: x * 2)
  x = jnp.ones(4)
  for step in steps:
    window.before(step, x)
    x = double(x)


def traces(directory):
  return list(directory.glob("**/*.xplane.pb"))


def test_a_trace_of_the_window_is_written_once(tmp_path):
  window = ProfileWindow(2, 2, tmp_path / "profile")
  run(window, range(1, 4))
  assert traces(tmp_path) == []
  run(window, range(4, 7))  # step 4 is past the window: the trace ends
  assert len(traces(tmp_path)) == 1
  window.close()
  assert len(traces(tmp_path)) == 1


def test_traces_come_at_their_steps_and_say_what_they_came_to(tmp_path):
  """A window that is open when the next one is due goes on; a resumed run keeps the schedule."""
  run(window := ProfileWindow(2, 2, tmp_path, every=3), range(1, 7))
  window.close()
  run(window := ProfileWindow(2, 2, tmp_path, every=3), range(7, 9))
  window.close()
  files = sorted(tmp_path.glob("*/summary.json"))
  assert [path.parent.name for path in files] == ["2", "5", "8"]
  assert len(list(tmp_path.rglob("perfetto_trace.json.gz"))) == len(traces(tmp_path)) == 3
  facts = json.loads(files[1].read_text())
  assert facts == {"step": 5, "steps": 2, **summary(files[1].parent)}


def test_an_exception_or_the_end_of_the_run_closes_the_trace(tmp_path):
  with pytest.raises(KeyError), ProfileWindow(1, 3, tmp_path / "profile") as window:
    run(window, [1])
    raise KeyError
  assert len(traces(tmp_path)) == 1
  jax.profiler.start_trace(str(tmp_path / "other"))  # none is left running
  jax.profiler.stop_trace()


def test_no_trace(tmp_path):
  """When it is off, and when the run resumed behind it."""
  for first, steps in ((0, range(1, 9)), (3, range(4, 9))):
    with ProfileWindow(first, 2, tmp_path / "profile") as window:
      run(window, steps)
    assert not (tmp_path / "profile").exists()
  with pytest.raises(ValueError, match=r"no profiler trace .* log\.profile_step"):
    kernel_times(tmp_path)
  with pytest.raises(ValueError, match="0 steps from step 5"):
    ProfileWindow(5, 0, tmp_path)


def test_a_sort_that_takes_most_of_the_time_comes_first(tmp_path):
  f = jax.jit(lambda x: jnp.tanh(jnp.sort(x, axis=0)))
  x = np.random.default_rng(0).normal(size=(2000, 20))
  jax.block_until_ready(f(x))
  with jax.profiler.trace(str(tmp_path)):
    for _ in range(3):
      jax.block_until_ready(f(x))
  kernels = kernel_times(tmp_path)
  assert kernels[0].name.startswith("sort")
  assert kernels[0].calls % 3 == 0 and kernels[0].share > 0.5
  assert sum(k.share for k in kernels) == pytest.approx(1.0)
  assert [k.secs for k in kernels] == sorted((k.secs for k in kernels), reverse=True)


def test_the_table_sums_up_what_it_leaves_out():
  kernels = [KernelTime(f"k{i}", i, 0.001 * i, i / 6) for i in (3, 2, 1)]
  lines = kernel_table(kernels, rows=1).splitlines()
  assert lines[1].split() == ["50.0%", "3.00", "3", "k3"]
  assert lines[2].split() == ["50.0%", "3.00", "3", "2", "others"]


EVENT = "events {{ metadata_id: {name} offset_ps: {begin}000000 duration_ps: {length}000000 }}"


def write_trace(folder, streams):
  """A trace of one GPU: for each stream (name, begin, microseconds) of its kernels."""
  names = sorted({name for stream in streams for name, *_ in stream})
  metadata = [
    f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
    for i, name in enumerate(names, 1)
  ]
  lines = [
    f'lines {{ id: {i} name: "Stream #{i}(Compute)" '
    + " ".join(
      EVENT.format(name=names.index(name) + 1, begin=begin, length=length)
      for name, begin, length in stream
    )
    + " }"
    for i, stream in enumerate(streams, 1)
  ]
  text = f'planes {{ name: "/device:GPU:0" {" ".join([*metadata, *lines])} }}'
  folder.joinpath("t.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))


def test_a_collective_with_nothing_beside_it_is_exposed(tmp_path):
  computing = [("gemm", 0, 10), ("gemm", 12, 8), ("fusion", 40, 10)]
  sending = [("ncclDevKernel_AllGather", 5, 10), ("ncclDevKernel_ReduceScatter", 18, 12)]
  write_trace(tmp_path, [computing, sending])
  (span,) = spans(tmp_path)
  assert span.gpu == "/device:GPU:0"
  # 10 to 12 and 20 to 30 are exposed, and nothing runs from 30 to 40.
  microseconds = [round(1e6 * secs) for secs in span[1:]]
  assert microseconds == [50, 22, 12, 10]
  last = summarise_trace(tmp_path).splitlines()[-1]
  assert last == (
    "/device:GPU:0: 0.05 ms; collectives ran for 0.02 ms (44.0%), with nothing beside them for "
    "0.01 ms (24.0%); nothing ran for 0.01 ms (20.0%)"
  )


def test_without_collectives_there_is_a_table_alone(tmp_path):
  write_trace(tmp_path, [[("gemm", 0, 10), ("sort", 10, 30)]])
  assert spans(tmp_path)[0].sending == 0
  kernels = kernel_times(tmp_path)
  assert [(k.name, k.calls, k.share) for k in kernels] == [("sort", 1, 0.75), ("gemm", 1, 0.25)]
  assert summarise_trace(tmp_path) == kernel_table(kernels)
