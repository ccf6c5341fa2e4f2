"""Every range, every choice, and every rule that joins several settings."""

from typing import get_args, get_origin

from helpers import enabling
from refusals import wrongly_refused

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.names import all_settings
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table

# A setting that several kinds of a section declare is taken of the first.
KNOWN = {name: known[0] for name, known in all_settings().items()}
SETTINGS = {name: known.field for name, known in KNOWN.items()}
WITH_LOW = [n for n, f in SETTINGS.items() if f.metadata["low"] is not None]
WITH_HIGH = [n for n, f in SETTINGS.items() if f.metadata["high"] is not None]
WITH_CHOICES = [n for n, f in SETTINGS.items() if f.metadata["choices"]]
FLOATS = [n for n, f in SETTINGS.items() if f.type is float]


# What a choice needs beside it.
STAGED = {"mesh.stage": 2, "step.accum_steps": 2}
TWO_PHASES = {
  "data.sources": {"a": ("a.txt",)},
  "data.phases": (Phase(Table(a=1), steps=3), Phase(Table(a=1))),
}
TAUGHT = {"step.loss.name": "distill", "step.loss.teacher": "teacher"}
OF_PAIRS = {"step.loss.name": "dpo", "data.format.name": "preference"}
BESIDE = {
  "dots": STAGED,
  "names": STAGED,
  "qkv": STAGED,
  "attention": STAGED,
  "random": {"data.sources": {"a": ("a.txt",), "b": ("b.txt",)}},
  "cudnn": {"precision.compute_dtype": "bfloat16"},
  "preference": {"step.loss.name": "dpo"},
  "dpo": {"data.format.name": "preference"},
  "orpo": {"data.format.name": "preference"},
  "simpo": {"data.format.name": "preference"},
  "reward": {"data.format.name": "preference"},
  "labelled": {"step.loss.name": "kto"},
  "kto": {"data.format.name": "labelled"},
  "distill": {"step.loss.teacher": "teacher"},
  "forward": TAUGHT,
  "reverse": TAUGHT,
  "jsd": TAUGHT,
  "sigmoid": OF_PAIRS,
  "sigmoid_norm": OF_PAIRS,
  "ipo": OF_PAIRS,
  "static": {"precision.compute_dtype": "float16"},
  "dynamic": {"precision.compute_dtype": "float16"},
  "llama3": {"model.rope_scaling.original_len": 64},
  "schedule_free": {"optimizer.schedule.name": "constant"},
  "yarn": {"model.rope_scaling.original_len": 64},
  "all": {"model.qk_norm": True},
  "phases": {"data.sources": {"a": ("a.txt",)}, "data.phases": (Phase(Table(a=1), steps=3),)},
  "flops": {"train_flops": 1e15},
  "keep": TWO_PHASES,
  "reset": TWO_PHASES,
  "streaming": {"data.validation_fraction": 0.0, "eval.bigram_baseline": False},
  "last": {"data.packing": "best_fit"},
}


def build(changes):
  config = base_config()
  for name in changes:
    if (known := KNOWN[name]).kinds:
      changes = {f"{known.section.path}.name": known.kinds[0]} | changes
  config.update_from_flattened_dict(changes)
  return from_config_dict(config)


def valued(field, number):
  """A value of a setting: the number, or a table with it."""
  if get_origin(field.type) is Table:
    return Table(a=get_args(field.type)[0](number))
  return field.type(number)


def said(name, number):
  value = valued(SETTINGS[name], number)
  return rf"{name}\['a'\]={value['a']}" if isinstance(value, Table) else f"{name}={value}"


def outside(names, bound, by):
  """Names and values that are just outside of their bounds, as settings."""
  return [(name, SETTINGS[name].metadata[bound] + by) for name in names]


def built(case):
  name, number = case
  return build({name: valued(SETTINGS[name], number)})


def test_what_is_outside_of_its_range_is_refused():
  for names, bound, by, words in (
    (WITH_LOW, "low", -1, "small: at least"), (WITH_HIGH, "high", 1, "large: at most")
  ):  # fmt: skip
    cases = [(case, rf"^{said(*case)} is too {words}") for case in outside(names, bound, by)]
    assert not wrongly_refused(built, cases)


def test_a_number_that_is_not_finite_is_refused():
  values = ("nan", "inf", "-inf")
  cases = [((n, float(v)), f"^{n}={v} is not a finite number") for n in FLOATS for v in values]
  assert not wrongly_refused(lambda case: build(dict([case])), cases)


def test_choices_are_taken_and_all_else_is_refused():
  choices = {name: SETTINGS[name].metadata["choices"] for name in WITH_CHOICES}
  cases = [
    (name, f"{name}='nonsense' is unknown. Choose one of: {', '.join(found)}.")
    for name, found in choices.items()
  ]
  assert not wrongly_refused(lambda name: build({name: "nonsense"}), cases)
  for name, choice in ((name, choice) for name, found in choices.items() for choice in found):
    assert build(enabling(name) | {name: choice} | BESIDE.get(choice, {})), (name, choice)


