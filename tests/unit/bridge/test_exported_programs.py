"""Programs of the forward pass: what is refused before anything is traced."""

import importlib.util

import pytest

from ats_jax.bridge import programs


def test_stablehlo_without_its_package(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="pip install flatbuffers"):
    programs.stablehlo(None, None, None, tmp_path, rows=1, seq_len=8, opset=20)
