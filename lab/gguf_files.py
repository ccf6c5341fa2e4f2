"""Whether llama.cpp computes and cuts text as `transformers` does, on exported GGUF files.

Two environments, as llama-cpp-python is built from source:

  python -m lab.gguf_files make FOLDER      (ats_jax with the extras torch, hf and gguf)
  python lab/gguf_files.py check FOLDER     (llama-cpp-python alone)

The first makes random models with the fields and kinds of tokenizer of published ones, exports them
as GGUF and writes what `transformers` says of them; the second compares.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

TEXTS = [
  "The cat's hat, isn't it? I'LL go 12345 miles.",
  "  two  spaces\n\n\n\tand a tab \r\n end   ",
  "la forêt, 漢字 und Größe 🙂👍🏽 x²",
  "def f(x):\n    return x ** 2  # done\n",
  "<|im_start|>user\nhello<|im_end|>\n",
  "a",
]
PARTS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = {
  "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
  "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
SIZE = {
  "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
  "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "rope_parameters": PLAIN}
QWEN3_MOE = {"norm_topk_prob": True, "num_experts": 8, "moe_intermediate_size": 32}
# name -> (model_type, fields, how text is cut)
CASES = {
  "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}, "llama3"),
  "llama-3.2-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "llama3"),
  "qwen3": ("qwen3", {"rope_parameters": PLAIN, "tie_word_embeddings": True}, "qwen"),
  "qwen2": ("qwen2", {"rope_parameters": PLAIN}, "qwen"),
  "qwen3-moe": ("qwen3_moe", {**EXPERTS, **QWEN3_MOE}, "qwen"),
  "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4}, "gpt2"),
  "smollm": ("llama", {"rope_parameters": PLAIN}, "digits"),
}  # fmt: skip


def make_tokenizer(folder: Path, kind: str) -> None:
  """Write a tokenizer that cuts text as a published one does, and its special tokens."""
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

  inner = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
  level = lambda own: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
  split = lambda digits: pre_tokenizers.Split(tokenizers.Regex(PARTS % digits), "isolated")
  inner.pre_tokenizer = {
    "llama3": lambda: pre_tokenizers.Sequence([split("{1,3}"), level(False)]),
    "qwen": lambda: pre_tokenizers.Sequence([split(""), level(False)]),
    "digits": lambda: pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), level(True)]
    ),
    "gpt2": lambda: level(True),
  }[kind]()
  if kind == "qwen":
    inner.normalizer = normalizers.NFC()
  inner.decoder = decoders.ByteLevel()
  names = {"llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]}.get(
    kind, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  )
  trainer = trainers.BpeTrainer(
    vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  inner.train_from_iterator([*TEXTS, Path(json.__file__).read_text(encoding="utf-8")], trainer)
  inner.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[-1]}
  if kind == "llama3":
    begin = names[0]
    inner.post_processor = processors.TemplateProcessing(
      single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))]
    )
    config["bos_token"] = begin
  inner.save(str(folder / "tokenizer.json"))
  template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  (folder / "chat_template.jinja").write_text(template)


def make(folder: Path) -> bool:
  """Write model, GGUF and what is right for each case."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  for name, (model_type, fields, kind) in CASES.items():
    torch.manual_seed(0)
    case = folder / name
    size = {k: v for k, v in SIZE.items() if k != "head_dim" or model_type != "qwen2"}
    cfg = transformers.AutoConfig.for_model(model_type, **{**size, **fields})
    model = transformers.AutoModelForCausalLM.from_config(cfg).float().eval()
    with torch.no_grad():
      for key, weight in model.named_parameters():
        if weight.ndim > 1:
          torch.nn.init.normal_(weight, 0, 0.5 if "embed" in key else 2.0 / weight.shape[-1] ** 0.5)
        else:
          torch.nn.init.normal_(weight, 1.0 if "norm" in key else 0.0, 0.3)
    model.save_pretrained(case / "hf")
    make_tokenizer(case / "hf", kind)
    for verb, *words in (
      ("import", f"--folder={case}/hf", f"--workdir={case}/run"),
      ("export", f"--folder={case}/out", f"--workdir={case}/run", "--format=gguf",
       "--dtype=float32"),
    ):  # fmt: skip
      subprocess.run([sys.executable, "-m", "ats_jax", "bridge", verb, *words], check=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(case / "hf")
    prompt = np.random.default_rng(0).integers(0, 500, 200).tolist()
    with torch.no_grad():
      rows = model(torch.tensor([prompt])).logits[0].double().numpy()
      sequence = list(prompt)
      for _ in range(100):  # `generate` would treat the end token apart
        sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    right = {
      "prompt": prompt,
      "greedy": sequence[len(prompt) :],
      "texts": [tokenizer(text)["input_ids"] for text in TEXTS],
      "template": (case / "hf/chat_template.jinja").read_text(),
    }
    np.save(case / "logits.npy", rows)
    (case / "right.json").write_text(json.dumps(right))
  return True


def check(folder: Path) -> bool:
  """Compare llama.cpp with what is right; print a row for each case."""
  import llama_cpp  # pyright: ignore[reportMissingImports]

  print("llama-cpp-python", importlib.metadata.version("llama-cpp-python"))
  good = True
  for name in CASES:
    case = folder / name
    right = json.loads((case / "right.json").read_text())
    model = llama_cpp.Llama(
      str(case / "out/model.gguf"),
      n_ctx=1024,
      logits_all=True,
      verbose=False,
      n_threads=1,
      type_k=llama_cpp.GGML_TYPE_F32,
      type_v=llama_cpp.GGML_TYPE_F32,
    )
    ids = [model.tokenize(t.encode(), add_bos=True, special=True) for t in TEXTS]
    back = [model.detokenize(i, special=True).decode() for i in ids]
    model.eval(right["prompt"])
    rows = np.array(model.scores[: len(right["prompt"])])
    error = float(np.abs(rows - np.load(case / "logits.npy")).max())
    greedy, sequence = [], list(right["prompt"])
    for _ in right["greedy"]:
      token = int(np.argmax(model.scores[len(sequence) - 1]))
      greedy.append(token)
      sequence.append(token)
      model.eval([token])
    equal = sum(a == b for a, b in zip(greedy, right["greedy"], strict=True))
    same_ids = sum(a == b for a, b in zip(ids, right["texts"], strict=True))
    template = model.metadata.get("tokenizer.chat_template") == right["template"]
    ends = all(text in said for text, said in zip(TEXTS, back, strict=True))
    good &= equal == len(greedy) and same_ids == len(TEXTS) and template and ends
    print(
      f"{name:16} greedy {equal}/{len(greedy)}, ids of texts {same_ids}/{len(TEXTS)}, "
      f"text back {ends}, chat template {template}, largest difference of logits {error:.1e} of "
      f"{np.abs(rows).max():.0f}"
    )
  return good


if __name__ == "__main__":
  what, where = sys.argv[1], Path(sys.argv[2])
  sys.exit(0 if {"make": make, "check": check}[what](where) else 1)
