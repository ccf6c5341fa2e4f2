r"""Speed of LoRA in transformers with peft, to compare with `ats-jax bench` on the same GPU.

A model of the Llama family with random weights in bfloat16, LoRA on all of its linear layers,
torch's fused AdamW on the adapters, causal attention by scaled_dot_product_attention, compiled by
torch.compile. Rows are random tokens of one document. Prints a JSON line: tokens a second (median
of the steps behind the first ones) and the peak of memory.
Command: python -m lab.peft_speed [--rows=2] [--seq=4096] [--recompute] [--layers=32] [--steps=10]
"""

import json
import statistics
import time

import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from absl import app, flags

WARMUP = 3  # steps; the first one compiles

_ROWS = flags.DEFINE_integer("rows", 2, "Of a step.", lower_bound=1)
_SEQ = flags.DEFINE_integer("seq", 4096, "Tokens of a row.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 32, "Of the 8.03B shape.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 4096, "A multiple of 128.", lower_bound=128)
_VOCAB = flags.DEFINE_integer("vocab", 128_256, "Tokens of the vocabulary.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 16, "Of the adapters.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 10, "That are timed.", lower_bound=1)
_RECOMPUTE = flags.DEFINE_bool("recompute", False, "Keep no activations of a layer but its input.")
_COMPILE = flags.DEFINE_enum(
  "compile", "model", ["model", "layers", "none"], "What torch.compile is given."
)
_DEVICE = flags.DEFINE_string("device", "cuda", "cuda, or cpu to try it.")


def model_with_adapters():
  """Weights in bfloat16, adapters in float32."""
  heads = _WIDTH.value // 128
  config = transformers.LlamaConfig(
    vocab_size=_VOCAB.value,
    hidden_size=_WIDTH.value,
    intermediate_size=7 * _WIDTH.value // 2,
    num_hidden_layers=_LAYERS.value,
    num_attention_heads=heads,
    num_key_value_heads=max(1, heads // 4),
    use_cache=False,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
  )
  with torch.device(_DEVICE.value):
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  lora = peft.LoraConfig(
    r=_RANK.value, lora_alpha=2 * _RANK.value, target_modules="all-linear", task_type="CAUSAL_LM"
  )
  model = peft.get_peft_model(base, lora)
  if _RECOMPUTE.value:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
  return model.train()


def main(argv: list[str]) -> None:
  """Time steps."""
  del argv
  torch.manual_seed(0)
  on_gpu = _DEVICE.value == "cuda"
  model = model_with_adapters()
  trained = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
  if _COMPILE.value == "model":
    model.compile()
  elif _COMPILE.value == "layers":
    for layer in model.base_model.model.model.layers:
      layer.compile()
  times, losses = [], []
  for step in range(WARMUP + _STEPS.value):
    tokens = torch.randint(_VOCAB.value, (_ROWS.value, _SEQ.value), device=_DEVICE.value)
    if step == WARMUP and on_gpu:
      torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with torch.autocast(_DEVICE.value, torch.bfloat16):
      loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())  # waits for the step
    times.append(time.perf_counter() - began)
  secs = statistics.median(times[WARMUP:])
  row = {
    "rows": _ROWS.value,
    "seq": _SEQ.value,
    "recompute": _RECOMPUTE.value,
    "compile": _COMPILE.value,
    "trained": sum(p.numel() for p in trained),
    "loss": losses[-1],
    "first_secs": times[0],
    "tokens_per_sec": _ROWS.value * _SEQ.value / secs,
    "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
  }
  print(json.dumps(row), flush=True)


if __name__ == "__main__":
  app.run(main)
