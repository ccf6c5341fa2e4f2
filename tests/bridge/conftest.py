"""Models of `transformers`, saved once a session; nothing here runs without `torch` and `hf`."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

try:
  import torch
  import transformers  # noqa: F401
except ImportError:
  collect_ignore_glob = ["test_*.py"]
else:
  torch.set_num_threads(2)


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
  """Name of a case -> its source and reference."""
  import hf_gate

  root = tmp_path_factory.mktemp("cases")
  return lambda name: hf_gate.case(name, root / name)
