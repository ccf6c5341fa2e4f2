"""Twelve families by the commands: import, verify, train, export, and the same tokens elsewhere.

For each family a small random model of `transformers` is saved as a folder: its config.json has the
fields of a published one (tests/data/published_configs.json) with smaller sizes, its weights are in
bfloat16, and tokenizer, chat template and generation settings are of the family's kind. Then
`bridge import`, `bridge verify`, `config import`, 20 steps of `train --init_from` on the sources of
this Python's json package, and `bridge export`. The export is loaded in `transformers`: greedy
tokens behind a text beside those of the checkpoint, ids of texts and of a conversation beside
those of the folder, and what stands beside the weights. A row a family is added to a CSV as it is
known. Needs the extras `torch` and `hf`.
Command: python -m lab.families --out=FILE.csv [--only=llama,gpt_oss] [--in=FOLDER]
"""

import contextlib
import csv
import datetime
import gc
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from ats_jax.inference.generator import generate_tokens
from ats_jax.inference.load import load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.store import paths
from lab.child import REPOSITORY
from lab.compiled_program import commit
from lab.gguf_files import TEXTS, make_tokenizer

PUBLISHED = REPOSITORY / "tests/data/published_configs.json"
CORPUS = Path(json.__file__).parent
PROMPT = "def encode(self, value):\n    return "
TOKENS = 64  # that are continued greedily
STEPS = 20
# What takes the place of a published size; of fields that a family has.
SMALL = {
  "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
  "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
  "query_pre_attn_scalar": 16, "sliding_window": 32, "first_k_dense_replace": 1,
  "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
  "v_head_dim": 16, "experts_per_token": 2,
}  # fmt: skip
WINDOWED = {"sliding_window", "q_lora_rank"}  # null stays null
ALL_HEADS = {"num_key_value_heads": 4}
# model_type -> (published config, other sizes, tokenizer, its published class, template)
CASES: Mapping[str, tuple[str, Mapping[str, Any], str, str, str]] = {
  "llama": ("Llama-3.1-8B", {}, "llama3", "PreTrainedTokenizerFast", "llama3"),
  "mistral": ("Mistral-7B-v0.1", {}, "pieces", "LlamaTokenizer", "inst"),
  "qwen2": ("Qwen2.5-0.5B", {}, "qwen", "Qwen2Tokenizer", "chatml"),
  "qwen3": ("Qwen3-0.6B", {}, "qwen", "Qwen2Tokenizer", "chatml"),
  "gemma2": ("gemma-2-9b-it", {"sliding_window_size": 32}, "gemma", "GemmaTokenizer", "gemma"),
  "gemma3_text": ("gemma-3-1b-it", {"num_hidden_layers": 6}, "gemma", "GemmaTokenizer", "gemma"),
  "mixtral": ("Mixtral-8x7B-v0.1", {}, "pieces", "LlamaTokenizer", "inst"),
  "qwen3_moe": ("Qwen3-30B-A3B", {}, "qwen", "Qwen2Tokenizer", "chatml"),
  "olmoe": ("OLMoE-1B-7B-0924", ALL_HEADS, "gpt2", "GPTNeoXTokenizer", "chatml"),
  "gpt_oss": ("gpt-oss-20b", {}, "gpt2", "PreTrainedTokenizerFast", "chatml"),
  "deepseek_v2": ("DeepSeek-V2-Lite", ALL_HEADS, "llama3", "LlamaTokenizerFast", "llama3"),
  "deepseek_v3": (
    "DeepSeek-V3", {**ALL_HEADS, "n_group": 4, "topk_group": 2}, "llama3", "LlamaTokenizerFast",
    "llama3",
  ),
}  # fmt: skip
# Of random weights. With 0 two groups of experts are equal to 5e-7 for a token of `bridge verify`,
# and rounding chooses.
SEEDS = {"deepseek_v3": 1}
EITHER = "{{% if m.role == 'user' %}}{}{{% else %}}{}{{% endif %}}"
TEMPLATES = {
  "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' "
  "}}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}",
  "llama3": "{{ bos_token }}{% for m in messages %}{{ m.role + '\n\n' + m.content | trim + "
  "'<|eot_id|>' }}{% endfor %}{{ 'assistant\n\n' if add_generation_prompt else '' }}",
  "inst": "{{ bos_token }}{% for m in messages %}"
  + EITHER.format("{{ '[INST] ' + m.content + ' [/INST]' }}", "{{ ' ' + m.content + eos_token }}")
  + "{% endfor %}",
  "gemma": "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + "
  "m.content | trim + '<end_of_turn>\n' }}{% endfor %}",
}
TURNS = [
  {"role": "user", "content": " What is 12 + 3?"},
  {"role": "assistant", "content": "15, la forêt.\n"},
]
# Fields of the published file that an export writes anew, or that were for other programs.
ANEW = {"architectures", "transformers_version", "auto_map", "quantization_config", "torch_dtype"}
COLUMNS: tuple[str, ...] = (
  "family", "published", "tokenizer", "verify", "loss", "exported as", "greedy tokens",
  "ids of texts", "beside the weights", "fields of config.json that differ", "seconds",
  "command", "commit", "hardware", "date",
)  # fmt: skip

