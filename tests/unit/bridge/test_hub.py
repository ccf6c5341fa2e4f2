"""Names of the Hub, against a server on this machine that answers as the Hub does."""

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import REPOSITORY, forked, train_flags
from hf_folders import make_folder
from in_process import printed_by

from ats_jax.bridge import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# `time.sleep`: how long a download waits before it asks again.
ASK = """
import sys, time
from ats_jax import exits
from ats_jax.bridge import hub
time.sleep = lambda secs: None
for name in sys.argv[1:]:
  try:
    print(hub.local_folder(name))
  except (ValueError, exits.FaultError) as e:
    print(type(e).__name__, str(e).replace("\\n", " "))
"""


class Hub(http.server.BaseHTTPRequestHandler):
  """The routes of the Hub that a download takes, over one folder named some/model."""

  protocol_version = "HTTP/1.1"
  folder = None  # of the files
  asked = None  # paths, in turn
  breaks = 0  # of the next files, how many end early

  def log_message(self, format, *args):
    del format, args  # nothing on stderr

  def answer(self, status, body=b"", **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(body)

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    path = self.path.partition("?")[0]
    self.asked.append((self.command, path))
    if path.startswith("/api/models/gated/"):
      self.answer(403, X_Error_Code="GatedRepo")
    elif not path.startswith(("/api/models/some/model", "/some/model")):
      self.answer(404, X_Error_Code="RepoNotFound")
    elif path == "/api/models/some/model/revision/main":
      self.say({"id": "some/model", "sha": COMMIT, "siblings": []})
    elif path.startswith("/api/models/some/model/revision/"):
      self.answer(404, X_Error_Code="RevisionNotFound")
    elif path.startswith("/api/models/some/model/tree/"):
      self.say([self.entry(p) for p in sorted(self.folder.iterdir())])
    else:
      self.file(self.folder / path.rpartition("/")[2])

  def entry(self, path):
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}

  def say(self, value):
    self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

  def file(self, path):
    whole = path.read_bytes()
    start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
    if self.command == "GET" and path.suffix == ".safetensors" and type(self).breaks:
      type(self).breaks -= 1
      self.send_response(200)
      self.send_header("Content-Length", str(len(whole)))
      self.end_headers()
      self.wfile.write(whole[: len(whole) // 2])
      self.close_connection = True
      return
    self.answer(
      206 if start else 200,
      whole[start:],
      ETag=f'"{hashlib.sha1(whole).hexdigest()}"',
      X_Repo_Commit=COMMIT,
      Accept_Ranges="bytes",
      Content_Range=f"bytes {start}-{len(whole) - 1}/{len(whole)}",
    )


@contextlib.contextmanager
def served(folder):
  handler = type("Serving", (Hub,), {"folder": folder, "asked": []})
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(endpoint, home, *names):
  """What each of the names is, in turn, in one process."""
  env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
  env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
  run = subprocess.run(
    [sys.executable, "-c", ASK, *names],
    env=env,
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  return run.stdout.splitlines()


@pytest.mark.thorough
def test_the_files_of_a_name_come_once_and_others_are_refused(tmp_path):
  origin = make_folder(tmp_path / "origin", shards=2)
  (origin / "pytorch_model.bin").write_bytes(b"a pickle")
  (origin / "consolidated.safetensors").write_bytes(b"the same weights in another form")
  (origin / "generation_config.json").write_text("{}")
  names = ("some/model", "some/model", "some/model@v9", "some/modle", "gated/model", "a..b/--c")
  with served(origin) as (server, endpoint):
    found = ask(endpoint, tmp_path / "home", *(f"hf://{name}" for name in names))
    folder, again, no_commit, no_model, gated, no_name = found
  assert folder.endswith(COMMIT) and again == folder
  came = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
  expected = {p.name: p.read_bytes() for p in origin.iterdir()}
  del expected["pytorch_model.bin"], expected["consolidated.safetensors"]
  assert came == expected
  fetched = [p for how, p in server.asked if how == "GET" and p.endswith(".safetensors")]
  assert len(fetched) == len(set(fetched)) == 2
  assert "the model has no branch, tag or commit v9" in no_commit
  assert "the Hub has no such model" in no_model
  assert "given to those who accept its terms" in gated
  assert no_name.startswith("ValueError hf://a..b/--c is no name on the Hub")
  # There is no server any more.
  names = ("hf://some/model", f"hf://some/model@{COMMIT}", "hf://some/other")
  *found, lost = ask(endpoint, tmp_path / "home", *names)
  assert found == [folder, folder]
  assert lost.startswith("FaultError hf://some/other: the Hub does not answer")


@pytest.mark.thorough
def test_a_connection_that_breaks_is_taken_up_or_said(tmp_path):
  origin = make_folder(tmp_path / "origin")
  with served(origin) as (server, endpoint):
    server.breaks = 100
    (broken,) = ask(endpoint, tmp_path / "home", "hf://some/model")
    assert broken.startswith("FaultError hf://some/model: the Hub does not answer"), broken
    server.breaks = 0
    (folder,) = ask(endpoint, tmp_path / "home", "hf://some/model")
    got = Path(folder, "model.safetensors").read_bytes()
    assert got == (origin / "model.safetensors").read_bytes()
    (origin / "model.safetensors").rename(origin / "pytorch_model.bin")
    (no_weights,) = ask(endpoint, tmp_path / "other", "hf://some/model")
  assert no_weights.startswith("ValueError hf://some/model has neither model.")


def test_other_words_are_folders():
  assert hub.local_folder("some/model") == "some/model"
  for name in ("hf://model", "hf://", "hf://a/b/c", "hf:///b"):
    with pytest.raises(ValueError, match="no name on the Hub"):
      hub.local_folder(name)


def test_the_verbs_take_names_where_they_read(tmp_path):
  to = f"--workdir={tmp_path}/run"
  for verb in ("import", "verify"):
    with pytest.raises(ValueError, match=r"^hf://model is no name on the Hub"):
      printed_by("bridge", verb, "--folder=hf://model", to)
  with pytest.raises(ValueError, match="an export writes a local folder"):
    printed_by("bridge", "export", "--folder=hf://some/model", to)
  result = forked("ats_jax.train", *train_flags(tmp_path / "run"), "--init_from=hf://model")
  assert result.error().startswith("hf://model is no name on the Hub"), result
