"""From a folder to a workdir and back: bit for bit, and after a kill."""

import dataclasses
import gc
import itertools
import json
import signal
import types
import weakref

import jax
import numpy as np
import optax
import pytest
from commands import called, forked
from helpers import CACHED
from hf_folders import BFLOAT16, make_folder, write_tensors
from in_process import printed_by
from runs import arrays

from ats_jax.bridge import safetensors_file
from ats_jax.bridge.convert import config_of, import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.folder import open_model_folder
from ats_jax.bridge.safetensors_file import read_header
from ats_jax.checkpoint import abstract_like
from ats_jax.config import Config
from ats_jax.config.build import resolve, with_settings
from ats_jax.data.tokens.tokenizer import build_tokenizer
from ats_jax.inference import weights
from ats_jax.step.program import make_program
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import ResumePoint, restored_or_new


def assert_same_tensors(one, other):
  one, other = open_model_folder(one).tensors, open_model_folder(other).tensors
  assert one.keys() == other.keys()
  for name in one:
    assert one[name].dtype == other[name].dtype
    got, want = one[name].read().view(np.uint8), other[name].read().view(np.uint8)
    np.testing.assert_array_equal(got, want, err_msg=name)


def assert_same_arrays(one, other):
  (got, step), (want, of) = one, other
  got, want = arrays(got, step), arrays(want, of)
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)


# Tied tables, arrays that share a tensor, and tensors in float32 beside the others.
# `test_families` takes the arrays of every family to its tensors and back.
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_what_goes_in_comes_out_bit_for_bit(kind, tmp_path):
  folder = make_folder(tmp_path / "hf", kind, dtype=BFLOAT16, shards=2)
  report = import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  assert report["resumed"] == 0 and report["parameters"] > 10_000
  out = export(parse(tmp_path / "run"), tmp_path / "out", shard_bytes=15_000)
  assert out["family"] == FAMILIES[kind].name and out["files"] > 2 and out["resumed"] == 0
  assert out["parameters"] == report["parameters"]
  assert_same_tensors(tmp_path / "out", folder)
  assert not (tmp_path / "out.unfinished").exists()


def test_dtypes_and_what_stands_beside_the_weights(tmp_path):
  folder = make_folder(
    tmp_path / "hf", dtype=np.float16, max_position_embeddings=777, initializer_range=0.5
  )
  (folder / "generation_config.json").write_text('{"temperature": 0.6}')
  (folder / "chat_template.jinja").write_text("{{ messages }}")
  (folder / "notes.bin").write_text("no weights, no tokenizer")
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "same")
  assert_same_tensors(tmp_path / "same", folder)
  for name in ("generation_config.json", "chat_template.jinja"):
    assert (tmp_path / "same" / name).read_text() == (folder / name).read_text()
  assert not (tmp_path / "same/notes.bin").exists()
  fields = json.loads((tmp_path / "same/config.json").read_text())
  assert fields["max_position_embeddings"] == 777 and fields["initializer_range"] == 0.5
  assert fields["architectures"] == ["LlamaForCausalLM"] and fields["torch_dtype"] == "float16"

  export(parse(tmp_path / "run"), tmp_path / "other", dtype="bfloat16")
  assert open_model_folder(tmp_path / "other").dtype == "BF16"
  with pytest.raises(ValueError, match=r"other exists"):
    export(parse(tmp_path / "run"), tmp_path / "other")


def test_tensors_of_two_dtypes_keep_all_their_values(tmp_path):
  """A model in bfloat16 with a norm in float32, as routers and norms of some models are."""
  folder = make_folder(tmp_path / "hf", dtype=BFLOAT16)
  tensors = {n: t.read() for n, t in read_header(folder / "model.safetensors").items()}
  fine = np.linspace(1.0, 1.01, len(tensors["model.norm.weight"]), dtype=np.float32)
  assert np.any(fine.astype(BFLOAT16) != fine)
  fine[-1] = 1e6
  write_tensors(folder / "model.safetensors", tensors | {"model.norm.weight": fine})
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out")
  got = read_header(tmp_path / "out/model.safetensors")
  np.testing.assert_array_equal(got["model.norm.weight"].read(), fine)
  for name in tensors.keys() - {"model.norm.weight"}:
    np.testing.assert_array_equal(got[name].read(), tensors[name].astype(np.float32))
  with pytest.raises(ValueError, match="has values that float16 does not hold"):
    export(parse(tmp_path / "run"), tmp_path / "half", dtype="float16")