_OUT = flags.DEFINE_string("out", None, "CSV file; rows are added.", required=True)
_ONLY = flags.DEFINE_list("only", list(CASES), "Families, by model_type.")
_IN = flags.DEFINE_string("in", "", "Folder for what is written; by default a temporary one.")


def said_by(verb: str, *words: str) -> str:
  """What `ats-jax VERB WORDS` prints, in this process: libraries take long to import."""
  commands = importlib.import_module(f"ats_jax.verbs.{verb}").COMMANDS
  word = words[0] if words[0] in commands else ""
  command, out = commands[word], io.StringIO()
  for flag in command.flags:  # what an earlier call has set
    command.flags[flag].unparse()
  rest = command.parse(f"{verb} {word}".strip(), [*words[bool(word) :]])
  with contextlib.redirect_stdout(out):
    code = command.main(rest)
  if code:
    raise ValueError(f"{verb} {word} ends with {code}: {out.getvalue()}")
  return out.getvalue()


def published_fields(name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a published config.json, made small; weights are not quantised."""
  fields = dict(json.loads(PUBLISHED.read_text(encoding="utf-8"))[name])
  for key, value in {**SMALL, **sizes}.items():
    if key in fields and not (key in WINDOWED and fields[key] is None):
      fields[key] = value
  if "layer_types" in fields:
    fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
  if rope := fields.get("rope_scaling"):
    fields["rope_scaling"] = {**rope, "original_max_position_embeddings": 64}
  fields.pop("quantization_config", None)
  return fields


def make_pieces(folder: Path, gemma: bool) -> None:
  """Write a BPE of pieces as converted from SentencePiece, with bytes for what it lacks."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  learner = tokenizers.Tokenizer(models.BPE())
  learner.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
  trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
  corpus = [*TEXTS, Path(json.__file__).read_text(encoding="utf-8")]
  learner.train_from_iterator(corpus, trainer)
  model = json.loads(learner.to_str())["model"]
  names = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
  pieces = [*names, *(f"<0x{b:02X}>" for b in range(256))]
  pieces += [piece for piece, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
  inner = tokenizers.Tokenizer(
    models.BPE(
      {piece: number for number, piece in enumerate(pieces)},
      [tuple(pair) for pair in model["merges"]],
      unk_token="<unk>",
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if gemma:
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
  else:
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts.append(decoders.Strip(" ", 1, 0))
  inner.decoder = decoders.Sequence(parts)
  turns = ["<start_of_turn>", "<end_of_turn>"] if gemma else []
  inner.add_special_tokens([tokenizers.AddedToken(n, normalized=False) for n in names + turns])
  bos, eos = ("<bos>", "<eos>") if gemma else ("<s>", "</s>")
  inner.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
  )
  inner.save(str(folder / "tokenizer.json"))
  config = {"bos_token": bos, "eos_token": eos, "unk_token": "<unk>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make(folder: Path, kind: str) -> None:
  """Write the folder of a case."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  name, sizes, tokenizer, tokenizer_class, template = CASES[kind]
  folder.mkdir(parents=True)
  if tokenizer in ("pieces", "gemma"):
    make_pieces(folder, tokenizer == "gemma")
  else:
    make_tokenizer(folder, tokenizer)
  named = json.loads((folder / "tokenizer_config.json").read_text())
  named |= {"tokenizer_class": tokenizer_class, "clean_up_tokenization_spaces": False}
  (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2))
  (folder / "chat_template.jinja").write_text(TEMPLATES[template])
  ids = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())
         ["added_tokens"]}  # fmt: skip
  fields = published_fields(name, sizes)
  roles = {f"{role}_token_id": ids[named[f"{role}_token"]] for role in ("bos", "eos")
           if named.get(f"{role}_token")}  # fmt: skip
  if "pad_token_id" in fields:
    roles["pad_token_id"] = min(ids.values())
  fields = {**{k: v for k, v in fields.items() if k != "bos_token_id"}, **roles}
  text = json.dumps(fields, indent=2)
  (folder / "config.json").write_text(text)
  torch.manual_seed(SEEDS.get(kind, 0))
  config = transformers.AutoConfig.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_config(config).float()
  with torch.no_grad():
    for key, weight in model.named_parameters():
      if weight.ndim > 1:
        torch.nn.init.normal_(weight, 0, 0.5 if "embed" in key else 1.5 / weight.shape[-1] ** 0.5)
      else:
        is_norm = "norm" in key and "gemma" not in kind
        torch.nn.init.normal_(weight, 1.0 if is_norm else 0.0, 0.2)
    for key, buffer in model.named_buffers():
      if key.endswith("e_score_correction_bias"):
        torch.nn.init.normal_(buffer, 0.0, 0.1)
  wide = {k: v for k, v in model.named_buffers() if k.endswith("e_score_correction_bias")}
  wide = {k: v.clone() for k, v in wide.items()}
  model = model.bfloat16()
  for key, buffer in wide.items():  # float32 in published files too
    owner, _, leaf = key.rpartition(".")
    model.get_submodule(owner)._buffers[leaf] = buffer
  model.save_pretrained(folder)
  (folder / "config.json").write_text(text)
  generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, **roles}
  (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def train(folder: Path) -> str:
  """Twenty steps by the commands of the guide; the losses."""
  hf, run = folder / "hf", folder / "tuned"
  said_by("config", "import", f"{hf}/config.json", f"--to={folder}/mine.py")
  settings = {
    "num_steps": STEPS, "data.paths": CORPUS, "data.cache_dir": folder / "cache",
    "data.seq_len": 64, "data.batch_size": 8, "data.validation_fraction": 0.0,
    "data.num_workers": 0, "optimizer.learning_rate": 3e-3, "optimizer.warmup_steps": 2,
    "precision.param_dtype": "bfloat16", "precision.compute_dtype": "float32",
    "log.every_steps": 1, "log.writers": "jsonl", "log.progress": "false",
    "checkpoint.every_steps": STEPS, "sample.max_tokens": 0, "eval.every_steps": 0,
  }  # fmt: skip
  words = [f"--config.{name}={value}" for name, value in settings.items()]
  source = f"--init_from={folder}/imported"
  said_by("train", f"--config={folder}/mine.py", f"--workdir={run}", source, *words)
  rows = [r["train/loss"] for r in read_jsonl(paths.parse(run / "metrics.jsonl"))
          if "train/loss" in r]  # fmt: skip
  return f"{rows[0]:.2f} to {rows[-1]:.2f}"


def greedy(folder: Path) -> str:
  """How many of the likeliest tokens are those of the export in `transformers`."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  with load_run(paths.parse(folder / "tuned")) as run:
    words, sampling = run.tokenizer, run.sampling(temperature=0.0, max_tokens=TOKENS, prompt=PROMPT)
    prompt = [words.bos_id, *words.encode(PROMPT)]
    rules = run.program.rules(run.step)
    ours = list(generate_tokens(run.model, words, sampling, rules=rules, prompt=prompt, seed=0))
    vocab = run.program.cfg.model.vocab_size
    kept = set(words.end_ids) | set(range(words.vocab_size)) - set(words.special_ids)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "out", dtype=torch.float32, local_files_only=True
  )
  own = theirs.generation_config
  theirs.generation_config = transformers.GenerationConfig(
    max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=sorted(words.end_ids),
    suppress_tokens=[i for i in range(vocab) if i not in kept],
  )  # fmt: skip
  assert own.temperature == 0.6, "the generation settings of the folder"
  rows = torch.tensor([prompt])
  with torch.no_grad():
    found = theirs.generate(rows, attention_mask=torch.ones_like(rows))[0, len(prompt) :].tolist()
  found = [i for i in found if i not in words.end_ids]
  pairs = zip(ours, found, strict=False)  # either may have ended
  equal = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(found)))
  return f"{equal} of {max(len(ours), len(found))}"


def texts(folder: Path) -> str:
  """How many texts, and whether a conversation, have the ids of the folder and of the run."""
  import transformers  # pyright: ignore[reportMissingImports]

  from ats_jax.data.tokens.file import load_tokenizer

  own = load_tokenizer(paths.parse(folder / "tuned/tokenizer.json"))
  hf, out = (transformers.AutoTokenizer.from_pretrained(folder / n) for n in ("hf", "out"))
  ids = lambda words, text: words(text, add_special_tokens=False)["input_ids"]
  plain = [text for text in TEXTS if "<|" not in text]  # special tokens are text for a run
  same = sum(ids(hf, t) == ids(out, t) == list(own.encode(t)) for t in plain)
  said = [w.apply_chat_template(TURNS, return_dict=False) for w in (hf, out)]
  chat = "the same" if said[0] == said[1] else "OTHERS"
  return f"{same} of {len(plain)}; of a conversation {chat}"


def beside(folder: Path) -> tuple[str, str]:
  """What is lost of the files beside the weights, and fields of config.json that differ."""
  hf, out = folder / "hf", folder / "out"
  files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
           "generation_config.json")  # fmt: skip
  lost = [
    name
    for name in files
    if not (out / name).is_file() or (out / name).read_bytes() != (hf / name).read_bytes()
  ]
  old, new = (json.loads((f / "config.json").read_text()) for f in (hf, out))
  lost += [f for f in ("max_position_embeddings", "model_type") if old[f] != new.get(f)]
  lost += ["dtype"] if new.get("torch_dtype") != "bfloat16" else []
  fields = []
  for name, value in old.items():
    if name not in ANEW and new.get(name) != value:
      fields.append(f"{name}: {new[name]!r}" if name in new else f"{name}: left out")
  return ", ".join(lost) or "kept", "; ".join(fields) or "none"


