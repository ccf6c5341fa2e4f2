"""The one path type, local or on an object store, and the operations that differ between the two.

A `Path` is an `epath.Path`: `runs/debug`, `gs://bucket/run`, `s3://...`, `az://...`. Both kinds are
joined, read and listed alike. What a store has not (appending, renaming in one step, flushing) is
defined here, once for each kind. Others ask which kind a path is of only to refuse what a store
cannot do; `lease` is the other kind of lock.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import fsspec
from etils import epath
from etils.epath import backend

# Or else epath takes TensorFlow where it is installed, and that knows gs:// only.
os.environ.setdefault("EPATH_USE_TF", "false")

Path = epath.Path
DRIVERS = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
# What drivers raise beside OSError, by the modules that define it.
_DRIVER_ERRORS = {
  "aiohttp": ("ClientError",),
  "azure.core.exceptions": ("AzureError",),
  "botocore.exceptions": ("BotoCoreError", "ClientError"),
  "ftplib": ("Error",),
  "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
  "google.auth.exceptions": ("GoogleAuthError",),
  "httpx": ("HTTPError",),
  "httpx2": ("HTTPError",),
}
_OS_ERROR = re.compile(r"(?:os_error_code='|OS error )(\d+)")
_FREE_SPACE = "Free space on the disk."
_PERMISSION = "Mend the permissions of the folder, or use another one."
_ADVICE = {
  errno.ENOSPC: _FREE_SPACE,
  errno.EDQUOT: "The quota of this user is used up: delete files, or ask for more.",
  errno.EFBIG: "Raise the limit of a file's size: `ulimit -f unlimited`.",
  errno.ENFILE: "The machine has too many open files: end other programs, or raise fs.file-max.",
  errno.EACCES: _PERMISSION,
  errno.EPERM: _PERMISSION,
  errno.EROFS: "The file system is read-only: mount it to be written, or use another folder.",
  errno.EIO: "The disk or its connection fails: see the log of the system (`dmesg`).",
  errno.ESTALE: "The folder was replaced on its server: mount it again.",
}
# The end of a log on a store is put again each time; that may take one part in so many of the time.
PUT_SHARE = 200
MIN_PUT_SECS = 10.0
PART_BYTES = 2**22
_LFS = b"version https://git-lfs.github.com/spec/"


def parse(text: str | os.PathLike[str]) -> Path:
  """The path that a user wrote; its store is asked for it, so that a wrong one is said at once.

  Raises:
    ValueError: if it is on a store that is not known or does not answer, has no bucket or needs a
      missing driver.
  """
  text = os.fspath(text)
  scheme, separator, rest = text.partition("://")
  if separator:
    if scheme not in DRIVERS:
      known = ", ".join(f"{name}://" for name in DRIVERS)
      raise ValueError(f"{text}: expected a local path or one of {known}, not {scheme}://.")
    if not rest.strip("/"):
      raise ValueError(f"{text} names no bucket. Example: {scheme}://bucket/runs/debug")
    try:
      fsspec.get_filesystem_class(scheme)
    except ImportError as e:
      raise ValueError(
        f"{text} needs {DRIVERS[scheme]}, which is not installed: pip install 'ats_jax[{scheme}]'"
      ) from e
    try:
      _store(text).exists(text)
    except (*errors(), ValueError) as e:  # adlfs makes a ValueError of what it cannot connect to
      raise ValueError(
        f"{text} cannot be reached: {reason(e)}. Check its name, your credentials and the network."
      ) from e
  return Path(text)


def errors() -> tuple[type[Exception], ...]:
  """What operations on a path raise where they fail: OSError, and errors of drivers beside it.

  For an `except`, which asks when something was raised: by then its module is loaded.
  """
  loaded = [(sys.modules[m], names) for m, names in _DRIVER_ERRORS.items() if m in sys.modules]
  return OSError, *(
    getattr(module, n) for module, names in loaded for n in names if n in vars(module)
  )


def reason(error: Exception) -> str:
  """An error on one line; that of a driver may be many, or only a name that was not found."""
  text = " ".join(str(error).split()).rstrip(" .!")
  return (
    text if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {text}"
  )


def advice(error: BaseException) -> str:
  """What to do about what the system refused: "" where it gave no reason that is known here."""
  number = error_number(error)
  if number == errno.EMFILE:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"Raise the limit of open files, which is {soft}: `ulimit -n {max(4096, 4 * soft)}`."
  return _ADVICE.get(number, "")


def error_number(error: BaseException | None) -> int:
  """The `errno` of an error, or of one that it was made of; 0 = there is none.

  TensorStore passes the system's number on in its text alone.
  """
  while error is not None:
    if isinstance(error, OSError) and error.errno:
      return error.errno
    if found := _OS_ERROR.search(str(error)):
      return int(found[1])
    error = error.__cause__ or error.__context__
  return 0


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is on a store."""
  return "://" in os.fspath(path)


