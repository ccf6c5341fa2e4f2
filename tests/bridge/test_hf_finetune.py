"""From a folder through `ats-jax finetune` and a merged export to the same answers elsewhere.

`FINETUNE` of the environment makes it larger: fields of the model, the number of `conversations`,
and further `flags` of the training.
"""

import itertools
import json
import os
import re
import subprocess
import sys

import hf_models
import pytest
import torch
import transformers
from commands import Result, called
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.conversations import conversations

pytestmark = [pytest.mark.hf, pytest.mark.thorough, pytest.mark.filterwarnings("default")]

LARGER = json.loads(os.environ.get("FINETUNE", "{}"))
CONVERSATIONS = LARGER.pop("conversations", 160)
FLAGS = LARGER.pop("flags", ["--config.num_epochs=4"])
MODEL = {"hidden_size": 96, "intermediate_size": 160, "max_position_embeddings": 256, **LARGER}
TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
  "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
  "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  path = tmp_path_factory.mktemp("conversations") / "chats.jsonl"
  path.write_text("".join(f"{line}\n" for line in conversations(CONVERSATIONS, seed=0)))
  return path


def save_tokenizer(folder, template, data):
  inner = Tokenizer(models.BPE())
  usual = transformers.Qwen2TokenizerFast().backend_tokenizer  # of any file
  inner.normalizer, inner.pre_tokenizer = usual.normalizer, usual.pre_tokenizer
  inner.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  inner.train_from_iterator(
    data.read_text().splitlines(),
    trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
  )
  marks = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
  inner.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
  tokenizer = transformers.Qwen2TokenizerFast(tokenizer_object=inner)
  tokenizer.add_special_tokens(
    {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
  )
  tokenizer.chat_template = template
  tokenizer.save_pretrained(folder)
  return tokenizer


def prompt_of(tokenizer, record):
  """The ids of a conversation up to its first answer."""
  turns = itertools.takewhile(lambda turn: turn["role"] != "assistant", record["messages"])
  return tokenizer.apply_chat_template(list(turns), add_generation_prompt=True)["input_ids"]


def command(*words):
  """`ats-jax words`; for a larger model in a process of its own, as users run it."""
  if not LARGER:
    return called(*words)
  env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  line = [sys.executable, "-m", "ats_jax", *words]
  done = subprocess.run(line, capture_output=True, text=True, env=env)
  return Result(done.returncode, done.stdout, done.stderr)


def fields(folder, name, *keys):
  values = json.loads((folder / name).read_text())
  return {key: values.get(key) for key in keys}


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_it_answers_elsewhere_as_here(kind, data, tmp_path):
  base, run, out = (tmp_path / name for name in ("base", "run", "out"))
  template = TEMPLATE if kind == "qwen3" else "{{ bos_token }}" + TEMPLATE
  tokenizer = save_tokenizer(base, template, data)
  ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
  model = hf_models.make(kind, vocab_size=len(tokenizer), **MODEL, **ids)
  model.generation_config.update(**ids, temperature=0.5, do_sample=True)
  hf_models.save(model, base)

  done = command(
    "finetune", f"--init_from={base}", f"--data={data}", f"--workdir={run}",
    "--config.sample.max_tokens=24", *FLAGS,
  )  # fmt: skip
  assert done.code == 0, done.err
  losses = re.findall(r"held-out loss (?:before|after): ([\d.]+)", done.out)
  before, after = map(float, losses)
  print(f"{kind}: {model.num_parameters():,} parameters, held-out loss {before} -> {after}")
  assert after < 0.8 * before
  scored = command("evaluate", f"--workdir={run}", "--step=best")
  assert f"eval/loss {losses[1]}\n" in scored.out, scored.err
  words = re.search(r"export the model: ats-jax (.+) --folder=", done.out)[1]
  exported = command(*words.split(), f"--folder={out}")
  assert exported.code == 0, exported.err

  theirs, own = hf_models.load(out), transformers.AutoTokenizer.from_pretrained(out)
  asked = json.loads((run / "samples" / "answers.json").read_text())
  assert len(asked) == 3
  questions = [prompt_of(own, json.loads(line)) for line in data.read_text().splitlines()]
  for question in asked:
    prompt = question["ids"]
    assert prompt in questions
    ids = torch.tensor([prompt])
    said = theirs.generate(
      ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    text = own.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
    assert text == question["after"]

  before_it = transformers.AutoTokenizer.from_pretrained(base)
  assert own.chat_template == template and own.__class__ is before_it.__class__
  same = ("tokenizer_class", "eos_token", "pad_token")
  assert fields(out, "tokenizer_config.json", *same) == fields(base, "tokenizer_config.json", *same)
  same = ("max_position_embeddings", "model_type", "eos_token_id")
  assert fields(out, "config.json", *same) == fields(base, "config.json", *same)
  assert (out / "generation_config.json").read_text() == (
    base / "generation_config.json"
  ).read_text()
  written = fields(out, "config.json", "torch_dtype", "dtype").values()
  assert fields(base, "config.json", "dtype")["dtype"] in written