def row(folder: Path, kind: str) -> dict[str, Any]:
  """Take a family through all steps; what fails is in the row."""
  began, found = time.perf_counter(), dict.fromkeys(COLUMNS, "")
  name, _, tokenizer, tokenizer_class, _ = CASES[kind]
  found |= {"family": kind, "published": name, "tokenizer": f"{tokenizer}, {tokenizer_class}"}
  hf, imported, out = folder / "hf", folder / "imported", folder / "out"
  step = "verify"
  try:
    make(hf, kind)
    said_by("bridge", "import", f"--folder={hf}", f"--workdir={imported}")
    report = said_by("bridge", "verify", f"--folder={hf}", f"--workdir={imported}")
    match = re.search(r"differ by (\S+) at most, bound (\S+);.*greedy tokens: (\S+ of \S+)",
                      report, re.DOTALL)  # fmt: skip
    assert match
    found[step] = f"{match[1]} (bound {match[2]}); greedy {match[3]}"
    step = "loss"
    found[step] = train(folder)
    step = "exported as"
    report = said_by("bridge", "export", f"--folder={out}", f"--workdir={folder}/tuned")
    found[step] = json.loads((out / "config.json").read_text())["model_type"]
    step = "greedy tokens"
    found[step] = greedy(folder)
    step = "ids of texts"
    found[step] = texts(folder)
    step = "beside the weights"
    found[step], found["fields of config.json that differ"] = beside(folder)
  except (ValueError, KeyError, OSError, RuntimeError, AssertionError) as e:
    found[step] = f"FAILED: {type(e).__name__}: {' '.join(str(e).split())}"[:300]
    print(f"{kind}: {found[step]}", flush=True)
  found["seconds"] = f"{time.perf_counter() - began:.0f}"
  return found