def test_a_model_in_bfloat16_comes_back_bit_for_bit(tmp_path):
  """Its embedding and norms are kept in float32, and written as they were."""
  folder = make_folder(tmp_path / "hf", dtype=BFLOAT16)
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out")
  got, want = (read_header(f / "model.safetensors") for f in (tmp_path / "out", folder))
  assert got.keys() == want.keys() and len(want) > 5
  for name, tensor in want.items():
    assert got[name].dtype == "BF16"
    np.testing.assert_array_equal(got[name].read(), tensor.read())


def test_an_export_is_of_the_family_of_the_import(tmp_path):
  """A Mistral without a window is a Llama as well; its fields come back as they were."""
  same = {"sliding_window": None, "rope_theta": 10000, "use_mrope": False}
  folder = make_folder(tmp_path / "hf", "mistral", **same)
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  assert export(parse(tmp_path / "run"), tmp_path / "out")["family"] == "Mistral"
  fields = json.loads((tmp_path / "out/config.json").read_text())
  assert fields.items() >= {**same, "model_type": "mistral"}.items()
  assert export(parse(tmp_path / "run"), tmp_path / "as", family="llama")["family"] == "Llama"


def test_experts_without_a_shared_one_are_a_glm(tmp_path):
  """`transformers` has matrices of width 0 there, and says so if they are not in the folder."""
  folder = make_folder(tmp_path / "hf", "glm4_moe", dtype=BFLOAT16, n_shared_experts=0)
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  report = export(parse(tmp_path / "run"), tmp_path / "out", shard_bytes=15_000)
  assert report["family"] == "GLM-4-MoE" and report["files"] > 2
  source, out = open_model_folder(folder).tensors, open_model_folder(tmp_path / "out").tensors
  shapes = {name: out[name].shape for name in out.keys() - source.keys()}
  shared = "model.layers.1.mlp.shared_experts.{}_proj.weight"
  assert shapes == {
    shared.format("gate"): (0, 32), shared.format("up"): (0, 32), shared.format("down"): (32, 0)
  }  # fmt: skip
  import_folder(tmp_path / "out", parse(tmp_path / "again"), tokenizer="bytes")
  assert_same_arrays((tmp_path / "again", 0), (tmp_path / "run", 0))


KILLED = """
import os, sys
from ats_jax.bridge import safetensors_file
from ats_jax.verbs.bridge import COMMANDS
from ats_jax.verbs import cli
kind, method, most = sys.argv[1:4]
sys.argv[1:4] = []
kind = getattr(safetensors_file, kind)
count, right = 0, getattr(kind, method)
def dies(*args):
  global count
  count += 1
  if count > int(most):
    os.kill(os.getpid(), 9)
  return right(*args)
setattr(kind, method, dies)
cli.main("bridge", COMMANDS)
"""


def test_a_killed_import_and_a_killed_export_go_on(tmp_path):
  """Each is killed when it has called a method so many times."""
  (tmp_path / "killed.py").write_text(KILLED)
  folder = make_folder(tmp_path / "hf", "mixtral", shards=2, num_hidden_layers=3)
  run, out = parse(tmp_path / "run"), tmp_path / "out"
  words = (f"--folder={folder}", f"--workdir={run}", "--tokenizer=bytes")
  done = forked(f"{tmp_path}/killed.py", "Tensor", "read", "40", "import", *words)
  assert done.code == -signal.SIGKILL, done.err
  assert not (run / "checkpoints/0").exists()
  resumed = import_folder(folder, run, tokenizer="bytes")["resumed"]
  assert 10 < resumed < 40

  words = (f"--folder={out}", f"--workdir={run}", "--shard_gb=2e-5")
  done = forked(f"{tmp_path}/killed.py", "Writer", "write", "30", "export", *words)
  assert done.code == -signal.SIGKILL, done.err
  assert not out.exists()
  assert export(run, out, shard_bytes=20_000)["resumed"] > 3
  assert_same_tensors(out, folder)


