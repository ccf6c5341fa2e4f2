"""Fine-tuning as a user runs it: killed with signal 9, it goes on bit for bit; and bad input."""

import json
import re
import signal

import pytest
import runs
from commands import called

from ats_jax.exits import REFUSED

SETTINGS = (
  "data.cache_dir={}/cache",
  "data.seq_len=64",
  "data.batch_size=4",
  "num_steps=12",
  "checkpoint.every_steps=3",
  "eval.every_steps=3",
  "log.every_steps=1",
)
LIKE_BASE = (*runs.TINY, "model.vocab_size=320", "data.format=chat", "data.paths={}/chats.jsonl")
LORA = ("finetune.adapter=lora", "finetune.adapter.rank=4")
PAIRS = ("data.format=preference", "data.paths={}/pairs.jsonl")
LABELS = ("data.format=labelled", "data.paths={}/pairs.jsonl", "step.loss=kto")
MODES = {
  "lora": ("train", *LORA),
  "dora": ("train", "finetune.adapter=dora", "finetune.adapter.rank=4"),
  "qlora": ("train", *LORA, "finetune.adapter.base=nf4"),
  "full": ("train",),
  "frozen": ("train", "finetune.freeze=embedding,norm"),
  "dpo": ("train", *PAIRS, "step.loss=dpo", *LORA),
  "kto": ("train", *LABELS),
  "orpo": ("train", *PAIRS, "step.loss=orpo"),
  "simpo": ("train", *PAIRS, "step.loss=simpo"),
  "reward": ("train", *PAIRS, "step.loss=reward"),
  "distill": ("train", "step.loss=distill", "step.loss.teacher={}/base"),
  "command": ("finetune",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Conversations, and a run to begin with."""
  folder = tmp_path_factory.mktemp("finetune")
  chats = [
    {"messages": [dict(role="user", content=f"{i}?"), dict(role="assistant", content=f"{i}!")]}
    for i in range(100)
  ]
  (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
  pairs = [dict(prompt=f"{i}?", chosen=f"{i}!", rejected=f"{i}.") for i in range(100)]
  (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
  (folder / "roles.jsonl").write_text(json.dumps(chats[0]).replace("user", "judge") + "\n")
  (folder / "silent.jsonl").write_text(json.dumps({"messages": chats[0]["messages"][:1]}) + "\n")
  muted = [{**message, "weight": 0} for message in chats[0]["messages"]]
  (folder / "muted.jsonl").write_text(json.dumps({"messages": muted}) + "\n")
  base = (*LIKE_BASE, *SETTINGS, "num_steps=2", "sample.max_tokens=0")
  flags = [f"--config.{setting.format(folder)}" for setting in base]
  made = called("train", "--config=debug", f"--workdir={folder}/base", *flags)
  assert made.code == 0, made.err
  return folder


def words(folder, mode):
  """The verb with its flags, and the settings, of a mode."""
  verb, *own = MODES[mode]
  settings = [setting.format(folder) for setting in (*SETTINGS, *own, "sample.max_tokens=4")]
  if verb == "train":
    settings = [setting.format(folder) for setting in LIKE_BASE] + settings
    return ("train", "--config=debug", f"--init_from={folder}/base"), settings
  return ("finetune", f"--init_from={folder}/base", f"--data={folder}/chats.jsonl"), settings


# What the state and the rows have besides; the other modes differ in their losses alone.
OWN = {"lora", "qlora", "dpo", "distill", "command"}


@pytest.mark.thorough
@pytest.mark.parametrize(
  "mode", [pytest.param(m, marks=() if m in OWN else pytest.mark.slow) for m in MODES]
)
def test_killed_it_goes_on_bit_for_bit(mode, folder, tmp_path):
  verb, settings = words(folder, mode)
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  flags = [f"--config.{setting}" for setting in settings]
  done = called(*verb, f"--workdir={whole}", *flags)
  assert done.code == 0, done.err
  process = runs.start(broken, *settings, verb=verb)
  runs.kill_while_writing(process, broken, after_step=5)
  assert process.returncode == -signal.SIGKILL
  again = called(*verb, f"--workdir={broken}", *flags)
  assert again.code == 0 and f"resuming {broken} from step" in again.err, again.err
  runs.assert_same_run(whole, broken, 12)
  if mode == "command":
    said = [each.out.partition("held-out question 1:")[2] for each in (again, done)]
    assert said[0].replace(str(broken), str(whole)) == said[1] != ""
    before, after = map(float, re.findall(r"loss (?:before|after): ([\d.]+)", done.out))
    assert after < before and "data.seq_len as given" in done.err
    asked = json.loads((whole / "samples" / "answers.json").read_text())
    assert all(question["text"].strip() and question["answer"] for question in asked)


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["sequential", "interleaved"])
def test_text_and_conversations_of_one_run_go_on_bit_for_bit(order, folder, tmp_path):
  """One after the other, each with its own rate and new moments; and throughout both."""
  (folder / "text.txt").write_text(
    "\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(450))
  )
  settings = (
    *(setting for setting in SETTINGS if "num_steps" not in setting),
    *runs.TINY,
    "model.vocab_size=320",
    "sample.max_tokens=0",
    "data.sources=base={0}/text.txt,chat={0}/chats.jsonl",
  )
  settings = tuple(setting.format(folder) for setting in settings)
  verb = ("train", f"--config=modes:hybrid_{order}")
  flags = [f"--config.{setting}" for setting in settings]
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  done = called(*verb, f"--workdir={whole}", *flags)
  assert done.code == 0, done.err
  last = max(int(path.name) for path in (whole / "checkpoints").glob("[0-9]*"))
  if order == "sequential":
    rates = [row["train/learning_rate"] for row in runs.rows(whole) if "train/learning_rate" in row]
    assert max(rates) > 5 * rates[-1]  # that of the second phase is a tenth
  process = runs.start(broken, *settings, verb=verb)
  runs.kill_while_writing(process, broken, after_step=last - 8)
  assert process.returncode == -signal.SIGKILL
  again = called(*verb, f"--workdir={broken}", *flags)
  assert again.code == 0 and f"resuming {broken} from step" in again.err, again.err
  runs.assert_same_run(whole, broken, last)


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [0.001, 0.03])  # the command's own, and 30 times as much
def test_a_rate_that_is_too_high_is_lowered(rate, folder, tmp_path):
  own = ("num_steps=200", "checkpoint.every_steps=20", "eval.every_steps=20", "log.every_steps=10")
  own += ("orchestrator.mode=act", f"optimizer.learning_rate={rate}")
  verb, settings = words(folder, "command")
  flags = [f"--config.{setting}" for setting in (*settings, *own)]
  done = called(*verb, f"--workdir={tmp_path}", *flags)
  assert done.code == 0, done.err
  lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
  found = [row["action"] for row in map(json.loads, lines) if row["kind"] == "decision"]
  assert found == (["Repeat", "SetLearningRateScale"] if rate > 0.001 else [])


CHATS = "--init_from={0}/base --data={0}/chats.jsonl"
BAD = {
  "--data={0}/chats.jsonl": "--init_from is missing. Example: ",
  "--init_from={0}/base": "--data is missing. Example: ",
  "--init_from={0}/none --data={0}/chats.jsonl": "none holds no run",
  "--init_from={0}/base --data={0}/roles.jsonl": "turn 1 has the role 'judge'; known are",
  "--init_from={0}/base --data={0}/silent.jsonl": "no turn is of the role assistant",
  f"{CHATS} --config.finetune.adapter.rank=64": "rank=64 is above the width 32",
  f"{CHATS} --config.data.format.template={{0}}/bare.jinja": "no special token",
  "--init_from={0}/base --data={0}/muted.jsonl": "1 without a token in the loss",
}


def test_a_workdir_of_another_run_is_refused(folder):
  words = (f"--init_from={folder}/base", f"--data={folder}/chats.jsonl")
  result = called("finetune", *words, f"--workdir={folder}/base")
  assert result.code == REFUSED and "a run that finetune did not begin" in result.error()


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_clear_message(line, folder, tmp_path):
  (folder / "bare.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
  cache = f"--config.data.cache_dir={tmp_path}/cache"
  result = called("finetune", f"--workdir={tmp_path}/run", *line.format(folder).split(), cache)
  assert result.code == REFUSED and BAD[line] in result.error(), result
