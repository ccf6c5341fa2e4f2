"""Inputs on a store: copied once for each version, then read as any file."""

import gzip
import http.server
import json
import os
import socket
import sys
import threading
import types
from pathlib import Path

import fsspec
import numpy as np
import pytest
from loading import documents

from ats_jax.config import base_config, from_config_dict
from ats_jax.data.corpus import cache
from ats_jax.data.splits import open_split
from ats_jax.data.text import remote
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.exits import FaultError


@pytest.fixture
def store():
  """A file system in memory, with a folder of text."""
  memory = fsspec.filesystem("memory")
  memory.store.clear()
  memory.pipe_file("/bucket/d/a.txt", "é 漢字".encode())
  memory.pipe_file("/bucket/d/sub/b.jsonl.gz", gzip.compress(b'{"text": "b"}\n'))
  memory.pipe_file("/bucket/d/picture.jpg", b"\xff")
  yield memory
  memory.store.clear()


def texts(path, config):
  return documents(open_split(config(seq_len=8), 0, (path,), ByteTokenizer()))


def test_a_folder_a_glob_and_a_file(store, config, write, tmp_path):
  whole = {"a.txt": "é 漢字", "sub/b.jsonl.gz:1": "b"}
  assert texts("memory://bucket/d", config) == whole
  assert texts("memory://bucket/d/**/*.gz", config) == {"sub/b.jsonl.gz:1": "b"}
  assert texts("memory://bucket/d/a.txt", config) == {"a.txt": "é 漢字"}
  # The names are those of local files, so the split and the rows do not depend on the place.
  for name in ("a.txt", "sub/b.jsonl.gz"):
    write(f"d/{name}", store.cat_file(f"/bucket/d/{name}"))
  there, here = (
    open_split(config(seq_len=8), 0, (paths,), ByteTokenizer())
    for paths in ("memory://bucket/d", str(tmp_path / "d"))
  )
  assert there.info.fingerprint == here.info.fingerprint
  ids = np.array([*b"ids", ByteTokenizer.eos_id], np.uint16)
  store.pipe_file("/bucket/t.bin", ids.tobytes())
  assert texts("memory://bucket/t.bin", config) == {"t.bin#1": "ids"}


def test_a_file_is_copied_once_for_each_version(store, config, tmp_path, monkeypatch):
  copies, copy = [], remote.shutil.copyfileobj
  monkeypatch.setattr(remote.shutil, "copyfileobj", lambda *a: copies.append(1) or copy(*a))
  for _ in range(2):
    assert texts("memory://bucket/d/a.txt", config) == {"a.txt": "é 漢字"}
  assert len(copies) == 1
  store.pipe_file("/bucket/d/a.txt", b"other")
  assert texts("memory://bucket/d/a.txt", config) == {"a.txt": "other"} and len(copies) == 2


def test_what_was_cut_off_is_no_file(store, tmp_path, monkeypatch):
  monkeypatch.setattr(remote.shutil, "copyfileobj", lambda source, copy, _: copy.write(b"half"))
  with pytest.raises(FaultError, match=r"cannot be read: OSError: 4 of 9 bytes of .*a\.txt came"):
    find_files(("memory://bucket/d/a.txt",), Report(strict=False), tmp_path)
  monkeypatch.undo()
  (file,) = find_files(("memory://bucket/d/a.txt",), Report(strict=False), tmp_path)
  assert Path(file.path).read_bytes() == "é 漢字".encode()


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("memory://bucket/none.txt", "does not exist, or matches no file"),
    ("memory://bucket/d/picture.jpg", "a suffix that says nothing"),
    ("nowhere://bucket/a.txt", "Protocol not known: nowhere"),
    ("data://x", "^data://x names no files that can be listed: .*Expected a local path"),
    ("data://text/plain", "^data://text/plain names no files that can be listed"),
    ("reference://x", "^reference://x: reference:// needs more than an address"),
    ("zip://a.txt::/nowhere.zip", "^zip://a.txt::/nowhere.zip cannot be read: .* No such file"),
  ],
)
def test_what_is_refused(store, tmp_path, path, message):
  with pytest.raises(ValueError, match=message):
    find_files((path,), Report(strict=False), tmp_path)


@pytest.mark.parametrize("path", ["a.txt", "*.txt", ""])
def test_a_server_that_refuses_the_connection(tmp_path, path):
  with socket.socket() as bound:  # and does not listen
    bound.bind(("127.0.0.1", 0))
    url = f"ftp://127.0.0.1:{bound.getsockname()[1]}/{path}"
    with pytest.raises(FaultError, match=r"^ftp://\S+ cannot be reached: .*refused\. Check"):
      find_files((url,), Report(strict=False), tmp_path)


@pytest.mark.parametrize(
  ("library", "error"), [("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("ftplib", "Error")]
)
def test_errors_of_drivers_that_are_no_errors_of_the_system(tmp_path, monkeypatch, library, error):
  module = types.ModuleType(library)
  kind = type(error, (Exception,), {})
  setattr(module, error, kind)
  monkeypatch.setitem(sys.modules, library, module)

  def failing(url):
    raise kind("no route")

  monkeypatch.setattr(fsspec.core, "url_to_fs", failing)
  with pytest.raises(FaultError, match=rf"^hf://d/a cannot be reached: {error}: no route\. Check"):
    find_files(("hf://d/a",), Report(strict=False), tmp_path)


def test_a_config_may_name_a_store_and_a_driver_that_is_missing_is_named(tmp_path, monkeypatch):
  def missing(url):
    raise ImportError("no gcsfs")

  config = base_config()
  config.data.paths = ("gs://b/a.txt",)
  assert from_config_dict(config).data.paths == ("gs://b/a.txt",)
  monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
  with pytest.raises(ValueError, match=r"gs://b/a\.txt needs .*pip install 'ats_jax\[gs\]'"):
    find_files(("gs://b/a.txt",), Report(strict=False), tmp_path)


@pytest.mark.formats
def test_https(write, config, tmp_path):
  path = write("www/a.jsonl", [{"text": "é 漢字"}])

  class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments):
      super().__init__(*arguments, directory=str(path.parent))

    def log_message(self, format, *arguments):
      del format, arguments

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/a.jsonl"
    assert texts(url, config) == {"a.jsonl:1": "é 漢字"}
    assert texts(f"{url}?download=true", config) == {"a.jsonl:1": "é 漢字"}
    path.write_text(json.dumps({"text": "newer, as long"}))
    later = path.stat().st_mtime + 2.0  # the server's times are whole seconds
    os.utime(path, (later, later))
    assert texts(url, config) == {"a.jsonl:1": "newer, as long"}
    with pytest.raises(ValueError, match="does not exist"):
      texts(f"http://127.0.0.1:{server.server_port}/none.jsonl", config)
    server.shutdown()
  with pytest.raises(FaultError, match=r"^http://127\.0\.0\.1:\d+/a\.jsonl cannot be reached: "):
    find_files((url,), Report(strict=False), cache.cache_root(str(tmp_path / "other")))
