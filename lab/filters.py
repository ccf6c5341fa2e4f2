"""How well `data.filters` finds what was planted in real text: recall and precision of each filter.

The text is prose of documentation on this machine: paragraphs of docstrings and text files that
begin with a capital letter, end with a full stop and have 15 words, those of a file joined to
documents of 80 words or more. Into it go copies, spam, garbled encodings and other languages. What
a filter drops of the text itself counts as wrong in the precision, and its share is in the last
column. What is planted is made of documents that the filter keeps. It needs the extra `filters`.

  python -m lab.filters
  python -m lab.filters --documents=20000 --planted=1000
  python -m lab.filters --memory
"""

import ast
import itertools
import json
import random
import re
import sysconfig
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags, logging

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema.filters import (
  C4,
  Exact,
  Filter,
  Gopher,
  Language,
  Near,
  Repair,
  Repetition,
  spelled,
)
from ats_jax.data.corpus.shards import TokeniseOptions
from ats_jax.data.filters import duplicates
from ats_jax.data.filters.duplicates import NUM_HASHES, group_equal, group_similar
from ats_jax.data.filters.rules import make_rule
from ats_jax.data.filters.sift import sift
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import content_fingerprint, find_files

_DOCUMENTS = flags.DEFINE_integer("documents", 5000, "Of real text.", lower_bound=100)
_PLANTED = flags.DEFINE_integer("planted", 300, "Of each kind.", lower_bound=10)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is planted.")
_MEMORY = flags.DEFINE_bool("memory", False, "Measure memory of the comparisons instead.")
_LEAST_WORDS = 80
_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of words that are edited

GERMAN = """Der Zug nach Hamburg fährt heute erst um halb neun ab. Wir haben den ganzen Abend auf
der Terrasse gesessen und geredet. Im Winter ist der See meistens zugefroren. Meine Schwester
arbeitet seit drei Jahren in einer Bäckerei. Das Buch liegt noch immer auf dem Tisch am Fenster.
Niemand wusste, warum er so plötzlich verschwunden war. Die Kinder spielen nach der Schule im Hof.
Es hat die ganze Nacht geregnet, und die Straßen sind nass."""
FRENCH = """\
Le train de Lyon part ce matin avec une heure de retard. Nous avons passé toute la soirée
à parler sur la terrasse. En hiver le lac est presque toujours gelé. Ma sœur travaille depuis trois
ans dans une boulangerie. Le livre est encore sur la table près de la fenêtre. Personne ne savait
pourquoi il était parti si vite. Les enfants jouent dans la cour après l'école. Il a plu toute la
nuit et les rues sont mouillées."""
SPANISH = """El tren de Sevilla sale esta mañana con una hora de retraso. Pasamos toda la tarde
hablando en la terraza. En invierno el lago está casi siempre helado. Mi hermana trabaja desde hace
tres años en una panadería. El libro sigue encima de la mesa junto a la ventana. Nadie sabía por qué
se había marchado tan deprisa. Los niños juegan en el patio después de la escuela. Ha llovido toda
la noche y las calles están mojadas."""
RUSSIAN = """\
Поезд на Москву сегодня отправится только в девять часов. Мы весь вечер сидели на террасе
и разговаривали. Зимой озеро почти всегда замерзает. Моя сестра уже три года работает в пекарне.
Книга всё ещё лежит на столе возле окна. Никто не знал, почему он так внезапно исчез.
Дети после школы играют во дворе. Всю ночь шёл дождь, и улицы мокрые."""
CHINESE = """\
今天早上去上海的火车晚点了一个小时。我们整个晚上都坐在阳台上聊天。冬天湖面几乎总是结冰的。
我的姐姐在一家面包店工作了三年。那本书还放在窗边的桌子上。没有人知道他为什么突然离开。
放学以后孩子们在院子里玩。昨天下了一整夜的雨, 街道都湿了。"""