def test_rules_that_join_settings():
  cases = [
    ({"seed": 2**32}, r"^seed=4294967296 is too large: at most 4294967295 \("),  # all digits
    ({"model.num_kv_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=4"),
    ({"mesh.stage_rounds": 2}, "mesh.stage_rounds=2 does nothing with mesh.stage=1"),
    ({"step.remat_stages": "dots"}, "step.remat_stages=dots does nothing with mesh.stage=1"),
    ({"model.d_model": 130}, "model.num_heads=4 does not divide model.d_model=130"),
    ({"model.head_dim": 7}, "head dimension is 7"),
    (
      {"model.num_heads": 6, "model.num_kv_heads": 6, "model.head_dim": 8, "mesh.tensor": 4},
      "mesh.tensor=4 does not divide model.num_heads=6",
    ),
    ({"model.num_kv_heads": 2, "mesh.tensor": 4}, "mesh.tensor=4 does not divide model.num_kv_h"),
    ({"mesh.data": 0}, "mesh.data=0: use a positive number, or -1"),
    ({"step.accum_steps": 3}, "step.accum_steps=3 does not divide data.batch_size=16"),
    (
      {"optimizer.warmup_steps": 401},
      "optimizer.warmup_steps=401 exceeds num_steps=400. .* optimizer.warmup_fraction",
    ),
    (
      {"orchestrator.mode": "act", "orchestrator.snapshot_gb": 0.0, "checkpoint.every_steps": 400},
      "checkpoint.every_steps=400 of num_steps=400 leave nothing to roll back to",
    ),
    ({"sample.prompt": "ab\udcff"}, "sample.prompt is not UTF-8 at character 2"),
    ({"sample.stop": ("a", "\udcff")}, "sample.stop is not UTF-8 at character 0"),
    ({"optimizer.ema_decay": 1.0}, "optimizer.ema_decay=1 keeps the first weights"),
    ({"optimizer.b1": 1.0}, "optimizer.b1: a decay of 1 never takes a gradient in"),
    ({"optimizer.eps": 0.0}, "optimizer.eps=0 divides 0 by 0"),
    (
      {"optimizer.b2": 0.81},
      "optimizer.b1=0.9 with optimizer.b2=0.81: .* no bound .* Use a b2 above b1.2 = 0.81, or",
    ),
    (
      {"optimizer.name": "muon", "optimizer.b2_by_role": {"head": 0.5}},
      "optimizer.b2=0.5 of parameters of role head",
    ),
    (
      {"log.writers": ("console", "xml")},
      "log.writers='xml' is unknown. Choose one of: console, jsonl",
    ),
    (
      {"precision.fp8": True, "precision.fp8_keep_first": 3, "model.num_layers": 4},
      "fp8_keep_first=3 and fp8_keep_last=1 leave none of 4 layers for 8 bits",
    ),
    ({"precision.fp8": True, "data.seq_len": 100}, "needs multiples of 16: data.seq_len is 100"),
    (
      {"precision.fp8": True, "model.d_ff": 88, "mesh.tensor": 2},
      "needs multiples of 16: model.d_ff is 44 on a device",
    ),
    (
      {"precision.compute_dtype": "float16", "precision.param_dtype": "bfloat16"},
      "param_dtype=bfloat16 with precision.compute_dtype=float16: weights",
    ),
    (
      {"precision.compute_dtype": "float16", "precision.fp8": True},
      "fp8 with precision.compute_dtype=float16: products in 8 bits overflow",
    ),
    ({"precision.loss_scale.name": "static"}, "loss_scale=static is for gradients in float16"),
    (
      {"precision.compute_dtype": "auto", "precision.loss_scale.scale": 3.0},
      "loss_scale.scale=3 rounds gradients. Use a power of two, such as 4",
    ),
    ({"precision.tf32": False}, "tf32=False does nothing with precision.compute_dtype=bfloat16"),
    ({"checkpoint.local_every": 10}, r"local_every=10 needs a folder .* Set checkpoint\.local_d"),
    ({"checkpoint.local_dir": "/tmp/x"}, r"local_dir=/tmp/x does nothing with .*local_every=0"),
  ]
  assert not wrongly_refused(build, cases)


def test_what_is_just_legal(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  for changes in (
    {"model.d_model": 130, "model.head_dim": 32},
    {"mesh.data": 1},
    {"optimizer.warmup_steps": 400},
    {"optimizer.warmup_fraction": 1.0},
    {"log.writers": ()},
    {"log.writers": ("jsonl", "csv")},
    {"data.tokenizer": str(tmp_path / "tokenizer.json")},
    {"mesh.tensor": 2, "mesh.fsdp": 4},
    {"step.accum_steps": 16},
    {"seed": 2**32 - 1},
    {"num_steps": 2**31 - 1},
    {"checkpoint.local_every": 10, "checkpoint.local_dir": "/tmp/x"},
  ):
    assert build(changes)
