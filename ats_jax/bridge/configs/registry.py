"""torchtitan's Python configs (`config_registry.py`), read without being run.

A function there is a straight line: it makes a config of nested calls, or takes another function's,
changes fields of it, and returns it. That much is read; anything else is refused with its line.
"""

import ast
import dataclasses
import operator
from typing import Any

_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
}
_NO_EFFECT = (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass)


@dataclasses.dataclass
class Call:
  """`name(*arguments, **fields)`; positional arguments are the fields "0", "1", ..."""

  name: str
  fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Unread:
  """An expression whose value only a run would tell."""

  source: str


def functions(text: str) -> dict[str, ast.FunctionDef]:
  """The functions at the top of a Python file.

  Raises:
    ValueError: if it is no Python.
  """
  try:
    tree = ast.parse(text)
  except SyntaxError as error:
    raise ValueError(f"line {error.lineno}: {error.msg}") from error
  return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_registry(text: str) -> bool:
  """Whether a Python file looks like one of torchtitan's."""
  return "torchtitan" in text and "Trainer.Config" in text


def read_function(text: str, name: str) -> dict[str, Any]:
  """The config that a function returns, by dotted name; calls by the name of what is called.

  Raises:
    ValueError: if there is no such function, or it does what cannot be read without running it.
  """
  known = functions(text)
  if not name and len(known) == 1:
    name = next(iter(known))
  if name not in known:
    asked = f"there is no function {name!r}" if name else "it has several functions"
    raise ValueError(f"{asked}. Say which after a colon: {', '.join(known)}.")
  config = _evaluate(known[name], known, (name,))
  if not isinstance(config, Call):
    raise ValueError(f"{name}() returns what cannot be read without running it.")
  return dict(_flatten(config, ""))


def _evaluate(
  function: ast.FunctionDef, known: dict[str, ast.FunctionDef], active: tuple[str, ...]
) -> Any:
  names: dict[str, Any] = {}
  for node in function.body:
    if isinstance(node, ast.Return) and node.value is not None:
      return _value(node.value, names, known, active)
    if isinstance(node, _NO_EFFECT) or (
      isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
      continue
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
      raise ValueError(
        f"line {node.lineno}: `{ast.unparse(node).splitlines()[0]}` cannot be read without running "
        "it, which is not done. Write the values out."
      )
    value = _value(node.value, names, known, active)
    _assign(node.targets[0], value, names)
  raise ValueError(f"{function.name}() returns nothing.")


def _assign(target: ast.expr, value: Any, names: dict[str, Any]) -> None:
  if isinstance(target, ast.Name):
    names[target.id] = value
    return
  root, *path = ast.unparse(target).split(".")
  holder = names.get(root)
  if not isinstance(target, ast.Attribute) or not isinstance(holder, Call):
    raise ValueError(
      f"line {target.lineno}: `{ast.unparse(target)} = ...` cannot be read without running it."
    )
  for part in path[:-1]:
    if not isinstance(inner := holder.fields.get(part), Call):
      inner = holder.fields[part] = Call("", {})
    holder = inner
  holder.fields[path[-1]] = value


def _value(
  node: ast.expr, names: dict[str, Any], known: dict[str, ast.FunctionDef], active: tuple[str, ...]
) -> Any:
  again = lambda part: _value(part, names, known, active)
  match node:
    case ast.Constant():
      return node.value
    case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
      return -number
    case ast.List() | ast.Tuple():
      parts = [again(part) for part in node.elts]
      plain = not any(isinstance(part, Call | Unread) for part in parts)
      return parts if plain else Unread(ast.unparse(node))
    case ast.BinOp():
      left, right, compute = again(node.left), again(node.right), _OPERATORS.get(type(node.op))
      if compute and all(isinstance(side, int | float) for side in (left, right)):
        return compute(left, right)
    case ast.Name() if node.id in names:
      return names[node.id]
    case ast.Call(func=ast.Name(id=name)) if name in known and not (node.args or node.keywords):
      if name in active:
        raise ValueError(f"line {node.lineno}: {name}() calls itself.")
      return _evaluate(known[name], known, (*active, name))
    case ast.Call() if all(keyword.arg for keyword in node.keywords):
      fields = {str(i): again(part) for i, part in enumerate(node.args)}
      fields |= {str(keyword.arg): again(keyword.value) for keyword in node.keywords}
      return Call(ast.unparse(node.func), fields)
  return Unread(ast.unparse(node))


def _flatten(value: Any, path: str) -> list[tuple[str, Any]]:
  if not isinstance(value, Call):
    return [(path, f"`{value.source}`" if isinstance(value, Unread) else value)]
  found = [(path, f"{value.name}()")] if path and value.name else []
  for key, inner in value.fields.items():
    found += _flatten(inner, f"{path}.{key}" if path else key)
  return found
