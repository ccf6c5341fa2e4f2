"""Tasks of lm-evaluation-harness by a run's engine and by `transformers` on its export."""

import json
import random

import lm_eval
import pytest
from commands import called, train_flags
from lm_eval.api import registry
from lm_eval.tasks import TaskManager

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]

NAMES = ("add", "sub", "mul", "div")
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = r"""
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: " y):"
generation_kwargs: {until: ["\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
DOCUMENTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""


def function(rng):
  return f"def {rng.choice(NAMES)}(x, y):\n  return x + {rng.randrange(10)}\n\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  """A folder of three tasks, whose documents lie beside them."""
  folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
  question = lambda end: f"def {rng.choice(NAMES)}(x,{end}"
  wrong = ["raise y", "return y + 2", " pass"]
  rows = {
    "my_choice": [
      {"question": question(" y):\n "), "choices": ["return x", *wrong], "answer": i % 2}
      for i in range(16)
    ],
    "my_answers": [{"question": question("")} for _ in range(8)],
    "my_documents": [{"text": "".join(function(rng) for _ in range(n))} for n in range(1, 9)],
  }
  for name, text in {"my_choice": CHOICE, "my_answers": ANSWERS, "my_documents": DOCUMENTS}.items():
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    (folder / f"{name}.yaml").write_text(
      f"task: {name}\ndataset_path: json\ntest_split: test\n"
      f"dataset_kwargs: {{data_files: {{test: {file}}}}}\n{text}"
    )
  return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run that has learnt most of what the tasks ask."""
  folder, rng = tmp_path_factory.mktemp("run"), random.Random(1)
  (folder / "text.txt").write_text("".join(function(rng) for _ in range(3000)))
  done = called("train", *train_flags(folder / "run", *settings(folder, 60)))
  assert done.code == 0, done.err
  return folder / "run"


def settings(folder, steps):
  """Those of a run on the text in a folder."""
  return (
    f"num_steps={steps}", "model.num_layers=2", "model.d_model=64", "model.num_heads=2",
    "model.num_kv_heads=1", "model.d_ff=128", "data.seq_len=64", "data.batch_size=16",
    f"data.paths={folder}/text.txt", "data.tokenizer=bpe", "data.bpe_vocab_size=300",
    "optimizer.learning_rate=1e-2", "precision.compute_dtype=float32", "sample.max_tokens=0",
    "eval.bigram_baseline=False",
  )  # fmt: skip


def of_transformers(folder, tasks, **options):
  manager = TaskManager(include_path=str(tasks), include_defaults=False)
  found = lm_eval.simple_evaluate(
    "hf", {"pretrained": str(folder), "dtype": "float32"}, tasks=manager.all_subtasks,
    task_manager=manager, device="cpu", batch_size=8, log_samples=False, **options,
  )  # fmt: skip
  return {
    f"{task}/{metric.removesuffix(',none')}": value
    for task, metrics in found["results"].items()
    for metric, value in metrics.items()
    if isinstance(value, float)
  }


def test_numbers_are_those_of_transformers_on_the_export(run, tasks, tmp_path):
  exported = called("bridge", "export", f"--workdir={run}", f"--folder={tmp_path}/out")
  assert exported.code == 0, exported.err
  for options in ({}, {"num_fewshot": 2, "limit": 6}):
    flags = [f"--{name}={value}" for name, value in options.items()]
    found = called("evaluate", f"--workdir={run}", f"--tasks={tasks}", "--json", *flags)
    assert found.code == 0, found.err
    ours, theirs = json.loads(found.out), of_transformers(tmp_path / "out", tasks, **options)
    assert ours.keys() == theirs.keys() and len(ours) == 9
    assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-3)
    assert "engine beside the forward pass of the training: log-probabilities of" in found.err
  assert 0 < ours["my_choice/acc"] < 1 and ours["my_answers/exact_match"] > 0


def test_the_run_alone_and_with_each_adapter_do_them(run, tasks, tmp_path):
  flags = train_flags(tmp_path / "tuned", *settings(run.parent, 20), "finetune.adapter=lora")
  assert called("train", f"--init_from={run}", *flags).code == 0
  peft = ("--format=peft", f"--folder={tmp_path}/peft")
  assert called("bridge", "export", f"--workdir={tmp_path}/tuned", *peft).code == 0
  score = lambda of, *flags: json.loads(
    called("evaluate", f"--workdir={of}", f"--tasks={tasks}", "--json", *flags).out
  )
  found = score(run, f"--adapter=x={tmp_path}/peft")
  for name, of in (("base", run), ("x", tmp_path / "tuned")):
    alone = {f"{name}/{metric}": value for metric, value in score(of).items()}
    assert {metric: found[metric] for metric in alone} == pytest.approx(alone, rel=1e-4)
  assert found["x/my_documents/bits_per_byte"] != found["base/my_documents/bits_per_byte"]


def test_tasks_that_there_are_not_say_so(run, tasks, tmp_path):
  (tmp_path / "empty").mkdir()
  long = tmp_path / "long.yaml"
  text = (tasks / "my_answers.yaml").read_text()
  long.write_text(text.replace("max_gen_toks: 12", "max_gen_toks: 64"))
  odd = tmp_path / "odd.yaml"
  odd.write_text(text.replace("max_gen_toks: 12", "num_beams: 3"))
  missing, broken = tmp_path / "missing.yaml", tmp_path / "broken.yaml"
  missing.write_text(text.replace("my_answers.jsonl", "gone.jsonl"))
  broken.write_text("task: [")
  for name, message in {
    f"{missing}": f"{missing}: the task cannot be used: FileNotFoundError: Unable to find",
    f"{broken}": f"{broken}: the task cannot be used: ParserError: while parsing a flow node",
    "no_such_task": "'no_such_task' is no task of lm-evaluation-harness",
    f"{tmp_path}/empty": f"{tmp_path}/empty holds no task",
    f"{long}": "answers of up to 64 tokens (max_gen_toks), but the model was trained with 64",
    f"{odd}": "num_beams has no counterpart here",
    f"{tasks},{tasks}/my_choice.yaml": "several tasks with the name 'my_choice'",
  }.items():
    assert message in called("evaluate", f"--workdir={run}", f"--tasks={name}").error()


def test_the_harness_itself_can_load_a_run(run, tasks):
  from ats_jax.inference import harness

  manager = TaskManager(include_path=str(tasks), include_defaults=False)
  model = registry.get_model("ats_jax")
  assert model is harness.RunLM
  found = lm_eval.simple_evaluate(
    made := model(str(run)), tasks=["my_answers"], task_manager=manager, limit=2
  )
  made.close()
  assert found["results"]["my_answers"]["exact_match,none"] in (0, 0.5, 1)
