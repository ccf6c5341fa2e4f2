"""Renders a jinja template that nobody has read, in a process that can do no harm.

Run as a program by `jinja.py`, not imported. It reads a line of JSON for each thing to do and
answers with one. Jinja's own sandbox keeps a template from Python's internals, as in Hugging Face
`transformers`. The limits of the process are the second wall: no file can be opened, and memory
ends. Whoever started the process ends it when an answer takes too long.
"""

import json
import resource
import sys
from typing import Any

# Later no file can be read, so nothing can be imported: what shows errors is needed from the start.
import jinja2.debug  # noqa: F401
from jinja2 import exceptions, ext, nodes, sandbox

MEMORY_BYTES = 2**30


class Generation(ext.Extension):
  """`{% generation %} ... {% endgeneration %}`, which says what of a turn the model writes."""

  tags = {"generation"}  # noqa: RUF012 - jinja's interface

  def parse(self, parser: Any) -> Any:
    """The block, as a call of `_mark` with what is inside."""
    environment: Any = self.environment
    environment.has_marks = True
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

  def _mark(self, caller: Any) -> str:
    environment: Any = self.environment
    begin, end = environment.marks
    return f"{begin}{caller()}{end}"


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: Any = None,
  sort_keys: bool = False,
) -> str:
  """Return JSON as `transformers` makes it: characters are not escaped, as for a web page."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _refuse(message: str) -> None:
  raise exceptions.TemplateError(message)


def _environment() -> Any:
  environment: Any = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
  )
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _refuse
  environment.from_string(r"{{ '\n' }}").render()  # loads the codec of escapes
  environment.has_marks = False
  return environment


def _enclose() -> None:
  """From here on no file, no socket, and no more than so much memory."""
  resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
  resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _rendered(environment: Any, template: Any, request: dict[str, Any]) -> dict[str, str]:
  environment.marks = request.pop("marks")
  try:
    return {"text": template.render(**request)}
  except (exceptions.SecurityError, MemoryError, RecursionError, OverflowError, OSError) as e:
    return {"hostile": f"{type(e).__name__}: {e}"}
  except exceptions.TemplateError as e:
    return {"refused": str(e)}
  except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
    return {"refused": f"{type(e).__name__}: {e}"}


def main() -> None:
  """Read the template, then render whatever is asked for, until the input ends."""
  source = json.loads(sys.stdin.readline())
  environment = _environment()
  _enclose()
  try:
    template = environment.from_string(source)
  except (exceptions.TemplateError, RecursionError, MemoryError) as e:
    print(json.dumps({"broken": f"{type(e).__name__}: {e}"}), flush=True)
    return
  print(json.dumps({"has_marks": environment.has_marks}), flush=True)
  for line in sys.stdin:
    print(json.dumps(_rendered(environment, template, json.loads(line))), flush=True)


if __name__ == "__main__":
  main()