def absolute(path: os.PathLike[str]) -> Path:
  """The path from the root; one on a store is that already."""
  return Path(path if is_remote(path) else os.path.abspath(path))


def make_folder(path: Path) -> None:
  """Make a folder and those above it; a store has none."""
  if not is_remote(path):
    os.makedirs(path, exist_ok=True)


def try_to_write(folder: Path) -> None:
  """Make and remove a file in a local folder; what forbids that is raised."""
  with tempfile.TemporaryFile(dir=folder):
    pass


def read(path: Path) -> bytes:
  """All of a file, as it is now: nothing that was listed before is believed.

  Raises:
    ValueError: if it is a device, a pipe or a socket, which may have no end.
  """
  if is_remote(path):
    _store(path).invalidate_cache(os.fspath(path))  # or s3fs takes its size from there
    return cast(bytes, _store(path).cat_file(os.fspath(path)))
  with open_to_read(path) as file:
    return file.read()


def open_to_read(path: Path) -> BinaryIO:
  """Open a file; locally a regular one, or a ValueError says what it is."""
  if is_remote(path):
    return cast(BinaryIO, path.open("rb"))
  return open(path, "rb", opener=_open_regular)


def lfs_pointer(head: str | bytes) -> str:
  """What to say of a file that begins with `head`, if that is a pointer of Git LFS; else ""."""
  head = head.encode(errors="replace") if isinstance(head, str) else head
  if not head.startswith(_LFS):
    return ""
  return "a pointer of Git LFS, not the file itself: run `git lfs pull` where it was cloned"


def parse_json(text: str | bytes) -> Any:
  """The value of a JSON text, with or without a byte order mark.

  Raises:
    ValueError: if it is none, is nested too deeply, or is a pointer of Git LFS.
  """
  if pointer := lfs_pointer(text[: len(_LFS)]):
    raise ValueError(f"it is {pointer}")
  try:
    return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def write(path: os.PathLike[str], content: str | bytes, *, is_private: bool = False) -> None:
  """Replace a file in one step: whatever kills the process, the old one is there or the new one.

  Locally it is renamed into its place, and durable on return. A store does so by itself.

  Args:
    path: of the file.
    content: all of it.
    is_private: whether its owner alone may read it; a store has rights of its own.
  """
  data = content.encode() if isinstance(content, str) else content
  if is_remote(path):
    _store(path).pipe_file(os.fspath(path), data)
    return
  unfinished = f"{os.fspath(path)}.tmp"
  with open(unfinished, "wb", opener=_open_own) as file:
    if is_private:
      os.fchmod(file.fileno(), 0o600)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(unfinished, path)
  _sync(os.path.dirname(os.path.abspath(path)))


def create(path: Path, content: str) -> None:
  """Write an object of a store that is not there yet.

  Raises:
    FileExistsError: if it is; a store behind s3:// that is not Amazon's may write all the same.
  """
  try:
    _store(path).pipe_file(os.fspath(path), content.encode(), mode="create")
  except OSError as e:  # s3fs has no type of its own for what was there
    _store(path).invalidate_cache()
    if isinstance(e, FileExistsError) or not _store(path).exists(os.fspath(path)):
      raise
    raise FileExistsError(f"{path} is there already") from e


