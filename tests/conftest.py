"""Eight CPU devices, caches that are not the user's own, one mesh fixture."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

from program_cache import ProgramCounter, kept_programs
from xla_flags import QUICK, devices

# Before jax is imported. GPU tests run with JAX_PLATFORMS=cuda in the environment.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{devices(8)} {QUICK} {os.environ.get('XLA_FLAGS', '')}".strip()
# One folder for the session: pytest-xdist's workers inherit it from the process that starts them.
_OWN_CACHE = "ATS_TEST_CACHE" not in os.environ
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(kept_programs())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if _OWN_CACHE:
  os.environ["ATS_TEST_CACHE"] = tempfile.mkdtemp(prefix="ats_jax_tests_")
os.environ["XDG_CACHE_HOME"] = os.environ["ATS_TEST_CACHE"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  # As a script has it behind "&"; what tests start and interrupt would inherit that.
  signal.signal(signal.SIGINT, signal.default_int_handler)

import bucket as bucket_module  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from helpers import make_test_mesh  # noqa: E402
from quick import is_quick  # noqa: E402

ONLY = pytest.StashKey[set[Path] | None]()

# Compilation makes the first example slow; the seed is fixed so that CI does not flicker.
hypothesis.settings.register_profile("ats", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ats")


def pytest_addoption(parser):
  parser.addoption("--quick", action="store_true", help="only files that compile and start nothing")
  parser.addoption(
    "--only", metavar="LIST", help="a file of the names of test files: collect no others"
  )


def pytest_configure(config):
  config.pluginmanager.register(ProgramCounter(), "programs")
  config.stash[ONLY] = None
  if listed := config.getoption("only"):
    config.stash[ONLY] = {config.rootpath / name for name in Path(listed).read_text().split()}


def pytest_ignore_collect(collection_path, config):
  if not collection_path.match("test_*.py"):
    return None
  only = config.stash[ONLY]
  if only is not None and collection_path not in only:
    return True
  return (config.getoption("quick") and not is_quick(collection_path)) or None


def pytest_sessionfinish(session, exitstatus):
  if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("only"):
    session.exitstatus = pytest.ExitCode.OK  # the listed files may have no test of the kind


def pytest_collection_modifyitems(items):
  """Put files of whole runs first: one that begins last keeps a single process busy at the end."""
  folder = Path(__file__).parent
  items.sort(key=lambda item: item.path.parent not in (folder / "e2e", folder / "unit"))


@pytest.fixture(scope="module", autouse=True)
def _what_files_leave():
  """Programs and their traces stay in jax's caches: later collections would go through them all.

  A mesh may not stay: tests of other files would run on it.
  """
  yield
  gc.collect()
  gc.freeze()
  assert jax.sharding.get_abstract_mesh().empty, "a test of this file leaves a mesh set"


@pytest.fixture
def mesh():
  """A mesh of one device, set for the test."""
  one = make_test_mesh(1, 1, 1)
  with jax.set_mesh(one):
    yield one


@pytest.fixture
def compiled_names():
  """The names of the programs that jax compiles, or finds in its cache on disk, in this test."""
  names = []

  def listen(event, _, **about):
    if event == "/jax/core/compile/backend_compile_duration":
      names.append(about["fun_name"])

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def asked():
  """What a hook asks for in this test, by the step of the look."""
  from ats_jax.orchestrator import hooks

  wanted = {}
  hook = hooks.register(lambda look: wanted.get(look.step))
  yield wanted
  hooks.unregister(hook)


@pytest.fixture
def bucket():
  """An empty object store behind gs://."""
  with bucket_module.installed() as store:
    yield store


def pytest_unconfigure():
  if _OWN_CACHE:
    shutil.rmtree(os.environ["ATS_TEST_CACHE"], ignore_errors=True)
