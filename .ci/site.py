"""What the site of the documents needs beside mkdocs, which reads Markdown less kindly than GitHub.

Generated parts (`lab/pages.py`) are put in their places. Links into the code become their words, as
a site holds documents only. A list or a table gets the empty line in front without which mkdocs
takes it for a part of the paragraph above.
"""

import re
import sys
from pathlib import Path
from typing import Any

_CHECKOUT = str(Path(__file__).parents[1])
_INTO_CODE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!\w+/[\w/-]*\.md)(?!\w+\.md)[^)\s]*\)")
_OPENS = re.compile(r"([-*]|\d+\.) |\|")  # a list or a table


def on_page_markdown(markdown: str, **_: Any) -> str:
  """The text of a page as mkdocs should read it."""
  if "<!-- generated: " in markdown:
    if _CHECKOUT not in sys.path:  # mkdocs resets the path after it has loaded this file
      sys.path.insert(0, _CHECKOUT)
    from lab import pages  # here: the import takes seconds

    markdown = pages.fill(markdown)
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
