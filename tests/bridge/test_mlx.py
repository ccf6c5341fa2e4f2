"""What `bridge export` writes is read by mlx-lm, on a CPU, and computes the same."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.store.paths import parse

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),
]
SIZES = dict(
  vocab_size=300,
  hidden_size=64,
  intermediate_size=128,
  num_hidden_layers=1,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {
  "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
  "mixtral": transformers.MixtralConfig(**SIZES, **EXPERTS),
}
# In a process of its own: mlx has threads and a memory of its own.
READ = """
import sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
mx.set_default_device(mx.cpu)
root, *names = sys.argv[1:]
ids = mx.array(np.load(f"{root}/ids.npy"))
for name in names:
  model, _ = load_model(Path(root, name, "out"))
  np.save(f"{root}/{name}.npy", np.array(model(ids).astype(mx.float32)))
"""


def test_mlx_lm_reads_an_export(tmp_path):
  torch.manual_seed(0)
  ids_BT = np.random.default_rng(0).integers(0, 300, (2, 40))
  np.save(tmp_path / "ids.npy", ids_BT)
  expected = {}
  for name, config in CONFIGS.items():
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / name / "first")
    run = parse(tmp_path / name / "run")
    import_folder(tmp_path / name / "first", run, tokenizer="bytes")
    export(run, tmp_path / name / "out")
    with torch.no_grad():
      expected[name] = theirs(torch.tensor(ids_BT)).logits.numpy()
  command = [sys.executable, "-c", READ, str(tmp_path), *CONFIGS]
  subprocess.run(command, check=True, timeout=300)
  for name, want in expected.items():
    got = np.load(tmp_path / f"{name}.npy")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)
