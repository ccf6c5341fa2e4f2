"""Credentials in addresses: one function, `masked`, hides them from whatever people are shown."""

import logging as std_logging
import re
from typing import Any

MASK = "***"
# Names of variables and of fields of an address whose values are secret.
SECRET_NAME = re.compile(
  "KEY|TOKEN|SECRET|PASSW|PWD|CREDENTIAL|AUTH|SIGNATURE|X-AMZ-|X-GOOG-|^SIG$|^CODE$",
  re.IGNORECASE,
)
# In these schemes a container stands before the @, not a user.
_WITH_CONTAINER = ("abfs", "abfss", "az", "wasb", "wasbs")
_SCHEME = r"\b([a-z][a-z0-9+.-]{0,30})://"
_USER = re.compile(_SCHEME + r"([^\s/?#]+)@", re.IGNORECASE)
_ADDRESS = re.compile(_SCHEME + r"[^\s'\"<>]+", re.IGNORECASE)
# Behind ?, &, ; or #: a name with a value, or a word alone.
_FIELD = re.compile(r"([?&;#])([^=&;#]*)(?:=([^&;#]*))?")
_LONG = re.compile(r"[\w%+/=.~-]{16,}")  # a value like that may be a token, whatever its name


def masked(text: str) -> str:
  """The text with `***` in place of the credentials in its addresses.

  Those are users with their passwords, and values of a query or a fragment whose names say that
  they are secret or that are as long as a token.
  """
  text = _USER.sub(_without_user, text)
  return _ADDRESS.sub(lambda found: _FIELD.sub(_without_value, found[0]), text)


def _without_user(found: re.Match[str]) -> str:
  scheme, user = found.groups()
  is_container = scheme.lower() in _WITH_CONTAINER and ":" not in user
  return found[0] if is_container else f"{scheme}://{MASK}@"


def _without_value(found: re.Match[str]) -> str:
  sign, name, value = found.groups()
  if value and (SECRET_NAME.search(name) or _LONG.fullmatch(value)):
    return f"{sign}{name}={MASK}"
  return f"{sign}{MASK}" if value is None and _LONG.fullmatch(name) else found[0]


def masked_values(value: Any) -> Any:
  """A value of a setting, or a structure of them, with its texts masked."""
  if isinstance(value, str):
    return masked(value)
  if isinstance(value, dict):
    return {key: masked_values(inner) for key, inner in value.items()}
  return type(value)(map(masked_values, value)) if isinstance(value, list | tuple) else value


class MaskingFormatter(std_logging.Formatter):
  """Formats log records, and their tracebacks, without credentials."""

  def format(self, record: std_logging.LogRecord) -> str:
    """The line of a record."""
    return masked(super().format(record))
