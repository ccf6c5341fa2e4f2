"""An object store in memory behind gs://, as strict as the real ones."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import fsspec
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

ONE_AT_A_TIME = threading.Lock()


class Bucket(MemoryFileSystem):
  """No folders, no appending, no renaming; an object is there whole or not at all."""

  store = {}  # noqa: RUF012
  pseudo_dirs = [""]  # noqa: RUF012
  protocol = ("gcs", "gs")
  # Called before each change with what is done and the object's name; may raise, as a network does.
  before: Callable[[str, str], None] = staticmethod(lambda operation, name: None)

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(os.fspath(path).removeprefix("gs://"))

  def mkdir(self, path, create_parents=True, **kwargs):
    pass

  def makedirs(self, path, exist_ok=False):
    pass

  def _open(self, path, mode="rb", **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
    assert mode in ("rb", "wb", "xb"), f"a store cannot {mode!r}"
    return super()._open(path, mode, **kwargs)

  def mv(self, *args, **kwargs):
    raise AssertionError("a store cannot rename")

  def pipe_file(self, path, value, mode="overwrite", **kwargs):
    Bucket.before("put", self._strip_protocol(path))
    with ONE_AT_A_TIME:
      super().pipe_file(path, bytes(value), mode, **kwargs)

  def put_file(self, lpath, rpath, callback=None, mode="overwrite", **kwargs):
    with open(lpath, "rb") as file:
      self.pipe_file(rpath, file.read(), mode)

  def cp_file(self, path1, path2, **kwargs):
    Bucket.before("put", self._strip_protocol(path2))
    super().cp_file(path1, path2, **kwargs)

  def _rm(self, path):
    Bucket.before("delete", self._strip_protocol(path))
    super()._rm(path)


def objects() -> dict[str, bytes]:
  """What is on the store now."""
  return {name: file.getvalue() for name, file in list(Bucket.store.items())}


def become(content: dict[str, bytes]) -> None:
  """Put the store back to what it was."""
  Bucket.store.clear()
  fs = fsspec.filesystem("gs")
  for name, data in content.items():
    MemoryFileSystem.pipe_file(fs, name, data)


@contextlib.contextmanager
def installed() -> Iterator[type[Bucket]]:
  """An empty store behind gs://, in this process."""
  names = ("gs", "gcs")
  previous = {name: _registry[name] for name in names if name in _registry}
  cached = backend.fsspec_backend._get_filesystem
  Bucket.store.clear()
  for name in names:
    fsspec.register_implementation(name, Bucket, clobber=True)
  cached.cache_clear()
  try:
    yield Bucket
  finally:
    Bucket.before = staticmethod(lambda operation, name: None)
    Bucket.store.clear()
    for name in names:
      del _registry[name]
    _registry.update(previous)
    cached.cache_clear()
