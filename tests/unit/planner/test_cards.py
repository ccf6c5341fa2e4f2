"""Each variant of configs/card.py fits the card that it is for, and its table says so."""

import pytest
from helpers import thorough_but

from ats_jax.config import from_config_dict
from ats_jax.config.file import load_file
from ats_jax.metrics.memory import GIB
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.finetune import Chooser
from ats_jax.planner.hardware import TYPICAL, typical
from lab import hardware_tables
from lab.hardware_tables import CARDS, compiled_card, planned_card, records

QUICK = ("24gb", "t4")


@pytest.mark.parametrize(
  "variant",
  [v if v in QUICK else pytest.param(v, marks=pytest.mark.thorough) for v in CARDS],
)
def test_it_fits_with_room_to_spare(variant):
  device, gib = CARDS[variant]
  plan = planned_card(variant)
  assert 0.15 * gib < plan.gib <= 0.9 * gib
  assert plan.gib == pytest.approx(float(compiled_card(variant)["GiB"]), rel=0.07)
  assert plan.gib < TYPICAL[device].gib
  assert plan.tokens_per_sec > 0


FINETUNED = {"8gb": "RTX4060", "16gb": "RTX4080", "24gb": "RTX3090", "48gb": "A6000"} | {
  "80gb": "A100", "141gb": "H200",
}  # fmt: skip


@pytest.mark.parametrize("variant", thorough_but(list(FINETUNED), 2))
def test_fine_tuning_fits_too(variant):
  cfg = from_config_dict(load_file(f"finetune:{variant}"))
  used = planned_bytes(describe(cfg, 1)) / GIB
  assert 0.4 * int(variant[:-2]) < used <= 0.92 * int(variant[:-2])
  assert used < TYPICAL[FINETUNED[variant]].gib


@pytest.mark.thorough
def test_weights_that_do_not_fit_become_codes():
  """8.03B on a card of 12 GB; what is given stays."""

  def chosen(*given):
    config = load_file("finetune:24gb")
    config.data.seq_len = 1024
    chooser = Chooser(config.to_dict(), frozenset(given))
    chooser.of_memory(12 * GIB, 1, typical("RTX3060"))
    return chooser

  made = chosen()
  assert made.cfg.finetune.adapter.base == "nf4"
  assert "base=nf4: the weights fit as codes of 4 bits alone" in made.choices[0].in_words()
  with pytest.raises(ValueError, match=r"does not fit 1 x 12\.0 GiB: rows of data\.seq_len=1024"):
    chosen("finetune.adapter.base")


def test_what_was_compiled_fits_too():
  for variant, (_, gib) in CARDS.items():
    row = compiled_card(variant)
    assert float(row["GiB"]) <= 0.9 * gib
    assert row["scores of seq x seq"] == "none"


def test_a_card_is_named():
  for name, known in (("card", "6gb, 8gb"), ("finetune", "8gb, 16gb")):
    with pytest.raises(ValueError, match=rf"unknown variant '32gb'\. Choose one of {known}"):
      load_file(f"{name}:32gb")
  t4 = from_config_dict(load_file("card:t4"))
  assert t4.precision.compute_dtype == "float16"  # it has no bfloat16


def test_tables_have_a_cell_for_each_column():
  for lines in (hardware_tables.steps, hardware_tables.ops):
    header, *rows = lines()
    assert rows and {len(row) for row in rows} == {len(header)}


def test_what_the_registry_allows_was_compiled():
  allowed = [row for row in records(hardware_tables.OPS_COMPILED) if row["registry"] == "yes"]
  assert allowed and {row["compiles"] for row in allowed} == {"yes"}
