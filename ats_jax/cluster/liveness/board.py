"""Short texts that all processes of a job see: the store of jax's coordination service."""

from jax.errors import JaxRuntimeError

from ats_jax.ops import _compat

_MISSING = "NOT_FOUND"


class Board:
  """Texts by name; process 0 holds them. A call waits while that process does not answer."""

  def __init__(self, folder: str):
    """Names are in a folder of their own."""
    self._client, self._folder = _compat.coordination_client(), folder

  def put(self, name: str, text: str) -> None:
    """Write or replace a text.

    Raises:
      ConnectionError: if process 0 is gone.
    """
    try:
      self._client.key_value_set(f"{self._folder}/{name}", text, allow_overwrite=True)
    except JaxRuntimeError as error:
      raise ConnectionError(str(error).splitlines()[0]) from error

  def read(self, name: str) -> str:
    """A text, or "" if there is none; raises as `put`."""
    try:
      return self._client.key_value_try_get(f"{self._folder}/{name}")
    except JaxRuntimeError as error:
      if _MISSING in str(error):
        return ""
      raise ConnectionError(str(error).splitlines()[0]) from error

  def all(self, prefix: str) -> list[str]:
    """The texts whose names begin with `prefix/`; raises as `put`."""
    try:
      return [text for _, text in self._client.key_value_dir_get(f"{self._folder}/{prefix}/")]
    except JaxRuntimeError as error:
      raise ConnectionError(str(error).splitlines()[0]) from error