class StopError(Exception):
  """Where a test breaks an import off."""


def test_another_folder_begins_again(tmp_path, monkeypatch):
  one, other = make_folder(tmp_path / "one"), make_folder(tmp_path / "other", dtype=BFLOAT16)
  run, read, count = parse(tmp_path / "run"), safetensors_file.Tensor.read, itertools.count()

  def stops(*args):
    if next(count) == 9:
      raise StopError
    return read(*args)

  with monkeypatch.context() as broken, pytest.raises(StopError):
    broken.setattr(safetensors_file.Tensor, "read", stops)
    import_folder(one, run, tokenizer="bytes")
  assert import_folder(other, run, tokenizer="bytes")["resumed"] == 0
  import_folder(other, parse(tmp_path / "whole"), tokenizer="bytes")
  assert_same_arrays((tmp_path / "run", 0), (tmp_path / "whole", 0))


def test_a_state_is_built_around_the_weights_of_a_folder(mesh, tmp_path, monkeypatch):
  """While they are read only their model is alive; what begins with weights begins with them."""
  folder = make_folder(tmp_path / "hf", dtype=BFLOAT16, num_hidden_layers=6)
  cfg = config_of(open_model_folder(folder), param_dtype="float32", tokenizer="bytes")
  cfg = resolve(with_settings(cfg, {"optimizer.ema_decay": 0.5}), 0)
  program = make_program(cfg)
  keeps = optax.GradientTransformationExtraArgs(lambda params: params, lambda *args: args[:2])
  program = dataclasses.replace(
    program, optimizer=dataclasses.replace(program.optimizer, tx=optax.chain(keeps, keeps))
  )
  nbytes = lambda arrays: sum(array.nbytes for array in arrays)
  read, alive, owners = safetensors_file.Tensor.read, [], []
  gc.collect()
  before = nbytes(jax.live_arrays())

  def looks(tensor):
    alive.append(nbytes(jax.live_arrays()) - before)
    assert not any(owner() is not None for owner in owners), "a tensor that was read is kept"
    array = read(tensor)
    owners.append(weakref.ref(array.base))
    return array

  monkeypatch.setattr(safetensors_file.Tensor, "read", looks)
  tokenizer = build_tokenizer(cfg.data, lambda: [])
  rows = types.SimpleNamespace(info=types.SimpleNamespace(tokenizer=tokenizer))
  state = restored_or_new(program, ResumePoint(), InitialWeights(parse(folder)), rows)
  model = jax.tree.leaves(state.model)
  assert len(owners) == len(open_model_folder(folder).tensors)
  assert max(alive) <= nbytes(model)
  own = {array.unsafe_buffer_pointer() for array in model}
  for tree in (state.ema, *state.opt_state):
    for array, weight in zip(jax.tree.leaves(tree), model, strict=True):
      np.testing.assert_array_equal(array, weight)
      assert array.unsafe_buffer_pointer() not in own, "a step donates the state"
  types_of = lambda tree: [(x.shape, x.dtype, x.sharding.spec) for x in jax.tree.leaves(tree)]
  assert types_of(state) == types_of(abstract_like(program.init(abstract=True), mesh))


OWN = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}  # of bytes
THEIRS = {"bos_token_id": 3, "eos_token_id": [5, 6], "pad_token_id": None}