class Log:
  """A file that grows at its end; `read_log` reads it.

  Locally what is written is with the operating system when `write` returns, and on the disk when
  `flush` does. A store cannot append: there a log is `name`, `name.0001`, `name.0002`..., of which
  only the last one is put again, at each `flush`, and now and then by `write`, so seldom that it
  takes 0.5 % of the time at most. What was not put is lost with the process; who must not lose it
  flushes.
  """

  def __init__(self, path: Path, content: bytes = b"", *, one_object: bool = False):
    """Open `path`, whose content becomes `content`.

    Args:
      path: path of the log.
      content: bytes with which it begins.
      one_object: whether a store holds it as one object, which a file that changes at its
        beginning needs.
    """
    self._path, self._one_object = path, one_object
    self._part, self._data = 0, bytearray()  # the last one, on a store
    self._file: BinaryIO | None = None
    self._put_from = 0.0  # a write puts from this time on
    self.rewrite(content)

  def rewrite(self, content: bytes) -> None:
    """Begin with other content; if that fails, the file goes on as it was."""
    if is_remote(self._path):
      old = [] if self._one_object else _parts(self._path)
      self._part = 0
      for data in old[:-1]:  # those that stay as they are
        if not content.startswith(data):
          break
        content, self._part = content[len(data) :], self._part + 1
      # From the end on: a kill leaves a log that is only longer than it should be.
      for number in reversed(range(self._part + 1, len(old))):
        _part_path(self._path, number).unlink()
      self._data = bytearray(content)
      return
    if not self._path.exists() or self._path.read_bytes() != content:
      write(self._path, content)
    old, self._file = self._file, open(self._path, "ab", opener=_open_own)  # noqa: SIM115
    if old is not None:
      old.close()

  def write(self, data: bytes) -> None:
    """Append; what is appended at once stays in one part."""
    if self._file is not None:
      self._file.write(data)
      self._file.flush()
      return
    self._data += data
    if len(self._data) >= PART_BYTES and not self._one_object:
      self.flush()
      self._part, self._data = self._part + 1, bytearray()
    elif time.monotonic() >= self._put_from:
      self.flush()

  def flush(self) -> None:
    """Make it durable; what was closed is."""
    if self._file is not None:
      if not self._file.closed:
        self._file.flush()
        os.fsync(self._file.fileno())
      return
    start = time.monotonic()
    write(_part_path(self._path, self._part), bytes(self._data))
    end = time.monotonic()
    self._put_from = end + max(MIN_PUT_SECS, PUT_SHARE * (end - start))

  def close(self) -> None:
    """Make it durable and end."""
    self.flush()
    if self._file is not None:
      self._file.close()


def read_log(path: Path) -> bytes:
  """All that a `Log` holds."""
  parts = _parts(path) if is_remote(path) else []
  return b"".join(parts) if parts else read(path)


def _parts(path: Path) -> list[bytes]:
  """The parts of a log on a store."""
  parts = []
  while True:
    try:
      parts.append(read(_part_path(path, len(parts))))
    except FileNotFoundError:
      return parts


def _part_path(path: Path, number: int) -> Path:
  return path.with_name(f"{path.name}.{number:04d}") if number else path


# Folders that are there whole or not at all. Locally such a folder gets its name when it is
# complete. On a store its files are put under their final names, and the file `last` is the last
# to come and the first to go: without it there is no folder, but the rest of an unfinished one.


def staging(folder: Path) -> Path:
  """A local folder for what is to be committed into `folder`, the same in each process."""
  if is_remote(folder):
    return _scratch() / hashlib.sha256(os.fspath(folder).encode()).hexdigest()[:16]
  return absolute(folder) / "unfinished"


def commit_folder(unfinished: Path, target: Path, last: str) -> None:
  """Make a local folder the folder `target`; what is there in its place is an error."""
  if is_remote(target):
    names = files(unfinished)
    put(unfinished, target, [name for name in names if name != last])
    put(unfinished, target, [last])
    return
  in_threads(lambda name: _sync(unfinished / name), files(unfinished))
  for folder, _, _ in os.walk(unfinished):
    _sync(folder)
  os.rename(unfinished, target)
  _sync(target.parent)


