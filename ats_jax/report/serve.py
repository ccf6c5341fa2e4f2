"""A page on this machine that is made anew whenever it is loaded."""

import http.server
from collections.abc import Callable

from absl import logging

from ats_jax.store import paths

HOST = "127.0.0.1"  # a report is for who runs it
REFRESH_SECS = 15


class PageServer(http.server.ThreadingHTTPServer):
  """Serves one page at `/`; browsers hold connections open, so each has a thread.

  Attributes:
    make: makes the page; its argument is the seconds after which a browser loads it again.
  """

  def __init__(self, make: Callable[[int], str], port: int):
    """Listen on a port of this machine; 0 = a free one."""
    super().__init__((HOST, port), _Handler)
    self.make = make


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self) -> None:
    """Make the page, or say what is wrong with the run."""
    name = self.headers.get("Host", "").rpartition(":")[0]
    if self.path != "/" or name not in (HOST, "localhost"):  # another site's name may lead here
      self.send_error(404)
      return
    assert isinstance(self.server, PageServer)
    try:
      code, kind, text = 200, "text/html", self.server.make(REFRESH_SECS)
    except (ValueError, *paths.errors()) as error:  # a file may be in the middle of a change
      code, kind, text = 500, "text/plain", str(error)
    body = text.encode()
    self.send_response(code)
    self.send_header("Content-Type", f"{kind}; charset=utf-8")
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, format: str, *args: object) -> None:
    """Say nothing of each request."""


def serve(make: Callable[[int], str], port: int) -> None:
  """Serve the page until the process is interrupted."""
  with PageServer(make, port) as server:
    logging.info("http://%s:%d shows the report; Ctrl-C ends it", *server.server_address)
    server.serve_forever()
