"""A model that rates texts, trained here, beside that of transformers of its export."""

import json

import numpy as np
import pytest
import torch
import transformers
from helpers import CACHED, tiny_config
from in_process import printed_by

from ats_jax.inference.load import load_run
from ats_jax.model.rating import ratings
from ats_jax.train.loop import train

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("tied", [False, True])
def test_it_rates_as_transformers_does(tied, tmp_path):
  records = [{"prompt": f"{n}", "chosen": "a" * n, "rejected": "b"} for n in range(1, 17)]
  (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  cfg = tiny_config(CACHED | {
    "num_steps": 2, "model.vocab_size": 384, "model.tie_embeddings": tied,
    "data.paths": (str(tmp_path / "pairs.jsonl"),), "data.cache_dir": str(tmp_path / "cache"),
    "data.format": "preference", "data.tokenizer": "bytes", "data.seq_len": 64,
    "step.loss": "reward", "orchestrator.mode": "off", "log.writers": (), "log.progress": False,
  })  # fmt: skip
  train(cfg, tmp_path / "run")
  printed_by("bridge", "export", f"--workdir={tmp_path}/run", f"--folder={tmp_path}/out")
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "out", dtype=torch.float32
  )
  assert theirs.config.num_labels == 1
  tokens = np.random.default_rng(0).integers(3, 250, (8, 12)).astype(np.int32)
  with torch.no_grad():
    wanted = theirs(input_ids=torch.tensor(tokens)).logits[:, 0].numpy()
  with load_run(tmp_path / "run") as run:
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    x_BTD, _ = run.model(
      tokens, positions_BT=positions, segment_ids_BT=np.ones_like(tokens),
      rules=run.program.rules(2),
    )  # fmt: skip
    got = np.asarray(ratings(run.model, x_BTD))[:, -1]
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