class Row(NamedTuple):
  """A line of the table."""

  filters: str
  planted: str
  number: int
  recall: float
  precision: float | None
  unplanted: float


def real_texts(count: int, seed: int) -> list[str]:
  """Documents of prose, each paragraph once, of files in an order of the seed."""
  places = sysconfig.get_paths()
  folders = dict.fromkeys((places["stdlib"], places["purelib"], "/usr/share"))
  suffixes = (".py", ".md", ".rst", ".txt", ".pod")
  paths = [p for f in folders for p in sorted(Path(f).rglob("*")) if p.suffix in suffixes]
  random.Random(seed).shuffle(paths)
  seen: set[str] = set()
  texts = (text for path in paths if path.is_file() for text in _documents(path, seen))
  return list(itertools.islice(texts, count))


def _documents(path: Path, seen: set[str]) -> Iterator[str]:
  try:
    text = path.read_text(encoding="utf-8")
    read = _docstrings(text) if path.suffix == ".py" else text
  except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError):
    return
  found: list[str] = []
  for paragraph in re.split(r"\n\s*\n", read):
    plain = " ".join(paragraph.split())
    if plain not in seen and re.fullmatch(r"[A-Z].*\.", plain) and len(plain.split()) >= 15:
      seen.add(plain)
      found.append("\n".join(line.strip() for line in paragraph.splitlines() if line.strip()))
    if sum(len(part.split()) for part in found) >= _LEAST_WORDS:
      yield "\n\n".join(found)
      found = []


def _docstrings(text: str) -> str:
  with warnings.catch_warnings(action="ignore"):
    nodes = ast.walk(ast.parse(text))
  found = []
  for node in nodes:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      found.append(ast.get_docstring(node) or "")
  return "\n\n".join(found)


def other_spelling(text: str, rng: random.Random) -> str:
  """The same words in other spaces, some of it in capitals."""
  return "\n".join(w.upper() if rng.random() < 0.1 else w for w in text.split())


def edited(rate: float) -> Callable[[str, random.Random], str]:
  """A copy in which a share `rate` of the words is another, gone, or has one before it."""

  def change(text: str, rng: random.Random) -> str:
    words = text.split()
    for at in sorted(rng.sample(range(len(words)), round(rate * len(words))), reverse=True):
      kind = rng.randrange(3)
      words[at : at + (kind < 2)] = [] if kind == 0 else [rng.choice(words)]
    return " ".join(words)

  return change


def stuffed(text: str, rng: random.Random) -> str:
  """A few words again and again."""
  words = rng.sample(text.split(), 6)
  return " ".join(" ".join(words) for _ in range(rng.randrange(20, 60)))


def repeated(text: str, rng: random.Random) -> str:
  """A paragraph that a page shows several times."""
  part = " ".join(text.split()[:80])
  return "\n\n".join([part] * rng.randrange(3, 7))


def menu(text: str, rng: random.Random) -> str:
  """Navigation: lines of one or two words."""
  words = text.split()
  return "\n".join(" ".join(rng.sample(words, rng.randrange(1, 3))).title() for _ in range(60))


def symbols(text: str, rng: random.Random) -> str:
  """Hash tags and dots between words."""
  return " ".join(f"#{w}" if rng.random() < 0.5 else f"{w}..." for w in text.split())


def noise(text: str, rng: random.Random) -> str:
  """Random letters and digits in words of the same lengths, as an encoded file has."""
  letters = "abcdefghijklmnopqrstuvwxyz0123456789+/"
  return " ".join("".join(rng.choices(letters, k=3 * len(w))) for w in text.split())


def numbers(text: str, rng: random.Random) -> str:
  """A table of figures."""
  return "\n".join(" ".join(f"{rng.random():.4f}" for _ in range(8)) for _ in text.split()[:40])


def lorem(text: str, rng: random.Random) -> str:
  """Filler of a layout in a page."""
  filler = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor."
  lines = [line for line in text.splitlines() if line.strip()]
  lines.insert(rng.randrange(len(lines)), filler)
  return "\n".join(lines)