@pytest.mark.parametrize(
  ("named", "written"),
  [
    ({}, {**OWN, "max_position_embeddings": Config().data.seq_len}),
    ({"eos_token_id": [5, 6]}, {**OWN, "eos_token_id": [5, 6]}),
    ({**THEIRS, "max_position_embeddings": 777}, {**THEIRS, "max_position_embeddings": 777}),
  ],
)
def test_ids_and_the_context_length_come_back(named, written, tmp_path):
  """What a folder does not name is that of the tokenizer and of the settings."""
  folder = make_folder(tmp_path / "hf", **named)
  import_folder(folder, parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out")
  fields = json.loads((tmp_path / "out/config.json").read_text())
  assert {name: fields[name] for name in written} == written


def test_a_folder_is_opened_once(tmp_path, monkeypatch):
  folder = make_folder(tmp_path / "hf")
  opened, read = [], weights.open_model_folder
  monkeypatch.setattr(weights, "open_model_folder", lambda *a: opened.append(a) or read(*a))
  init = InitialWeights(parse(folder))
  init.check(config_of(init.source, tokenizer="bytes"))
  init.keep_companions(parse(tmp_path / "run"))
  assert len(opened) == 1 and (tmp_path / "run/huggingface/config.json").is_file()


@pytest.mark.thorough
def test_a_run_begins_with_a_folder(tmp_path):
  """Step 1 begins with its weights, and one setting that differs is named."""
  folder = make_folder(tmp_path / "hf", max_position_embeddings=4096)
  run = parse(tmp_path / "run")
  (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
  settings = CACHED | {
    "model.vocab_size": 272, "model.num_layers": 2, "model.d_model": 32, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.d_ff": 48, "data.tokenizer": "bytes", "num_steps": 1,
    "optimizer.learning_rate": 0.0, "precision.compute_dtype": "float32", "log.writers": (),
    "optimizer.warmup_steps": 0, "data.paths": (f"{tmp_path}/text.txt",), "sample.max_tokens": 0,
    "data.cache_dir": f"{tmp_path}/cache", "data.validation_fraction": 0.0, "data.seq_len": 16,
    "log.progress": False, "data.batch_size": 8,
  }  # fmt: skip
  begin = lambda to, **more: train(
    with_settings(Config(), settings | more), to, InitialWeights(parse(folder))
  )
  with pytest.raises(ValueError, match=r"--config\.model\.norm_eps=1e-06 \(here 1e-05\)"):
    begin(parse(tmp_path / "wrong"), **{"model.norm_eps": 1e-5})
  with pytest.raises(ValueError, match=r"data\.tokenizer=bpe would train another tokenizer"):
    begin(parse(tmp_path / "wrong"), **{"data.tokenizer": "bpe"})
  (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
  begin(run)
  export(run, tmp_path / "exported")
  exported = tmp_path / "exported"
  assert (exported / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'
  fields = json.loads((exported / "config.json").read_text())
  assert fields["max_position_embeddings"] == 4096, "a server takes it for the longest text"
  import_folder(folder, parse(tmp_path / "imported"), tokenizer="bytes")
  assert_same_arrays((tmp_path / "run", 1), (tmp_path / "imported", 0))


def test_the_commands(tmp_path):
  folder, run = make_folder(tmp_path / "hf", "qwen2"), tmp_path / "run"
  words = ("bridge", "import", f"--folder={folder}", f"--workdir={run}", "--tokenizer=bytes")
  report = printed_by(*words)
  assert "Qwen2: " in report and "--init_from=" in report
  text = called("generate", f"--workdir={run}", "--prompt=ab", "--max_tokens=2")
  assert text.code == 0, text.err
  with pytest.raises(ValueError, match=r"no validation split\. Give text by --paths"):
    printed_by("evaluate", f"--workdir={run}")
  with pytest.raises(ValueError, match="holds checkpoints already"):
    printed_by(*words)
  assert "import" in forked("ats_jax", "bridge").error()
  with pytest.raises(ValueError, match="--folder is missing"):
    printed_by("bridge", "import")
  with pytest.raises(ValueError, match="holds no run"):
    printed_by("bridge", "export", f"--workdir={tmp_path / 'no'}", f"--folder={tmp_path / 'x'}")
