"""The audit's tables and figures on runs made up by hand; parts of a suite and their merging."""

import numpy as np
import pytest

from lab.faults.audit_table import audit_tables, figures
from lab.faults.results import Results, merged
from lab.faults.spread import merge_parts
from lab.faults.suite import AUDIT, COSTS, missing, part_file, stretch
from lab.faults.suite_tables import tables
from lab.faults.table import Board
from lab.faults.thresholds import AUDITED as CLAIMS


def record(arm, scenario, seed, loss, script=None, out=0, **more):
  domains = {"main": loss} | ({} if script is None else {"script": script})
  tokens = {"main": [9000, 0]} | ({} if script is None else {"script": [1000, out]})
  usual = {"rollbacks": 0, "cuts": 0, "stops": [], "decisions": [], "findings": [], "acted": 0,
           "skipped": 0, "replayed": 0, "updates": 400, "steps": 400, "hit": [], "said": [],
           "looks": 40, "looks_acted": 0, "weights": "same", "commit": "abc"}  # fmt: skip
  run = {"arm": arm, "scenario": scenario, "seed": seed, "loss": loss}
  return run | usual | {"domains": domains, "tokens": tokens} | more


FOUND = {"findings": [[100, "state", 0.9]], "hit": ["opt_state/1/mu/layers/1/attn/q"]}


def runs():
  made = []
  for seed, more in ((200, 0.0), (201, 0.01)):
    made += [
      record("clip", "clean", seed, 2.0),
      record("ours", "clean", seed, 2.0),
      record("clip", "minority_batch_10", seed, 2.1, 3.0),
      record("ours", "minority_batch_10", seed, 2.1 + more, 3.0 + 10 * more, 50, rollbacks=1),
      record("clip", "shuffled_targets", seed, 2.3),
      record("ours", "shuffled_targets", seed, 2.1 + more),
      record("clip", "flip_mu_b30", seed, 2.05, stops=[90]),
      record("ours", "flip_mu_b30", seed, 2.01 + more, **FOUND, said=["layers/1/attn/q is wrong"]),
      record("ours", "flip_mu_b31", seed, 2.5, **FOUND, said=["weights are wrong"]),
      record("clip", "flip_mu_b31", seed, 2.0),
      record("ours", "schedule_x30_forever", seed, 2.1 + more, cuts=1),
      record("ours", "schedule_x30_burst", seed, 2.2),
      record("clip", "long_clean", seed, 1.5),
      record("ours", "long_clean", seed, 1.5, looks=200, weights="same" if seed == 200 else "not"),
    ]
  return made


def test_the_figures():
  got = figures(Board(runs()), "ours")
  assert got.keys() == CLAIMS.keys()
  want = [0.5, 0.1, 2, -0.195, 0.5, 0.5, 0.105, 0.2, np.nan, 1, 0]
  np.testing.assert_allclose(list(got.values()), want, atol=1e-9)


def test_the_tables():
  text = audit_tables(runs(), "ours")
  lines = {tuple(x.strip() for x in line.split("|")[1:3]): line for line in text.splitlines()}
  cells = lambda *key: [x.strip() for x in lines[key].split("|")[3:-1]]
  assert "28 runs, seeds 200, 201" in text and "commit: abc" in text
  minority = cells("minority_batch_10", "ours")
  assert minority == ["0.005 / 0.010", "0.050 / 0.100", "0.500", "5.00", "2", "0", "0 of 2"]
  clip, ours = cells("mu, 30", "clip"), cells("mu, 30", "ours")
  assert clip[0] == "0.050 / 0.050" and clip[-1] == "2 of 2"
  assert ours[:4] == ["0.015 / 0.020", "0.015 / 0.020", "-0.035 / -0.030", "2 / 2"]
  assert cells("mu, 31", "ours")[3] == "0 / 2"
  assert cells("schedule_x30_forever", "ours")[-2:] == ["2", "0 of 2"]
  assert cells("long_clean", "ours")[2:5] == ["2; 1", "400", "0"]
  reached = {line.split("|")[1].strip(): line.split("|")[5].strip()
             for line in text.splitlines() if line.startswith(("| 1.", "| 2.", "| 3.", "| 4."))
             and line.count("|") == 6}  # fmt: skip
  assert reached["3. schedule x30 for good: over clip without, nats, mean"] == "must"
  assert reached["3. schedule x30 for 30 steps: over clip without, nats, mean"] == "missed"
  assert reached["3. schedule x30 from step 0: over clip without, nats, mean"] == "no runs"
  assert reached["1. noise and shuffles: over clip with the same, nats, worst mean"] == "goal"
  assert tables(runs(), "ours") == text


def test_what_was_lost_to_rollbacks():
  made = [record("rewind", "schedule_x30_burst", 200, 2.1, updates=370, skipped=5, replayed=3)]
  text = audit_tables([*made, *runs()], "ours")
  (line,) = [x for x in text.splitlines() if "| rewind" in x and "schedule_x30_burst" in x]
  assert line.split("|")[7].strip() == "22.0"


def test_parts_are_all_of_it(tmp_path):
  results = Results(tmp_path / "a.jsonl", "p")
  keys = missing(AUDIT, results)
  seed = AUDIT.seeds[0]
  assert ("oracle", "noise_burst", seed) in keys and ("oracle", "clean", seed) not in keys
  parts = [stretch(keys, part, 16) for part in range(16)]
  assert [key for part in parts for key in part] == keys
  assert all(len({arm for arm, _, _ in part}) <= 3 for part in parts)
  cost = [sum(COSTS.get(arm, 1.0) for arm, _, _ in part) for part in parts]
  assert max(cost) - min(cost) <= 4.0


def test_parts_are_merged(tmp_path):
  path = tmp_path / "a.jsonl"
  Results(path, "p").add(record("clip", "clean", 0, 2.0))
  for part in range(2):
    own = Results(part_file(path, part), "p")
    own.add(record("clip", "clean", part, 2.0 if part == 0 else 2.5))
    own.add(record("ours", "clean", part, 2.1))
  with part_file(path, 1).open("a") as file:
    file.write('{"torn')
  part_file(path, 1).with_name("a.jsonl.part1.log").write_text("words")
  merge_parts(path)
  lines = path.read_text().splitlines()
  assert len(lines) == 4 and all('"protocol": "p"' in line for line in lines)
  assert not part_file(path, 0).exists() and not part_file(path, 1).exists()
  assert Results(path, "p").records["clip", "clean", 1]["loss"] == 2.5


def test_files_are_read_together(tmp_path):
  first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
  Results(first, "p").add(record("clip", "clean", 0, 2.0))
  Results(second, "q").add(record("clip", "long_clean", 0, 2.0))
  assert len(merged([first, second])) == 2
  Results(second, "q").add(record("clip", "clean", 0, 2.0))
  with pytest.raises(ValueError, match=r"a.jsonl and .*b.jsonl both hold .*clean"):
    merged([first, second])
  with pytest.raises(ValueError, match="holds no runs"):
    merged([first, tmp_path / "c.jsonl"])
