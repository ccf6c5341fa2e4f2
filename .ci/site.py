"""What the site of the documents needs beside mkdocs: links into the code become its name."""

import re
from typing import Any

# In the repository such a link leads to a file; a site holds documents only.
_INTO_CODE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!\w+/[\w/-]*\.md)(?!\w+\.md)[^)\s]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
  """Keep the words of links that leave docs/."""
  return _INTO_CODE.sub(r"\1", markdown)
