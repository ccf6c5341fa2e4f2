r"""Speed of `generate` in transformers, to compare with `lab.decode_speed` on the same GPU.

A model of the Llama family with random weights in bfloat16. Prints a JSON line: tokens a second of
all rows together, without the time of the prompts (a run of one token, which is taken off).
Command: python -m lab.decode_rivals [--rows=1] [--prompt=256] [--tokens=256] [--compile] \
  [--layers=16] [--width=2048] [--heads=32] [--ff=8192]
"""

import json
import statistics
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from absl import app, flags

_ROWS = flags.DEFINE_integer("rows", 1, "Prompts at once.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 256, "Tokens of each.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 256, "Drawn of each.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 16, "Of the model.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 2048, "d_model.", lower_bound=64)
_HEADS = flags.DEFINE_integer("heads", 32, "A quarter of them of keys and values.", lower_bound=4)
_FF = flags.DEFINE_integer("ff", 8192, "Width of the feed-forward.", lower_bound=64)
_VOCAB = flags.DEFINE_integer("vocab", 128_256, "Tokens of the vocabulary.", lower_bound=1)
_COMPILE = flags.DEFINE_bool("compile", False, "A static cache, and torch.compile of its step.")
_DEVICE = flags.DEFINE_string("device", "cuda", "cuda, or cpu to try it.")


def main(argv: list[str]) -> None:
  """Generate a few times, and print the median."""
  del argv
  config = transformers.LlamaConfig(
    vocab_size=_VOCAB.value,
    hidden_size=_WIDTH.value,
    intermediate_size=_FF.value,
    num_hidden_layers=_LAYERS.value,
    num_attention_heads=_HEADS.value,
    num_key_value_heads=_HEADS.value // 4,
    max_position_embeddings=_PROMPT.value + _TOKENS.value,
    attn_implementation="sdpa",
  )
  with torch.device(_DEVICE.value):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  model = model.eval()
  ids = torch.randint(0, _VOCAB.value, (_ROWS.value, _PROMPT.value), device=_DEVICE.value)
  options = {"cache_implementation": "static"} if _COMPILE.value else {}

  def seconds(tokens: int) -> float:
    if _DEVICE.value == "cuda":
      torch.cuda.synchronize()
    began = time.perf_counter()
    made = model.generate(
      ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
      do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
    made.cpu()
    return time.perf_counter() - began

  began = time.perf_counter()
  for _ in range(2):  # the first ones compile
    seconds(_TOKENS.value)
    seconds(1)
  first = time.perf_counter() - began
  whole = statistics.median(seconds(_TOKENS.value) for _ in range(3))
  begin = statistics.median(seconds(1) for _ in range(3))
  rate = _ROWS.value * (_TOKENS.value - 1) / (whole - begin)
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  facts = {"rows": _ROWS.value, "compile": _COMPILE.value, "prompt": _PROMPT.value}
  facts |= {"tokens_per_sec": round(rate, 1), "first_secs": round(first, 1)}
  print(json.dumps(facts | versions))


if __name__ == "__main__":
  app.run(main)
