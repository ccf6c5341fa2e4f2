"""One more action is one class: asked for, checked, done, told and replayed, with no more.

The class is the one that docs/guides/orchestrator.md shows.
"""

import dataclasses
import re
from pathlib import Path

import canonical
import numpy as np
import pytest
from helpers import counting_rows, micro_batches

from ats_jax.orchestrator import actions, hooks
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.supervisor import Supervisor

DOC = Path(__file__).parents[3] / "docs" / "guides" / "orchestrator.md"
CFG = canonical.config("dense", canonical.SUPERVISED)


@pytest.fixture
def action():
  """The class of the documentation; forgotten after the test."""
  (code,) = re.findall(r"```python\n(# ats_jax/orchestrator/actions/.*?)```", DOC.read_text(), re.S)
  names = {}
  exec(code, names)
  yield names["ScaleWeights"]
  del actions.KINDS["ScaleWeights"]


def test_a_new_action_goes_all_the_way(mesh, tmp_path, action):
  program, path = canonical.program(CFG), tmp_path / "decisions.jsonl"
  state, probe = canonical.state(CFG), counting_rows(10**6)
  supervisor, heads = Supervisor(program, probe, path), {}
  supervisor.start(0, state)
  hook = hooks.register(lambda look: action(8.0) if look.step == 16 else None)
  try:
    for step in range(1, 80):
      batch = micro_batches(counting_rows(step), 1)
      state, metrics = program.train_step(state, batch, program.training_rules(step))
      before = np.asarray(state.model.embed.weight[...])
      state = supervisor.after(step, state, metrics)
      heads[step] = np.asarray(state.model.embed.weight[...]) / before
  finally:
    hooks.unregister(hook)
  supervisor.close()
  scaled = {step: by for step, by in heads.items() if not (by == 1.0).all()}
  (done,), made = scaled, supervisor.decisions  # at the look after the one that asked for it
  np.testing.assert_allclose(scaled[done], 8.0, rtol=1e-6)
  assert made == ledger.decisions(path) == ledger.replay(path)
  assert [(step, d.action, d.cause) for step, d in made] == [(done, action(8.0), "request")]
  story = "\n".join(tell(path))
  assert "decision 0: weights times 8 because of request" in story


def test_what_it_cannot_do_is_refused(action):
  with pytest.raises(ValueError, match=r"scaled by 0\.0; use a positive factor"):
    action(0.0).check(CFG)


def test_the_table_of_the_documentation_names_all_actions():
  text = DOC.read_text()
  table = text[text.index("## The actions\n") :].split("\n## ")[0]
  named = {row.split("(")[0] for row in re.findall(r"^\| `(\w+\(?)", table, re.M)}
  assert named == set(actions.KINDS)


def test_a_kind_is_a_frozen_dataclass_with_words():
  for kind in actions.KINDS.values():
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    filled = kind(*(((),) if kind is actions.ChangeSettings else (1,) * _required(kind)))
    assert "{" not in filled.narrate({})


def _required(kind):
  missing = dataclasses.MISSING
  return sum(field.default is missing for field in dataclasses.fields(kind))


def test_the_table_of_interventions_names_what_there_is():
  text = (DOC.parents[1] / "reference" / "orchestrator.md").read_text()
  table = text[text.index("## Interventions by name\n") :].split("\n## ")[0]
  files = list((DOC.parents[2] / "ats_jax").rglob("*.py"))
  for row in table.splitlines():
    if not re.match(r"\|[`a-z]", row) or row.startswith("|intervention"):
      continue
    _, where, _, tests = row.split("|")[1:-1]
    for name in re.findall(r"`(\w+[.]?\w+)`", where):
      module, _, attribute = name.rpartition(".")
      sources = [file.read_text() for file in files if module and file.stem == module]
      defined = any(re.search(rf"^(def|class) {attribute}\b", s, re.M) for s in sources)
      assert defined or name in {*actions.KINDS, "bench"}, name
    for name in tests.split(", "):
      assert list((DOC.parents[2] / "tests").rglob(f"test_{name}.py")), name
