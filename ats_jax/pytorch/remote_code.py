"""The decoder in PyTorch as one file, which `transformers` runs with `trust_remote_code`.

It is made of the files of `pytorch`, so there is one source. Those name each thing once
among them: joined, they need only their imports of each other taken out.
"""

import ast
from pathlib import Path

MODULE = "modeling_ats_jax"
PARTS = (  # as imported
  *("settings", "kernels", "metal", "layers", "attention", "moe", "mod", "decoder", "hf"),
)
HEADER = '''\
"""The decoder of ats_jax in PyTorch, in one file.

`ats-jax bridge export` joined it of the files of `ats_jax/pytorch`: edit those.
"""
'''


def source() -> str:
  """The text of the module."""
  folder = Path(__file__).parent
  imports: dict[str, None] = {}
  bodies: list[str] = []
  for name in PARTS:
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    lines, taken = text.splitlines(), set()
    for node in ast.parse(text).body:
      is_import = isinstance(node, ast.Import | ast.ImportFrom)
      is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
      assert node.end_lineno is not None
      if is_import or is_docstring:
        taken.update(range(node.lineno - 1, node.end_lineno))
      if is_import and not _is_internal(node):
        imports[ast.unparse(node)] = None
    rest = [line for number, line in enumerate(lines) if number not in taken]
    bodies.append("\n".join(rest).strip("\n"))
  return "\n".join([HEADER, *sorted(imports), "\n", "\n\n\n".join(bodies), ""])


def _is_internal(node: ast.Import | ast.ImportFrom) -> bool:
  return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ats_jax")