def circumstances() -> dict[str, str]:
  """The last columns of a record."""
  names = ("jax", "torch", "transformers", "tokenizers")
  versions = ", ".join(f"{n} {importlib.metadata.version(n).split('+')[0]}" for n in names)
  return {
    "command": "python -m lab.families --out=FILE",
    "commit": commit(),
    "hardware": f"{os.cpu_count()} CPU cores, {versions}, Python {platform.python_version()}",
    "date": datetime.date.today().isoformat(),
  }


def write_row(file: Path, found: Mapping[str, Any]) -> None:
  """Add a row to the file, in place of one of the same family."""
  old = []
  if file.is_file():
    with file.open(newline="", encoding="utf-8") as lines:
      old = [r for r in csv.DictReader(lines) if r["family"] != found["family"]]
  rows = sorted([*old, found], key=lambda r: list(CASES).index(r["family"]))
  with file.open("w", newline="", encoding="utf-8") as lines:
    writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main(argv: list[str]) -> None:
  """Make all rows."""
  del argv
  if unknown := set(_ONLY.value) - set(CASES):
    raise ValueError(f"--only has {sorted(unknown)}; the families are {', '.join(CASES)}.")
  logging.set_verbosity(logging.WARNING)
  known = circumstances()
  with tempfile.TemporaryDirectory() as scratch:
    for kind in _ONLY.value:
      found = row(Path(_IN.value or scratch) / kind, kind) | known
      write_row(Path(_OUT.value), found)
      print(json.dumps({k: v for k, v in found.items() if k not in known}), flush=True)
      gc.collect()


if __name__ == "__main__":
  app.run(main)
