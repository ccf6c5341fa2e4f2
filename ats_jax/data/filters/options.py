"""The options of a filter, from the text of `data.filters` to values."""

from collections.abc import Mapping

from ats_jax.config.filters import Stage

Value = bool | int | float | str


def parse_options(stage: Stage, defaults: Mapping[str, Value]) -> dict[str, Value]:
  """`defaults` with what `stage` says, each of the type of its default.

  Raises:
    ValueError: for an option that the filter does not have, or a value of another type.
  """
  options = dict(defaults)
  for name, text in stage.options:
    if name not in defaults:
      has = f"It has: {', '.join(defaults)}" if defaults else "It has none"
      raise ValueError(f"data.filters: {stage.name} has no option {name!r}. {has}.")
    options[name] = _value(f"data.filters: {stage.name}:{name}={text}", text, defaults[name])
  return options


def _value(where: str, text: str, default: Value) -> Value:
  if isinstance(default, str):
    return text
  if isinstance(default, bool):
    if text.lower() not in ("true", "false"):
      raise ValueError(f"{where} is neither true nor false.")
    return text.lower() == "true"
  kind = type(default)
  try:
    return kind(text)
  except ValueError as e:
    number = "a whole number" if kind is int else "a number"
    raise ValueError(f"{where} is not {number}.") from e
