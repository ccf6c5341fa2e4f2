"""Programs of two commits are told apart by what they compute, not by numbers of functions."""

import os

import pytest

FUNCTION = """  func.func private @{name}(%arg0: tensor<f32>) -> tensor<f32> {{
    %0 = stablehlo.{op} %arg0 : tensor<f32>
    return %0 : tensor<f32>
  }}
"""


@pytest.fixture
def multiset(monkeypatch):
  for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # which the module sets
    monkeypatch.setenv(name, os.environ[name])
  from lab.programs import multiset

  return multiset


def program(calls, **functions):
  lines = [f"    %{i} = call @{name}(%arg0)\n" for i, name in enumerate(calls)]
  bodies = [FUNCTION.format(name=name, op=op) for name, op in functions.items()]
  return "".join(["module {\n", "  func.func public @f0() {\n", *lines, "  }\n", *bodies, "}\n"])


def test_functions_are_known_by_their_content(multiset):
  before = multiset(program(["f1", "f2"], f1="sine", f2="cosine"))
  assert multiset(program(["f2", "f1"], f1="sine", f2="cosine")) == before
  assert multiset(program(["f1", "f2"], f1="cosine", f2="sine")) == before
  assert multiset(program(["f1", "f1"], f1="sine", f2="cosine")) != before
  assert multiset(program(["f1", "f2"], f1="sine", f2="tan")) != before
