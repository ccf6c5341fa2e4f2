import jax
import jax.numpy as jnp
import pytest

from ats_jax.metrics.profiler import ProfileWindow


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


def test_an_exception_or_the_end_of_the_run_closes_the_trace(tmp_path):
  with pytest.raises(KeyError), ProfileWindow(1, 3, tmp_path / "profile") as window:
    run(window, [1])
    raise KeyError
  assert len(traces(tmp_path)) == 1
  jax.profiler.start_trace(str(tmp_path / "other"))  # none is left running
  jax.profiler.stop_trace()


@pytest.mark.parametrize(("first", "steps"), [(0, range(1, 9)), (3, range(4, 9))])
def test_no_trace_when_off_or_when_the_run_resumed_later(first, steps, tmp_path):
  with ProfileWindow(first, 2, tmp_path / "profile") as window:
    run(window, steps)
  assert not (tmp_path / "profile").exists()


def test_a_window_without_steps_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="0 steps from step 5"):
    ProfileWindow(5, 0, tmp_path)
