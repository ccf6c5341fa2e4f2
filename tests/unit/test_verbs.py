"""`python -m ats_jax VERB`: the table of commands."""

import importlib.util

import pytest
from commands import forked

from ats_jax.__main__ import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_names_a_module_that_can_be_run(verb):
  module, words, what = VERBS[verb]
  spec = importlib.util.find_spec(f"ats_jax.{module}")
  assert spec is not None
  if spec.submodule_search_locations:
    spec = importlib.util.find_spec(f"ats_jax.{module}.__main__")
  assert spec is not None and what[0].islower() and len(what) < 80
  assert isinstance(words, tuple)


def test_a_verb_does_what_its_module_does():
  flags = "--config=configs/debug.py", "--json"
  by_verb, by_module = forked("ats_jax", "plan", *flags), forked("ats_jax.plan", *flags)
  assert by_verb.code == by_module.code == 0
  assert by_verb.out == by_module.out and '"parameters"' in by_verb.out


def test_words_of_a_verb_reach_its_module():
  assert "--only=rope: no such op" not in forked("ats_jax", "tune", "--only=rope").err
  error = forked("ats_jax", "tune", "--only=nothing").error()
  assert "--only=nothing: no such op" in error


def test_the_list_of_verbs_and_a_misspelt_one():
  listing = forked("ats_jax")
  assert listing.code == 0
  assert all(f"  {verb} " in listing.out for verb in VERBS)
  wrong = forked("ats_jax", "trian")
  assert wrong.code == 2
  assert wrong.error().strip() == "no command 'trian'. Did you mean train?"