def code(text: str, rng: random.Random) -> str:
  """A script that was left in a page."""
  lines = [line for line in text.splitlines() if line.strip()]
  lines.insert(rng.randrange(len(lines)), 'document.write("{" + name + "}.");\nreturn {a: 1}.')
  return "\n".join(lines)


def foreign(text: str, rng: random.Random) -> str:
  """Sentences of another language."""
  del text
  language = rng.choice([GERMAN, FRENCH, SPANISH, RUSSIAN, CHINESE])
  sentences = language.replace("\n", " ").replace("。", "。 ").split(". ")
  return ". ".join(rng.sample(sentences, min(5, len(sentences))))


SPAM = {
  "a few words repeated": stuffed, "a paragraph repeated": repeated, "a menu": menu,
  "hash tags and dots": symbols, "random letters": noise, "a table of figures": numbers,
  "lorem ipsum": lorem, "a script's braces": code,
}  # fmt: skip
PLANTS: dict[tuple[Filter, ...], dict[str, Callable[[str, random.Random], str]]] = {
  (Exact(),): {"copies, other spaces and capitals": other_spelling},
  **{
    (Near(threshold=threshold),): {
      "copies, other spaces and capitals": other_spelling,
      **{f"copies, {rate:.0%} of words edited": edited(rate) for rate in _RATES},
    }
    for threshold in (0.8, 0.7, 0.5)
  },
  (Gopher(),): SPAM, (Repetition(),): SPAM, (C4(),): SPAM, (Gopher(), Repetition(), C4()): SPAM,
  (Language(keep=("en",)),): {"German, French, Spanish, Russian, Chinese": foreign},
}  # fmt: skip


