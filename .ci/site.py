"""What the site of the documents needs beside mkdocs, which reads Markdown less kindly than GitHub.

Links into the code become their words, as a site holds documents only. A list or a table gets the
empty line in front without which mkdocs takes it for a part of the paragraph above.
"""

import re
from typing import Any

_INTO_CODE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!\w+/[\w/-]*\.md)(?!\w+\.md)[^)\s]*\)")
_OPENS = re.compile(r"([-*]|\d+\.) |\|")  # a list or a table


def on_page_markdown(markdown: str, **_: Any) -> str:
  """The text of a page as mkdocs should read it."""
  lines, fenced = [""], False
  for line in markdown.splitlines():
    if line.lstrip().startswith("```"):
      fenced = not fenced
    above = lines[-1]
    paragraph = above.strip() and not above.startswith(" ") and not _OPENS.match(above)
    if _OPENS.match(line) and paragraph and not fenced:
      lines.append("")
    lines.append(line if fenced else _INTO_CODE.sub(r"\1", line))
  return "\n".join(lines)
