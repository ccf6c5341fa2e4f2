"""Actions on experts win where what they mend is wrong, by the comparison of the lab."""

import pytest

from lab.expert_actions import CASES, compare

# In each seed that was measured the gain is at least four times as large.
LEAST = {"temperature of 20": 0.01, "text read 40 times": 0.1}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEAST)
def test_an_action_on_experts_wins_where_they_need_it(mesh, name):
  ((goes_on, acts),) = compare(CASES[name], [0])
  assert acts < goes_on - LEAST[name]