def committed(folder: Path, last: str) -> list[str]:
  """Names of the folders that were committed into `folder`."""
  if not is_remote(folder):
    return [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
  _store(folder).invalidate_cache()  # of listings: other processes write too
  return [p.parent.name for p in folder.glob(f"*/{last}")]


def unfinished_in(folder: Path, last: str) -> list[str]:
  """Names of what a stopped process has left on a store in place of committed folders."""
  if not is_remote(folder) or not folder.exists():
    return []
  finished = committed(folder, last)
  return sorted(p.name for p in folder.iterdir() if p.name not in finished)


def delete_folder(folder: Path, last: str, aside: Path) -> None:
  """Delete a committed folder; locally it is renamed to `aside` first. Of a link, delete that."""
  if is_remote(folder):
    (folder / last).unlink(missing_ok=True)
    delete_rest(folder)
    return
  os.rename(folder, aside)
  if os.path.islink(aside):
    os.unlink(aside)
  else:
    shutil.rmtree(aside)


def delete_rest(folder: Path) -> None:
  """Delete a folder that nobody takes for a committed one, or nothing."""
  if folder.exists():
    folder.rmtree()


def move_folder(folder: Path, target: Path, last: str) -> None:
  """Give a committed folder another name. On a store it is copied: a kill may leave both."""
  if not is_remote(folder):
    os.rename(folder, target)
    return
  names = files(folder)
  _store(folder).copy([f"{folder}/{n}" for n in names], [f"{target}/{n}" for n in names])
  delete_folder(folder, last, target)


class HeldFolder:
  """A folder that is used by its name for long, while the name may come to lead elsewhere.

  It may be renamed, removed or replaced, and so may those above it and links to it. Whoever writes
  by the old name then writes into another folder. The folder is kept open, as the system may give
  its number to another one that nobody has open.
  """

  def __init__(self, path: Path):
    """Open a folder; of a store, which has no folders, nothing is ever found out."""
    self.path = absolute(path)
    self._number = None if is_remote(path) else os.open(path, os.O_RDONLY | os.O_DIRECTORY)

  def moved(self) -> str:
    """What happened to the folder and what to do, on one line; "" = it is where it was."""
    if self._number is None:
      return ""
    try:
      if os.path.samestat(os.stat(self.path), os.fstat(self._number)):
        return ""
    except OSError as e:
      if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP):
        return ""  # whether it is still there cannot be told; whoever writes hears why
    return (
      f"{self.path} is no longer the folder in which this run began: it was renamed, removed or "
      f"replaced meanwhile{self._now()}. Start the same command again with the --workdir where the "
      "run is now; it goes on from its newest checkpoint."
    )

  def _now(self) -> str:
    """Where the folder is now, if the system tells."""
    try:
      now = os.readlink(f"/proc/self/fd/{self._number}")
    except OSError:
      return ""
    return "" if now.endswith(" (deleted)") else f", and is now {now}"

  def close(self) -> None:
    """Let go of it."""
    if self._number is not None:
      os.close(self._number)
      self._number = None


@contextlib.contextmanager
def fetched(folder: Path) -> Iterator[Path]:
  """The files of a folder on the local disk, for libraries that read there: itself, or a copy."""
  if not is_remote(folder):
    yield absolute(folder)
    return
  with _scratch_folder() as copy:
    names = files(folder)
    _store(folder).get([f"{folder}/{n}" for n in names], [f"{copy}/{n}" for n in names])
    yield copy


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Path]:
  """A local folder for libraries that write there: itself, or one that is put on its store."""
  if not is_remote(folder):
    os.makedirs(folder, exist_ok=True)
    yield folder
    return
  with _scratch_folder() as copy:
    yield copy
    put(copy, folder, files(copy))


def files(folder: Path) -> list[str]:
  """Names of all files in a folder and those in it, relative to it."""
  if not is_remote(folder):
    absolute = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in absolute)
  store = _store(folder)
  store.invalidate_cache(os.fspath(folder))  # other processes write too
  root = f"{store._strip_protocol(os.fspath(folder))}/"
  return sorted(path.removeprefix(root) for path in store.find(os.fspath(folder)))


def in_threads[T](fn: Callable[[Any], T], items: list[Any]) -> list[T]:
  """`fn` of each item, many at a time: for disks and networks."""
  with thread_pool() as pool:
    return list(pool.map(fn, items))


def thread_pool() -> concurrent.futures.ThreadPoolExecutor:
  """Threads for disks and networks."""
  return concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))


def put(local: Path, target: Path, names: list[str]) -> None:
  """Put files of a local folder on a store."""
  _store(target).put([f"{local}/{n}" for n in names], [f"{target}/{n}" for n in names])


def _store(path: str | os.PathLike[str]) -> fsspec.AbstractFileSystem:
  # That of epath: another instance would have a cache of listings of its own.
  return backend.fsspec_backend.fs(path)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
  os.makedirs(_scratch(), exist_ok=True)
  with tempfile.TemporaryDirectory(dir=_scratch()) as folder:
    yield Path(folder)


def _scratch() -> Path:
  return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ats_jax" / "staging"


def _open_regular(path: str, flags: int) -> int:
  """Open what is a regular file; nothing else, which could wait for a writer for ever."""
  number = os.open(path, flags | os.O_NONBLOCK, 0o666)
  mode = os.fstat(number).st_mode
  if stat.S_ISREG(mode):
    return number
  os.close(number)
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
  raise ValueError(f"{path} is not a regular file but a device, a pipe or a socket.")


def _open_own(path: str, flags: int) -> int:
  """Open a file to write, not one that a link in a folder of somebody else leads to."""
  return _open_regular(path, flags | os.O_NOFOLLOW)


def _sync(path: os.PathLike[str] | str) -> None:
  """Flush a file, or the names in a folder, to the disk."""
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  except OSError as e:
    # Some file systems do not know it of a folder (CIFS, FUSE); its files are flushed all the same.
    if e.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
      raise
  finally:
    os.close(number)
