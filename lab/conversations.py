"""Writes `configs/conversations.jsonl`: small conversations to fine-tune the debug model on.

    python -m lab.conversations --to=configs/conversations.jsonl

All of it is made by this file, from its own words and from arithmetic; nothing is copied from
anywhere. The same seed gives the same file.
"""

import argparse
import datetime
import json
import random
from collections.abc import Callable

COUNT = 320
MISSES = 100  # in a row, and a kind is taken to have no more
WORDS = (
  "apple", "river", "stone", "cloud", "tiger", "paper", "window", "garden", "silver", "bridge",
  "candle", "forest", "hammer", "island", "jacket", "kettle", "ladder", "mirror", "needle",
  "orange", "pencil", "rabbit", "saddle", "turtle", "velvet", "wallet", "yellow", "zebra",
  "anchor", "basket",
)  # fmt: skip
NAMES = ["Ada", "Ben", "Cleo", "Dana", "Emil", "Fay", "Gus", "Hana", "Ivo", "June"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
UNITS = (("metres", "centimetres", 100), ("hours", "minutes", 60), ("weeks", "days", 7))
SYSTEMS = ("Be brief.", "Answer politely.", "You are a patient teacher.")
Pairs = list[tuple[str, str]]


def add(draw: random.Random) -> Pairs:
  """A sum, and often another number on top."""
  a, b, c = draw.randint(2, 60), draw.randint(2, 60), draw.randint(2, 9)
  ask = draw.choice(("What is {} plus {}?", "Add {} and {}.", "{} + {} = ?"))
  pairs = [(ask.format(a, b), f"{a} + {b} = {a + b}.")]
  if draw.random() < 0.5:
    pairs.append((f"And {c} more?", f"That makes {a + b + c}."))
  return pairs


def subtract(draw: random.Random) -> Pairs:
  """What is left of a number of things."""
  a, word, name = draw.randint(10, 40), draw.choice(WORDS), draw.choice(NAMES)
  b = draw.randint(1, a - 1)
  left = f"{a - b} {word}{'s' if a - b != 1 else ''}"
  return [(f"{name} has {a} {word}s and gives {b} away. How many are left?", f"{left}.")]


def compare(draw: random.Random) -> Pairs:
  """The larger of two numbers, and by how much."""
  a, b = draw.sample(range(1, 100), 2)
  return [
    (f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger."),
    ("By how much?", f"By {abs(a - b)}."),
  ][: draw.randint(1, 2)]


def reverse(draw: random.Random) -> Pairs:
  """A word backwards."""
  word = draw.choice(WORDS)
  ask = draw.choice(("Write {} backwards.", "What is {} in reverse?"))
  return [(ask.format(f"'{word}'"), f"'{word[::-1]}'.")]


def letters(draw: random.Random) -> Pairs:
  """The length of a word, its first or its last letter."""
  word = draw.choice(WORDS)
  asks = [
    (f"How many letters has '{word}'?", f"'{word}' has {len(word)} letters."),
    ("What is the first one?", f"It is '{word[0]}'."),
    ("And the last?", f"It is '{word[-1]}'."),
  ]
  return asks[: draw.randint(1, 3)]


def ordered(draw: random.Random) -> Pairs:
  """Numbers or words in order."""
  if draw.random() < 0.5:
    numbers = draw.sample(range(1, 60), 4)
    shown, right = (", ".join(map(str, x)) for x in (numbers, sorted(numbers)))
    return [(f"Sort {shown}.", f"{right}.")]
  words = draw.sample(WORDS, 3)
  return [(f"Put {', '.join(words)} in alphabetical order.", f"{', '.join(sorted(words))}.")]


def weekday(draw: random.Random) -> Pairs:
  """The day of the week some days from another."""
  day, ahead = draw.randrange(7), draw.randint(1, 9)
  days = f"{ahead} day{'s' if ahead > 1 else ''}"
  return [(f"Today is {DAYS[day]}. What day is it in {days}?", f"{DAYS[(day + ahead) % 7]}.")]


def convert(draw: random.Random) -> Pairs:
  """A quantity in a smaller unit."""
  large, small, factor = draw.choice(UNITS)
  number = draw.randint(2, 12)
  return [(f"How many {small} are {number} {large}?", f"{number * factor} {small}.")]


def parity(draw: random.Random) -> Pairs:
  """Even or odd."""
  number = draw.randint(1, 200)
  return [(f"Is {number} even or odd?", f"{number} is {'odd' if number % 2 else 'even'}.")]


def date(draw: random.Random) -> Pairs:
  """The day after a date."""
  day = datetime.date(2024, 1, 1) + datetime.timedelta(draw.randrange(366))
  following = day + datetime.timedelta(1)
  return [(f"Which date follows {day:%d %B}?", f"{following:%d %B}.")]


def introduce(draw: random.Random) -> Pairs:
  """A name that is asked for later."""
  name, thing = draw.choice(NAMES), draw.choice(WORDS)
  return [
    (f"Hello, I am {name}. I like my {thing}.", f"Hello {name}, nice to meet you."),
    draw.choice((("What is my name?", f"{name}."), ("What do I like?", f"Your {thing}."))),
  ]


KINDS: tuple[Callable[[random.Random], Pairs], ...] = (
  add, subtract, compare, reverse, letters, ordered, weekday, convert, parity, date, introduce,
)  # fmt: skip


def conversations(count: int, seed: int) -> list[str]:
  """Different conversations as JSON lines; one in four has a system.

  Each kind comes as often, as long as it has new ones.
  """
  draw, lines, misses = random.Random(seed), {}, 0
  while (before := len(lines)) < count:
    kind = KINDS[(before + misses // MISSES) % len(KINDS)]
    turns = []
    if draw.random() < 0.25:
      turns.append({"role": "system", "content": draw.choice(SYSTEMS)})
    for question, answer in kind(draw):
      turns += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
      ]
    lines[json.dumps({"messages": turns})] = None
    misses = 0 if len(lines) > before else misses + 1
  return list(lines)


def main() -> None:
  """Write the file."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--to", default="configs/conversations.jsonl")
  parser.add_argument("--count", type=int, default=COUNT)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  with open(args.to, "w", encoding="utf-8") as file:
    file.write("".join(f"{line}\n" for line in conversations(args.count, args.seed)))


if __name__ == "__main__":
  main()
