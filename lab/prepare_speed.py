r"""How fast text becomes tokens: `data prepare` beside `datasets.map`, on text of this machine.

Copies text files of some folders until there are so many megabytes, trains a tokenizer on a part of
them, and lets both read, tokenise and write all of it with as many processes, in turns, each with
an empty cache. Then `data prepare` alone on a tenth. Prints MB of text a second, and the most
memory that all processes of each held together (proportional set size, looked at five times a
second). Needs the extra `formats_test`.
Command: python -m lab.prepare_speed --roots=/usr/lib/python3,.venv/lib [--mb=200]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from lab.runs import markdown

_ROOTS = flags.DEFINE_list("roots", None, "Folders whose text is copied.", required=True)
_MB = flags.DEFINE_integer("mb", 200, "Of text.")
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Of each.")
_TURNS = flags.DEFINE_integer("turns", 2, "Of each.")
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".html", ".js"}
VOCAB = 32000

MAP = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer
folder, tokenizer, processes, cache, out = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer)
def encode(batch):
  return {"ids": [found.ids for found in tokenizer.encode_batch(batch["text"])]}
text = load_dataset("text", data_files=f"{folder}/**", sample_by="document", split="train",
                    cache_dir=cache, encoding_errors="replace", num_proc=int(processes))
done = text.map(encode, batched=True, remove_columns=["text"], num_proc=int(processes))
done.save_to_disk(out)
"""


def copy_text(target: Path, roots: list[str], most: int) -> int:
  """Copy text files until there are `most` bytes; how many there are."""
  size = number = 0
  for root in roots:
    for path in sorted(Path(root).expanduser().rglob("*")):
      if size >= most:
        return size
      if path.suffix not in SUFFIXES or not path.is_file() or not path.stat().st_size:
        continue
      try:
        text = path.read_text(encoding="utf-8")
      except UnicodeDecodeError:
        continue
      (target / f"{number:06}.txt").write_text(text, encoding="utf-8")
      size += len(text.encode())
      number += 1
  return size


def train(folder: Path, path: Path) -> None:
  """A byte-level BPE of some of the text."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
  files = sorted(folder.iterdir())
  tokenizer.train([str(f) for f in files[:: max(1, len(files) // 500)]], trainer)
  tokenizer.save(str(path))


def memory(root: int) -> int:
  """Bytes of a process and those that it started, shared pages once."""
  parents = {}
  for entry in Path("/proc").glob("[0-9]*"):
    try:
      parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
      continue
  tree = {root}
  while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
    tree |= more
  size = 0
  for pid in tree:
    try:
      rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
      continue
    size += sum(1024 * int(row.split()[1]) for row in rows if row.startswith("Pss:"))
  return size


def timed(command: list[str]) -> tuple[float, int]:
  """Seconds that a command takes, and the most bytes of its processes."""
  began, most = time.perf_counter(), 0
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  while process.poll() is None:
    most = max(most, memory(process.pid))
    time.sleep(0.2)
  took = time.perf_counter() - began
  if process.returncode:
    raise SystemExit(f"{' '.join(command[:4])} ...: {process.communicate()[1][-2000:]}")
  return took, most


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  with tempfile.TemporaryDirectory() as root:
    whole, tenth = Path(root) / "text", Path(root) / "tenth"
    whole.mkdir()
    tenth.mkdir()
    sizes = {
      whole: copy_text(whole, _ROOTS.value, 10**6 * _MB.value),
      tenth: copy_text(tenth, _ROOTS.value, 10**5 * _MB.value),
    }
    tokenizer = Path(root) / "tokenizer.json"
    train(whole, tokenizer)
    rows = []
    ways = [("data prepare", whole), ("datasets.map", whole)] * _TURNS.value
    for number, (way, text) in enumerate([*ways, ("data prepare", tenth)]):
      out, cache = Path(root) / f"out{number}", Path(root) / f"cache{number}"
      ours = [sys.executable, "-m", "ats_jax", "data", "prepare", f"--out={out}"]
      ours += [f"--workers={_PROCESSES.value}", f"--config.data.paths={text}"]
      ours += [f"--config.data.tokenizer={tokenizer}", f"--config.data.cache_dir={cache}"]
      theirs = [sys.executable, "-c", MAP, str(text), str(tokenizer), str(_PROCESSES.value)]
      theirs += [str(cache), str(out)]
      took, most = timed(ours if way == "data prepare" else theirs)
      size = sizes[text] / 1e6
      rows.append([way, f"{size:.0f}", f"{took:.1f}", f"{size / took:.2f}", f"{most / 2**30:.2f}"])
      print(" ".join(rows[-1]), flush=True)
    print(markdown(["", "MB of text", "s", "MB/s", "GiB at most"], rows))


if __name__ == "__main__":
  app.run(main)
