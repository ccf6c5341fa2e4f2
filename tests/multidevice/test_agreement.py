"""Two processes compare what they see, remember and decide: the same, and with one difference."""

from pathlib import Path

from processes import run_job

READINGS = Path(__file__).parents[1] / "unit" / "orchestrator"
PROCESS = """
from readings import reading
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record.ledger import check_agreement
from ats_jax.orchestrator.policy.state import Decision

decisions = Decision(0, Rollback(), "state", 1.0, ""), Decision(0, Rollback(1), "state", 1.0, "")
cases = {
  "same": (PolicyState(reference=2.0), reading(0), decisions[:1]),
  "memory": (PolicyState(reference=2.0 + 1e-12 * rank), reading(0), ()),
  "reading": (PolicyState(), reading(0, probe=2.0 + 1e-12 * rank), ()),
  "decision": (PolicyState(), reading(0), decisions[rank : rank + 1]),
  "same again": (PolicyState(), reading(0, probe=float("nan")), ()),
}
for name, case in cases.items():
  try:
    check_agreement(*case)
    say(name, "agreed")
  except RuntimeError as error:
    say(name, str(error)[:36])
"""


def test_a_difference_in_the_last_digit_is_caught_on_both(tmp_path):
  differ = "processes see or decide differently"
  for said in run_job(PROCESS, tmp_path, path=(READINGS,)):
    assert said == [
      "same agreed", f"memory {differ} ", f"reading {differ} ", f"decision {differ} ",
      "same again agreed",
    ]  # fmt: skip
