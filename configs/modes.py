"""Pre-training and fine-tuning in one run: text as the source `base`, conversations as `chat`.

Goal: each phase with its own epochs, learning rate and warm-up; change them in a copy of this file.
Command: python -m ats_jax train --config=modes:hybrid_sequential --workdir=runs/both \
  --config.data.sources=base=TEXT,chat=CHATS.jsonl
Variants: base_only and finetuning_only, of one source; hybrid_sequential (default), one after the
other; hybrid_interleaved, one row of text to four of conversations throughout. The model is that of
configs/debug.py.
"""

from ats_jax.config import base_config
from ats_jax.config.schema.mixture import Phase

BASE, CHAT = {"base": 1.0}, {"chat": 1.0}
PHASES = {
  "base_only": (Phase(BASE, epochs=1.0, learning_rate=3e-3, warmup_steps=20),),
  "finetuning_only": (Phase(CHAT, epochs=3.0, learning_rate=3e-4, warmup_steps=5),),
  "hybrid_sequential": (
    Phase(BASE, epochs=1.0, learning_rate=3e-3, warmup_steps=20),
    Phase(CHAT, epochs=3.0, learning_rate=3e-4, warmup_steps=5),
  ),
  "hybrid_interleaved": (
    Phase({"base": 1.0, "chat": 4.0}, epochs=1.0, learning_rate=1e-3, warmup_steps=20),
  ),
}


def get_config(variant: str = "hybrid_sequential"):
  if variant not in PHASES:
    raise ValueError(
      f"configs/modes.py: unknown variant {variant!r}. Choose one of {', '.join(PHASES)}."
    )
  config = base_config()
  config.length = "phases"
  config.model.num_layers = 4
  config.model.d_model = 128
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.d_ff = 384
  config.data.bpe_vocab_size = 1024
  config.data.seq_len = 256
  if variant != "base_only":
    config.data.format = "chat"
    config.data.format.sources = ("chat",)
  config.data.phases = PHASES[variant]
  config.precision.compute_dtype = "float32"
  if len(PHASES[variant]) > 1:
    config.optimizer.phase_moments = "reset"
  return config
