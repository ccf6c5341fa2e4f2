"""A model that rates texts, trained here, beside that of transformers of its export."""

import dataclasses
import json

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from helpers import CACHED, tiny_config
from in_process import printed_by

from ats_jax.inference.load import load_run
from ats_jax.model.param import params_of
from ats_jax.model.rating import ratings
from ats_jax.store.paths import parse
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import open_run

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("tied", [False, True])
def test_it_rates_as_transformers_does(tied, tmp_path):
  train(config(tmp_path, tied), tmp_path / "run")
  printed_by("bridge", "export", f"--workdir={tmp_path}/run", f"--folder={tmp_path}/out")
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "out", dtype=torch.float32
  )
  assert theirs.config.num_labels == 1
  assert_same_scores(tmp_path / "run", theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_its_adapters_and_head_rate_in_peft_and_begin_another_run(tied, tmp_path):
  """With norms that train too; all that peft does not adapt it saves whole."""
  text = {"step.loss": "cross_entropy", "data.format": "chat", "data.packing": "best_fit"}
  said = [dict(role="user", content="a?"), dict(role="assistant", content="b!")]
  (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 40)
  text["data.paths"] = (str(tmp_path / "chats.jsonl"),)
  train(config(tmp_path, tied, **text), tmp_path / "base")
  exported = lambda name, *flags: printed_by(
    "bridge", "export", f"--workdir={tmp_path}/{name}", f"--folder={tmp_path}/{name}.hf", *flags
  )
  exported("base")
  cfg = config(tmp_path, tied, **{
    "finetune.adapter.name": "lora", "finetune.adapter.rank": 2, "optimizer.learning_rate": 0.03,
    "data.tokenizer": f"{tmp_path}/base.hf/tokenizer.json", "finetune.adapter.train": ("norm",),
    **({"finetune.adapter.targets": ("embedding", "attention")} if tied else {}),
  })  # fmt: skip
  initial = InitialWeights.of(f"{tmp_path}/base.hf")
  state = train(cfg, tmp_path / "run", initial)
  exported("run", "--format=peft")
  theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(
    tmp_path / "run.hf", num_labels=1, dtype=torch.float32
  )
  stated = json.loads((tmp_path / "run.hf" / "adapter_config.json").read_text())
  assert stated["task_type"] == "SEQ_CLS" and "score" in stated["modules_to_save"]
  assert_same_scores(tmp_path / "run", theirs)
  theirs.save_pretrained(tmp_path / "again")
  for folder in ("run.hf", "again"):
    begun = dataclasses.replace(initial, adapter=f"{tmp_path}/{folder}")
    with open_run(cfg, parse(tmp_path / f"from.{folder}"), initial=begun) as run:
      jax.tree.map(
        np.testing.assert_array_equal, params_of(run.state.model), params_of(state.model)
      )


def config(folder, tied, **changes):
  """That of a run which rates pairs."""
  records = [{"prompt": f"{n}", "chosen": "a" * n, "rejected": "b"} for n in range(1, 17)]
  (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  return tiny_config(CACHED | {
    "num_steps": 2, "model.vocab_size": 384, "model.tie_embeddings": tied,
    "data.paths": (str(folder / "pairs.jsonl"),), "data.cache_dir": str(folder / "cache"),
    "data.format": "preference", "data.tokenizer": "bytes", "data.seq_len": 64,
    "step.loss": "reward", "orchestrator.mode": "off", "log.writers": (), "log.progress": False,
  } | changes)  # fmt: skip


def assert_same_scores(folder, theirs):
  """The ratings of a run are those of a model of theirs."""
  theirs.config.pad_token_id = 0  # which no row has
  theirs.eval()
  tokens = np.random.default_rng(0).integers(3, 250, (8, 12)).astype(np.int32)
  with torch.no_grad():
    wanted = theirs(input_ids=torch.tensor(tokens)).logits[:, 0].numpy()
  with load_run(folder) as run:
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    x_BTD, _ = run.model(
      tokens, positions_BT=positions, segment_ids_BT=np.ones_like(tokens),
      rules=run.program.rules(2),
    )  # fmt: skip
    got = np.asarray(ratings(run.model, x_BTD))[:, -1]
  np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
