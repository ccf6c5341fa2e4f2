"""`--adapter`: adapters of peft in turn on one base, beside the base alone."""

import json

import jax
import numpy as np
import pytest
from in_process import printed_by
from train_helpers import on_texts

from ats_jax.bridge.safetensors_file import Slot, Writer, read_header
from ats_jax.inference.load import load_run
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.verbs.adapters import by_name, each
from ats_jax.verbs.evaluate import evaluate_run

LORA = {"finetune__adapter__name": "lora", "finetune__adapter__rank": 2}
KINDS = {
  "few": {"finetune__adapter__targets": ("q", "head"), "finetune__layers": "0"},
  "wide": {"finetune__adapter__rank": 4, "finetune__adapter__scale": "rslora"},
  "dora": {"finetune__adapter__name": "dora", "finetune__adapter__targets": ("down", "embedding")},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A folder with a base of two layers, runs on it, and the adapters of each for peft."""
  folder = tmp_path_factory.mktemp("adapters")
  changes = {"model.num_layers": 2, "data.validation_fraction": 0.3, "optimizer.learning_rate": 0.1}
  config = on_texts(folder, changes)
  train(config(), folder / "base")
  for name, settings in KINDS.items():
    train(config(**LORA | settings), folder / name, InitialWeights.of(str(folder / "base")))
    printed_by(
      "bridge",
      "export",
      f"--workdir={folder}/{name}",
      f"--folder={folder}/peft/{name}",
      "--format=peft",
    )
  return folder


def test_each_is_scored_as_in_its_run_and_the_base_as_before(runs):
  flag = ",".join(f"{runs}/peft/{name}" for name in KINDS)
  told = json.loads(printed_by("evaluate", f"--workdir={runs}/base", f"--adapter={flag}", "--json"))
  alone = evaluate_run(parse(runs / "base"), "latest")[1]
  assert {key: told[f"base/{key}"] for key in alone} == alone
  for name in KINDS:
    own = evaluate_run(parse(runs / name), "latest")[1]
    assert abs(own["eval/loss"] - alone["eval/loss"]) > 1e-3
    assert told[f"{name}/eval/loss"] == pytest.approx(own["eval/loss"], rel=1e-5)


def test_each_answers_as_its_run_does(runs):
  how = ["--prompt=ab", "--max_tokens=12", "--temperature=0"]
  flag = f"--adapter=x={runs}/peft/wide,{runs}/peft/few"
  told = printed_by("generate", f"--workdir={runs}/base", flag, *how)
  said = lambda name: printed_by("generate", f"--workdir={runs}/{name}", *how)
  assert told == f"base:\n{said('base')}x:\n{said('wide')}few:\n{said('few')}"
  prompts = runs / "prompts.txt"
  prompts.write_text("ab\nc\n")
  how = [f"--prompts={prompts}", *how[1:]]
  rows = printed_by("generate", f"--workdir={runs}/base", flag, *how)
  rows = [json.loads(row) for row in rows.splitlines()]
  assert [row["adapter"] for row in rows] == ["base", "base", "x", "x", "few", "few"]
  assert [row["text"] for row in rows[2:4]] == [
    json.loads(row)["text"] for row in said("wide").splitlines()
  ]


@pytest.mark.thorough
def test_each_has_a_dialogue(tmp_path, monkeypatch):
  said = [dict(role="user", content="a?"), dict(role="assistant", content="b!")]
  (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 40)
  config = on_texts(tmp_path, {
    "data.paths": (f"{tmp_path}/chats.jsonl",), "data.format.name": "chat", "data.seq_len": 32,
    "data.tokenizer": "bytes", "optimizer.learning_rate": 0.1,
  })  # fmt: skip
  train(config(), tmp_path / "base")
  train(config(**LORA), tmp_path / "lora", InitialWeights.of(str(tmp_path / "base")))
  of_run = f"--workdir={tmp_path}/lora"
  printed_by("bridge", "export", of_run, f"--folder={tmp_path}/peft", "--format=peft")
  lines = []
  monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0) if lines else "/quit")

  def answers(name, *flags):
    lines[:] = ["a?", "and?"]
    flags = (*flags, "--max_tokens=6", "--temperature=0")
    return printed_by("chat", f"--workdir={tmp_path}/{name}", *flags).splitlines()

  base, lora = answers("base"), answers("lora")
  assert answers("base", f"--adapter=x={tmp_path}/peft") == [
    "base:", base[0], "x:", lora[0], "base:", base[1], "x:", lora[1]
  ]  # fmt: skip


def test_what_has_no_adapter_is_not_copied_and_nothing_is_compiled_again(runs):
  at = lambda model: {
    x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(model)
  }
  with load_run(runs / "base") as run:
    _, (_, one) = each(run, parse(runs / "base"), {"few": runs / "peft" / "few"})
    assert len(at(one.model) - at(run.model)) == 2  # the stack of queries, and the head
    assert jax.tree.structure(one.model) == jax.tree.structure(run.model)
    for new, old in zip(jax.tree.leaves(one.model), jax.tree.leaves(run.model), strict=True):
      assert jax.typeof(new) == jax.typeof(old)


def changed(runs, name, target, *, fields=None, tensors=None):
  """A copy of a folder with other fields and tensors; None takes a tensor away."""
  source = runs / "peft" / name
  target.mkdir()
  config = json.loads((source / "adapter_config.json").read_text()) | (fields or {})
  (target / "adapter_config.json").write_text(json.dumps(config))
  stored = read_header(source / "adapter_model.safetensors")
  arrays = {n: tensor.read() for n, tensor in stored.items()} | (tensors or {})
  arrays = {n: array for n, array in arrays.items() if array is not None}
  slots = [Slot(n, array.dtype, array.shape) for n, array in arrays.items()]
  with Writer(target / "adapter_model.safetensors", slots) as writer:
    for n, array in arrays.items():
      writer.write(n, array)
  return target


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WRONG = {
  "no such matrix": (
    {"tensors": {Q.replace("layers.0", "layers.7") + "A.weight": np.ones((2, 32), np.float32)}},
    r"layers\.7\.self_attn\.q_proj\.lora_A\.weight belongs to no matrix of this \w+ model",
  ),
  "another width": (
    {"tensors": {Q + "A.weight": np.ones((2, 31), np.float32)}},
    r"q_proj\.lora_A\.weight is \[2, 31\] in the folder, \[2, 32\] here\. Name the model",
  ),
  "half of one": ({"tensors": {Q + "B.weight": None}}, r"has 1 tensors of an adapter, expected 2"),
  "no rank": ({"fields": {"r": None}}, r"r is None and lora_alpha 32\.0"),
  "whole weights": ({"fields": {"modules_to_save": ["norm"]}}, "whole weights in place of those"),
  "experts as one": (
    {"fields": {"target_parameters": ["mlp.experts.gate_up_proj"]}},
    r"has 'mlp\.experts\.gate_up_proj', and this program has only those of routers",
  ),
  "a pattern": ({"fields": {"rank_pattern": {"q_proj": 4}}}, "rank_pattern is"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_for_the_base_is_refused_before_anything_is_scored(what, runs, tmp_path):
  changes, message = WRONG[what]
  adapters = {"good": runs / "peft" / "few", "bad": changed(runs, "few", tmp_path / "x", **changes)}
  with load_run(runs / "base") as run, pytest.raises(ValueError, match=message):
    next(each(run, parse(runs / "base"), adapters))


def test_a_run_with_adapters_is_no_base(runs):
  adapters = {"few": runs / "peft" / "few"}
  with load_run(runs / "wide") as run, pytest.raises(ValueError, match=r"fine-tunes .*not a base"):
    next(each(run, parse(runs / "wide"), adapters))


@pytest.mark.parametrize("given", [["base=x"], ["a/x", "b/x"], ["x=a", "x=b"], [""]])
def test_names_of_two_are_refused(given):
  with pytest.raises(ValueError, match=r"--adapter=\S*: its name is that of .* Write NAME=FOLDER"):
    by_name(given)
