"""One job of two processes with two devices each, and what each of them sees in its stories."""

from pathlib import Path

import pytest
from processes import run_job
from two_processes import STORIES

from ats_jax.checkpoint import committed_steps
from ats_jax.store.shared_folder import CLOCK_SECS, skew

FOLDERS = Path(__file__).parent, Path(__file__).parents[1] / "unit" / "orchestrator"
CODE = """
from pathlib import Path
import two_processes
two_processes.tell(rank, Path(argv[0]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Where the job has been: a folder of each story, and lines of each process."""
  found = tmp_path_factory.mktemp("job")
  run_job(CODE, found, found, devices=2, path=FOLDERS)
  return found


@pytest.fixture
def told(folder):
  """Lines of both processes, by story."""
  lines = lambda name, rank: (folder / f"{name}.{rank}").read_text().splitlines()
  return {s.__name__: [lines(s.__name__, rank) for rank in (0, 1)] for s in STORIES}


def test_what_each_is_told_of_folders_and_clocks(folder, told):
  for rank, said in enumerate(told["folders_and_clocks"]):
    rest = [line for line in said if not line.startswith("logged: waiting to see what process 0")]
    # Process 1 sees all of what is slow late, so it says so at least once.
    assert len(rest) < len(said) or not rank
    assert rest.pop(0) == "claimed" and rest.pop(0) == "claimed"
    assert rest.pop(0).startswith("logged: the clock of process 1 is 100 s ahead of process 0's")
    assert rest.pop(0) == "claimed"
    head, line, advice = rest[-1].split("|")
    assert head == "what process 0 writes to the workdir is not seen by others:"
    place = folder / "folders_and_clocks" / "not shared" / "1" / "run_id"
    assert "process 1 on " in line and f": {place} is not there after 0 s" in line
    assert advice.endswith("need a --workdir on a file system that they share.")


@pytest.mark.parametrize(
  ("times", "found"),
  [
    ([10.0, 10.0 + CLOCK_SECS], {}),
    ([10.0, 17.0, 10.5, 3.0], {1: 7.0, 3: -7.0}),
  ],
)
def test_how_far_clocks_are_ahead(times, found):
  assert skew(times) == found


def test_a_difference_in_the_last_digit_is_caught_on_both(told):
  differ = "processes see or decide differently"
  for said in told["agreement"]:
    assert said == [
      "same agreed", f"memory {differ} ", f"reading {differ} ", f"decision {differ} ",
      "same again agreed",
    ]  # fmt: skip


def test_they_save_together_and_agree_on_run_and_step(folder, told):
  first, second = told["checkpoints"]
  place = folder / "checkpoints"
  runs = {line for lines in (first[:2], second[:2]) for line in lines}
  assert runs == {f"run {(place / 'run' / 'run_id').read_text().strip()}"}
  no_checkpoint = "error no intact checkpoint for step 'latest':"
  assert first[2:] == ["restored 2 2", no_checkpoint, "stop SIGTERM"]
  no_checkpoint = "error process 0 found no usable checkpoint; it"
  assert second[2:] == ["restored 2 2", no_checkpoint, "stop SIGTERM"]
  assert committed_steps(place) == [1, 2]
  assert (place / "3.damaged").is_dir()


def test_what_each_has_of_layers_rows_and_experts(told):
  assert told["stages"] == [["restored"], ["restored"]]
  assert told["positions"] == [["[0, 2]"], ["[4, 6]"]]
  assert told["hosts"] == [["hosts 2"], ["hosts 2"]]


def test_parts_of_snapshots(told):
  """Replicas: a lost or damaged part comes from the peer. Halves: an older one, or none."""
  for rank, said in enumerate(told["snapshots"]):
    found = [line for line in said if not line.startswith("logged")]
    two, one = "(2, {'rank': 0})", "(1, {'rank': 0})"
    assert found == [
      f"both {two}", f"one lost {two}", f"one damaged {two}", f"all of one lost {two}",
      "nothing is newer None",
      f"both {two}", f"one lost {one}", f"one damaged {one}", "all of one lost None",
      "nothing is newer None",
    ]  # fmt: skip
    got = [line for line in said if "of this process is gone" in line]
    assert len(got) == (3 if rank else 0)