def dropped(texts: list[str], filters: tuple[Filter, ...]) -> np.ndarray:
  """[texts] bool, by `filters`."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cfg = DataConfig(paths=(str(path),), filters=filters, cache_dir=f"{folder}/cache")
    files = find_files(cfg.paths, Report(strict=True))
    fingerprint = content_fingerprint(files, Path(folder))
    return sift(cfg, files, fingerprint, TokeniseOptions(0)).folder.array("verdict") > 0


def measure(
  texts: list[str],
  filters: tuple[Filter, ...],
  plants: dict[str, Callable],
  count: int,
  seed: int,
) -> Iterator[Row]:
  """A row for each kind that is planted; a copy and what it is of count as one that is found."""
  alone = dropped(texts, filters)
  clean = [text for text, bad in zip(texts, alone, strict=True) if not bad]
  pairs: list[tuple[float, bool]] = []  # true similarity, and whether one of the two is dropped
  for name, plant in plants.items():
    rng = random.Random(seed)
    chosen = rng.sample(clean, min(count, len(clean)))
    planted = [plant(text, rng) for text in chosen]
    found = dropped([*texts, *planted], filters)
    places = {text: i for i, text in enumerate(texts)}
    originals = np.array([places[text] for text in chosen])
    hits = found[len(texts) :]
    wrong = int(found[: len(texts)].sum())
    if isinstance(filters[0], Exact | Near):  # one of the two is kept, whichever
      hits = hits | found[originals]
      wrong -= int(found[originals].sum())
    if isinstance(filters[0], Near):
      alike = [similarity(*pair) for pair in zip(chosen, planted, strict=True)]
      pairs += zip(alike, hits.tolist(), strict=True)
      name = f"{name} (similarity {np.median(alike):.2f})"
    yield _row(spelled(filters), name, hits, np.ones(len(hits), bool), wrong, float(alone.mean()))
  if isinstance(filters[0], Near):
    alike, hits = map(np.array, zip(*pairs, strict=True))
    truth = alike >= filters[0].threshold
    name = "all of these, truth being the true similarity"
    yield _row(spelled(filters), name, hits, truth, 0, float(alone.mean()))


def _row(
  filters: str, name: str, hits: np.ndarray, truth: np.ndarray, wrong: int, alone: float
) -> Row:
  right = int((hits & truth).sum())
  found = int(hits.sum()) + wrong
  return Row(
    filters, name, int(truth.sum()), right / truth.sum(), right / found if found else None, alone
  )


def similarity(a: str, b: str) -> float:
  """The share of sequences of five words that two texts have in common."""
  first, second = (set(duplicates.shingles(text)) for text in (a, b))
  return len(first & second) / len(first | second)


def repairs(texts: list[str], count: int, seed: int) -> Iterator[str]:
  """What `repair` mends of text that was read in a wrong encoding, and touches of other text."""
  rule = make_rule(Repair())
  rng = random.Random(seed)
  sentences = [s for t in (GERMAN, FRENCH, SPANISH, RUSSIAN) for s in t.split(". ")]
  for wrong in ("latin-1", "cp1252", "cp1251"):
    garbled = []
    for _ in range(count):
      text = ". ".join(rng.sample(sentences, 4))
      raw = text.encode()
      if (read := raw.decode(wrong, errors="replace")) and "\ufffd" not in read:
        garbled.append((text, read))
    mended = sum(rule(read).text == text for text, read in garbled)
    yield f"repair: UTF-8 read as {wrong}: {mended} of {len(garbled)} mended to the letter"
  touched = sum(rule(text).text != text for text in texts)
  yield f"repair: {touched} of {len(texts):,} documents of real text changed"


def memory(count: int = 1_000_000) -> None:
  """Peak bytes a document of the comparisons, a fifth of the documents being duplicates."""
  rng = np.random.default_rng(0)
  source = np.where(rng.random(count) < 0.2, rng.integers(0, count, count), np.arange(count))
  keys = rng.permutation(count).astype(np.uint64)
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "near.bin"
    with open(path, "wb") as file:
      for part in np.array_split(source, 100):
        columns = part[:, None].astype(np.uint64) * np.uint64(2654435761) + np.arange(NUM_HASHES)
        file.write((columns * 40503 % 2**32).astype(np.uint32).tobytes())
    found = np.memmap(path, np.uint32, "r").reshape(-1, NUM_HASHES)
    exact = np.stack([source, source], 1).astype(np.uint64)
    for name, compare in (
      ("exact", lambda: group_equal(exact, keys)),
      ("near", lambda: group_similar(found, np.arange(count), keys, 0.8)),
    ):
      tracemalloc.start()
      began = time.monotonic()
      kept = compare()
      secs, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
      tracemalloc.stop()
      twice = int((kept != np.arange(count)).sum())
      print(f"{name}: {peak / count:.0f} bytes a document, {secs:.1f} s, {twice:,} duplicates")


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  if _MEMORY.value:
    memory()
    return
  texts = real_texts(_DOCUMENTS.value, _SEED.value)
  size = sum(map(len, texts)) / 1e6
  print(f"{len(texts):,} documents of real text, {size:.1f} million characters")
  logging.set_verbosity(logging.WARNING)
  print("| filters | planted | number | recall | precision | of the text itself |")
  print("|---|---|---|---|---|---|")
  for filters, plants in PLANTS.items():
    for row in measure(texts, filters, plants, _PLANTED.value, _SEED.value):
      precision = "-" if row.precision is None else f"{row.precision:.1%}"
      print(
        f"| `{row.filters}` | {row.planted} | {row.number} | {row.recall:.1%} | {precision} | "
        f"{row.unplanted:.1%} |", flush=True,
      )  # fmt: skip
  for text in repairs(texts, _PLANTED.value, _SEED.value):
    print(text)
  for one in (Repair(), Exact(), Near(), Language(keep=("en",)), Gopher(), Repetition(), C4()):
    began = time.monotonic()
    dropped(texts, (one,))
    print(f"{one}: {size / (time.monotonic() - began):.1f} million characters/s, one process")


if __name__ == "__main__":
  app.run(main)
