"""Lists and tables as settings: in files, on the command line, in config.json."""

import json

import pytest
from absl import flags
from refusals import wrongly_refused

from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.file import load_file
from ats_jax.config.names import to_dict
from ats_jax.config.schema.setting import Table
from ats_jax.ops.registry import asked_for
from ats_jax.verbs.cli import ConfigFlag


def from_flags(*words):
  values = flags.FlagValues()
  config = ConfigFlag(values)
  values(["train", *(f"--config.{word}" for word in words)])
  return config.value


def test_lists_and_tables_of_a_file():
  config = base_config()
  config.log.writers = ["jsonl"]
  config.sample.stop = ("\n\n", "a,b")
  config.ops.kernels = {"attention": "xla"}
  config.ops.kernels["rms_norm.backward"] = "cuda"
  config.step.compiler_options["xla_gpu_enable_command_buffer"] = "FUSION,CUBLAS"
  cfg = from_config_dict(config)
  assert cfg.log.writers == ("jsonl",) and cfg.sample.stop == ("\n\n", "a,b")
  assert cfg.ops.kernels == {"attention": "xla", "rms_norm.backward": "cuda"}
  assert cfg.step.compiler_options == {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS"}
  assert isinstance(cfg.ops.kernels, Table) and isinstance(hash(cfg), int)
  assert Config().ops.kernels == base_config().ops.kernels == {}  # what a file adds stays in it
  assert from_config_dict(json.loads(json.dumps(to_dict(cfg)))) == cfg


def test_a_preset_takes_a_slot_of_an_op():
  config = load_file("b7")
  config.ops.kernels["rms_norm.backward"] = "xla"
  assert from_config_dict(config).ops.kernels == {"rms_norm.backward": "xla"}


def test_lists_and_tables_of_the_command_line():
  cfg = from_flags(
    "log.writers=console,jsonl",
    "sample.stop=\n\n, a,b",
    "ops.kernels=attention=xla,rms_norm.backward=xla",
    "step.compiler_options=xla_gpu_autotune_level=1",
  )
  assert cfg.log.writers == ("console", "jsonl") and cfg.sample.stop == ("\n\n", "a", "b")
  assert cfg.ops.kernels == {"attention": "xla", "rms_norm.backward": "xla"}
  assert cfg.step.compiler_options == {"xla_gpu_autotune_level": "1"}
  assert from_flags("log.writers=").log.writers == ()
  with pytest.raises(ValueError, match=r"--config.ops.kernels: 'swiglu' is not name=value"):
    from_flags("ops.kernels=swiglu")


def test_text_is_no_list_and_no_table():
  cases = [
    ({"log": {"writers": "console,jsonl"}}, "log.writers must be a list of str, got 'console,"),
    ({"extensions": "mine.py"}, "extensions must be a list of str, got 'mine.py'"),
    ({"sample": {"stop": [1]}}, r"sample.stop\[0\] must be str, got 1"),
    ({"ops": {"kernels": "attention=xla"}}, "ops.kernels must be a table of names and strs"),
    ({"step": {"compiler_options": {"xla_a": True}}}, r"compiler_options\['xla_a'\] must be str"),
  ]
  assert not wrongly_refused(from_config_dict, cases, lambda words: f"^config: .*{words}")


def test_what_is_said_of_a_slot_goes_before_its_op_in_any_order():
  asked = [
    asked_for(from_config_dict({"ops": {"kernels": dict(order)}}))
    for order in (
      [("swiglu", "xla"), ("swiglu.backward", "cuda")],
      [("swiglu.backward", "cuda"), ("swiglu", "xla")],
    )
  ]
  assert asked[0] == asked[1]
  assert asked[0]["swiglu.forward"][1] == "xla" and asked[0]["swiglu.backward"][1] == "cuda"
