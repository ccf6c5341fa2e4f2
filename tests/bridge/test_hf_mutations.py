"""The logits of every case are those of `transformers`, but not with a row or a field wrong."""

import dataclasses
import json

import hf_gate
import pytest
import transformers
from hf_models import CASES

from ats_jax.bridge.families import FAMILIES
from ats_jax.bridge.family import FixedField, OwnWeight
from ats_jax.bridge.folder import open_model_folder

pytestmark = [
  pytest.mark.hf,
  pytest.mark.usefixtures("mesh"),
  pytest.mark.filterwarnings("default"),  # those of torch and transformers are not ours
]

# For each family the cases in which every row and field of its tables says something.
OF_FAMILY = {
  kind: [name for name, (model_type, _) in CASES.items() if model_type == kind] for kind in FAMILIES
}


@dataclasses.dataclass(frozen=True)
class Wrong:
  """A transform that puts the last dimension of ours backwards."""

  right: object

  def their_shape(self, ours):
    return self.right.their_shape(ours)

  def to_ours(self, theirs, ours):
    return self.right.to_ours(theirs, ours)[..., ::-1]


@pytest.fixture(scope="module")
def tried():
  """What was wrong in some family: rows and fields that several share are tried in the first."""
  return set()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logits_are_theirs_and_a_wrong_row_fails(kind, cases, tried):
  every = set()
  assert OF_FAMILY[kind]
  for name in OF_FAMILY[kind]:
    source, theirs = cases(name)
    assert hf_gate.passes(source, theirs), name
    every |= {row for row in source.family.rows if not isinstance(row, OwnWeight)}
    for number, row in enumerate(source.family.rows):
      if isinstance(row, OwnWeight) or row in tried or not any(map(row.names, source.tensors)):
        continue
      tried.add(row)
      wrong = dataclasses.replace(row, transform=Wrong(row.transform))
      assert not hf_gate.passes(hf_gate.with_row(source, number, wrong), theirs), row
  assert tried >= every


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_wrong_field_fails(kind, cases, tried):
  """Each setting that the tables give, changed by itself; words and switches from each value."""
  for name in OF_FAMILY[kind]:
    source, theirs = cases(name)
    for setting, value in source.settings.items():
      what = (setting, value if isinstance(value, bool | str) else None)
      if what in tried or _is_idle(source.settings, setting):
        continue
      tried.add(what)
      wrong = hf_gate.with_setting(source, setting, other(setting, value))
      assert not hf_gate.passes(wrong, theirs), (name, setting)


WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
RAMP = {f"model.rope_{name}" for name in ("slow_turns", "fast_turns", "original_len")}


def _is_idle(own, setting) -> bool:
  """Whether nothing reads a setting in this model."""
  if setting in ("moe.bias_update", "moe.bias_rate"):  # for a training that goes on
    return True
  if setting == "model.rope_scaling.name":  # without a factor none of them does anything
    return own[setting] == "none"
  if own.get("model.rope_scaling.whole_pairs") and setting in RAMP:  # rounded to the same pairs
    return True
  if setting == "moe.group_score":
    return own["moe.num_groups"] == 1
  all_sparse = own.get("moe.every", 1) == 1 and not own.get("moe.dense_first")
  return setting == "model.d_ff" and own.get("moe.num_experts", 0) > 0 and all_sparse


def other(setting, value):
  """Another value of a setting."""
  if setting == "model.rope_scaling.name":
    return "none"
  if isinstance(value, bool):
    return not value
  if isinstance(value, str):
    pairs = [("all", "head"), ("silu", "gelu_tanh"), ("sigmoid", "softmax")]
    pairs += [("scores", "logits"), ("top2", "max")]
    others = {one: two for pair in pairs for one, two in (pair, pair[::-1])}
    return {**others, "clamped": "silu"}[value]
  if isinstance(value, float):
    return 1.5 * value + (0.5 if not value else 0.0)
  return value + 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_with_another_value_or_none(kind, cases, tmp_path):
  """What is fixed is refused; a field that is missing means what `transformers` takes it for."""
  source, _ = cases(OF_FAMILY[kind][0])
  family = FAMILIES[kind]
  for row in family.fields:
    if isinstance(row, FixedField):
      fields = {**source.fields, row.theirs: "something else"}
      (tmp_path / "config.json").write_text(json.dumps(fields))
      with pytest.raises(ValueError, match=row.theirs):
        open_model_folder(tmp_path)

  # Half of a head rotates in this class, which the table refuses.
  needed = {"rope_parameters": WHOLE} if kind == "glm4_moe" else {}
  defaults = transformers.AutoConfig.for_model(kind, **needed).to_dict()
  if defaults.get("num_experts_per_tok", 0) is None:  # the class computes nothing without
    defaults["num_experts_per_tok"] = needed["num_experts_per_tok"] = 2
  sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
  needed |= {key: defaults[key] for key in ("vocab_size", *sizes)}
  known = {key for row in family.fields for key in row.keys} | {"max_position_embeddings"}
  assert family.read(needed) == family.read({k: v for k, v in defaults.items() if k in known})
