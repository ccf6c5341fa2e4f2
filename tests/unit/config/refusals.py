"""What is not refused as it should be, as a list."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def wrongly_refused(
  call: Callable[[Any], Any],
  cases: Iterable[tuple[Any, str]],
  pattern: Callable[[str], str] = str,
) -> list[tuple[Any, str]]:
  """Cases (argument, words) in which `call` raises no ValueError with these words; what it says.

  Args:
    call: what refuses each argument.
    cases: arguments and regular expressions.
    pattern: makes the whole expression of that of a case.
  """
  found = []
  for argument, words in cases:
    try:
      call(argument)
    except ValueError as error:
      if not re.search(pattern(words), str(error)):
        found.append((argument, str(error)))
    else:
      found.append((argument, "is accepted"))
  return found
