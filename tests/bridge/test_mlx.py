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
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  max_position_embeddings=128,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {
  "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
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
folder, ids, out = sys.argv[1:]
model, _ = load_model(Path(folder))
np.save(out, np.array(model(mx.array(np.load(ids))).astype(mx.float32)))
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_mlx_lm_reads_an_export(name, tmp_path):
  torch.manual_seed(0)
  theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
  theirs.save_pretrained(tmp_path / "first")
  import_folder(tmp_path / "first", parse(tmp_path / "run"), tokenizer="bytes")
  export(parse(tmp_path / "run"), tmp_path / "out")
  ids_BT = np.random.default_rng(0).integers(0, 300, (2, 40))
  np.save(tmp_path / "ids.npy", ids_BT)
  files = [str(tmp_path / file) for file in ("out", "ids.npy", "logits.npy")]
  subprocess.run([sys.executable, "-c", READ, *files], check=True, timeout=300)
  with torch.no_grad():
    expected = theirs(torch.tensor(ids_BT)).logits.numpy()
  np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-4, atol=1e-5)
