"""The demo conversations of the repository: as their script makes them, and all usable."""

import json

from commands import REPOSITORY

from lab.conversations import COUNT, KINDS, conversations

FILE = REPOSITORY / "configs" / "conversations.jsonl"


def test_the_file_is_what_the_script_writes():
  lines = FILE.read_text(encoding="utf-8").splitlines()
  assert lines == conversations(COUNT, seed=0)
  assert len(set(lines)) == COUNT
  asked = {json.loads(line)["messages"][-2]["content"] for line in lines}
  assert len(asked) > 20 * len(KINDS)
