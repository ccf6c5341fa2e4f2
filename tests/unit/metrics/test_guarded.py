"""A writer that fails in the middle of a run is given up, once and loudly; the others go on."""

import threading

import pytest
from absl import logging as absl_logging

from ats_jax import extensions
from ats_jax.config.schema import LogConfig
from ats_jax.metrics import guarded
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.guarded import Guarded
from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.writer import MetricWriter

AWAY = OSError("network away")


class Service(MetricWriter):
  """Keeps steps; fails at some of them, or waits."""

  def __init__(self, opening=None, fails=(), error=AWAY):
    self.steps, self.closed, self.fails, self.error = [], False, fails, error
    self.may_go = threading.Event()
    self.may_go.set()

  def write_scalars(self, step, scalars):
    self.may_go.wait()
    if step in self.fails:
      raise self.error
    self.steps.append((step, threading.current_thread().name))

  def flush(self):
    pass

  def close(self):
    self.closed = True


def write(writer, steps):
  for step in steps:
    writer.write_scalars(step, {"train/loss": 1.0})
    writer.flush()


def test_everything_arrives_in_order_from_another_thread():
  service = Service()
  writer = Guarded("service", service)
  write(writer, range(50))
  writer.close()
  assert service.steps == [(step, "writer service") for step in range(50)] and service.closed


def test_one_that_fails_is_given_up_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
  made = []

  def make(opening):
    made.append(Service(opening, fails=(3, 4, 5)))
    return made[0]

  extensions.writers.open()  # once in a process: what it registers must outlive the test
  monkeypatch.setattr(extensions.writers, "_entries", dict(extensions.writers._entries))
  extensions.writers.register("service")(make)
  writer = create_writer(LogConfig(writers=("service", "jsonl")), tmp_path, resume_step=None)
  write(writer, range(9))
  writer.close()
  assert [step for step, _ in made[0].steps] == [0, 1, 2]
  assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(9))
  said = [r for r in caplog.records if r.levelno == absl_logging.converter.STANDARD_ERROR]
  assert len(said) == 1
  assert "'service' FAILED and is given up" in said[0].getMessage()
  assert "(OSError: network away)" in said[0].getMessage()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_one_is_said_as_such(caplog):
  service = Service(fails=(1,), error=KeyError("oops"))
  writer = Guarded("service", service)
  write(writer, range(4))
  writer.close()
  assert [step for step, _ in service.steps] == [0]
  assert "a mistake in it, whose traceback is printed" in caplog.text


def test_nobody_waits_for_one_that_hangs(monkeypatch, caplog):
  monkeypatch.setattr(guarded, "MAX_WAITING", 5)
  service = Service()
  service.may_go.clear()
  writer = Guarded("service", service, close_secs=0.05)
  write(writer, range(10))
  assert "it is 5 calls behind" in caplog.text
  writer.close()
  caplog.clear()
  patient = Guarded("other", service, close_secs=0.05)
  patient.write_scalars(1, {"a": 1.0})
  patient.close()
  assert "it did not end within 0.05 s" in caplog.text
  service.may_go.set()
