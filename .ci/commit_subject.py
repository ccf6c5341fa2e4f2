#!/usr/bin/env python3
"""Check the subject of a commit: `area: verb object`, at most 72 characters, imperative.

Usage: .ci/commit_subject.py FILE, with the message, as git's hook `commit-msg` calls it.
"""

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
# Written by git.
_OF_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ")
_FORM = re.compile(r"(?P<area>[a-z][\w./-]*): (?P<verb>[a-z][a-z-]*) \S")
# Imperatives that end like other forms.
_IMPERATIVE = ("bring", "embed", "exceed", "feed", "need", "ping", "seed", "shed", "speed")


def fault(subject: str) -> str:
  """What is wrong with the subject of a commit; "" if nothing is."""
  if _OF_GIT.match(subject):
    return ""
  if len(subject) > MOST_CHARACTERS:
    return f"it has {len(subject)} characters, {MOST_CHARACTERS} at most are allowed"
  form = _FORM.match(subject)
  if form is None:
    return "expected one area, a verb and an object, as in `data: read files of C4`"
  if form["verb"].endswith(("ed", "ing")) and form["verb"] not in _IMPERATIVE:
    return f"expected an imperative after the area, got {form['verb']!r}"
  return "it ends with a period" if subject.endswith(".") else ""


def main(argv: list[str]) -> int:
  """Check the message in a file; return the exit code."""
  lines = Path(argv[0]).read_text(encoding="utf-8").splitlines()
  subject = next((line for line in lines if line.strip() and not line.startswith("#")), "")
  if wrong := fault(subject):
    print(f"subject {subject!r}: {wrong}. CONTRIBUTING.md has the rule.", file=sys.stderr)
  return int(bool(wrong))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
