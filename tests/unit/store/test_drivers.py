"""The drivers of stores themselves, each that is installed, and a server that answers as a store.

Whatever type of error a driver makes of a refusal, a command says it in one line.
"""

import http.server
import importlib.util
import json
import threading

import pytest
from commands import forked

from ats_jax.store import paths

MISSING = {scheme for scheme, name in paths.DRIVERS.items() if not importlib.util.find_spec(name)}
NOBODY = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true"}
SETTINGS = {
  "gs": {"STORAGE_EMULATOR_HOST": "{}"},
  "s3": {
    "AWS_ENDPOINT_URL": "{}",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "us-east-1",
  },
  "az": {
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;BlobEndpoint={}/a;"
    "AccountName=a;AccountKey=YQ==;"
  },
}
TAKEN = {"gs": 412, "s3": 412, "az": 409}  # the status of a write to what must not be there, and is


@pytest.fixture
def server():
  """A server whose answers have the statuses `reads` and `writes`; a write makes `reads` `then`."""

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
      self.rfile.read(int(self.headers.get("content-length") or 0))
      status = server.reads
      if self.command in ("PUT", "POST"):
        status, server.reads = server.writes, server.then
      body = json.dumps({"error": {"code": status, "message": "no entry"}}).encode()
      self.send_response(status)
      self.send_header("content-type", "application/json")
      self.send_header("content-length", str(len(body)))
      if status == 409:
        self.send_header("x-ms-error-code", "BlobAlreadyExists")
      self.end_headers()
      if self.command != "HEAD":
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = answer

    def log_message(self, format, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.reads = server.then = server.writes = 404
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield server
  server.shutdown()
  thread.join()
  server.server_close()


def said(server, scheme, module, *flags, known=True):
  """What a command says of the workdir `bucket/run`."""
  if scheme in MISSING:
    pytest.skip(f"{paths.DRIVERS[scheme]} is not installed")
  url = f"http://127.0.0.1:{server.server_port}"
  settings = {k: v.format(url) for k, v in SETTINGS[scheme].items()} if known else {}
  flags = (*flags, f"--workdir={scheme}://bucket/run")
  first, *rest = forked(module, *flags, **NOBODY, **settings).error().splitlines()
  assert rest == ["(ATS_TRACEBACK=1 shows where.)"]
  return first


@pytest.mark.parametrize(
  ("scheme", "status", "why"),
  [
    ("gs", 401, "HttpError: no entry, 401"),
    ("gs", 403, "OSError: Forbidden: b/bucket/o no entry"),
    ("s3", 403, "PermissionError: Forbidden"),
    ("az", 403, "HttpResponseError: "),
  ],
)
def test_a_store_that_refuses(server, scheme, status, why):
  server.reads = status
  for command in (
    (
      "ats_jax",
      "evaluate",
    ),
    ("ats_jax.train", "--config=configs/debug.py"),
  ):
    line = said(server, scheme, *command)
    assert line.startswith(f"{scheme}://bucket/run cannot be reached: {why}")
    assert line.endswith(". Check its name, your credentials and the network.")


@pytest.mark.parametrize(
  ("scheme", "why"),
  [
    ("s3", "NoCredentialsError: Unable to locate credentials"),
    ("az", "ValueError: unable to connect to account for Must provide either a connection_string"),
  ],
)
def test_a_store_without_credentials(server, scheme, why):
  line = said(server, scheme, "ats_jax", "evaluate", known=False)
  assert line.startswith(f"{scheme}://bucket/run cannot be reached: {why}")


@pytest.mark.parametrize("scheme", paths.DRIVERS)
def test_a_store_that_may_be_read_only(server, scheme):
  server.writes = 403
  line = said(server, scheme, "ats_jax.train", "--config=configs/debug.py")
  assert line.startswith(f"workdir {scheme}://bucket/run cannot be used: ")
  assert line.endswith(". Choose another --workdir.")


@pytest.mark.parametrize("scheme", paths.DRIVERS)
def test_a_lock_that_another_process_has_made_in_this_moment(server, scheme):
  server.writes, server.then = TAKEN[scheme], 200
  line = said(server, scheme, "ats_jax.train", "--config=configs/debug.py")
  assert line.startswith(f"another process trains in {scheme}://bucket/run now")
