"""Every rule that joins settings of sparse layers: what is wrong, where, and what to do."""

from refusals import wrongly_refused

from ats_jax.config import base_config, from_config_dict

MOE = {"moe.num_experts": 8}
GROUPS = MOE | {"moe.num_groups": 4, "moe.top_groups": 2}
TWO_STEPS = MOE | {"moe.exchange": "hierarchical", "moe.exchange.hosts": 2}
MOD = {"mod.routing": "learned"}


def build(changes):
  config = base_config()  # 4 layers
  config.update_from_flattened_dict(changes)
  return from_config_dict(config)


REFUSED = [
  (
    {"moe.num_experts": 2, "moe.top_k": 3},
    "moe.top_k=3 exceeds moe.num_experts=2.*lower top_k or add experts",
  ),
  (
    MOE | {"moe.dense_first": 2, "moe.dense_last": 2},
    "no layer has experts: moe.dense_first=2, moe.dense_last=2 and moe.every=1 leave none of "
    "model.num_layers=4.*Lower one of them, or set moe.num_experts=0",
  ),
  (MOE | {"moe.dense_first": 1, "moe.every": 4}, "no layer has experts"),
  (MOE | {"mesh.expert": 3}, "mesh.expert=3 does not divide moe.num_experts=8.*change one of"),
  (
    MOE | {"mesh.expert": 2, "moe.spare_experts": 3},
    r"mesh.expert=2 does not divide moe.num_experts=8 \+ moe.spare_experts=3",
  ),
  (
    MOE | {"moe.null_experts": 4, "moe.dispatch": "capacity"},
    "moe.null_experts=4 needs moe.dispatch=dropless.*Set moe.null_experts=0, or moe.dispatch=drop",
  ),
  (
    MOE | {"moe.top_groups": 2},
    "moe.top_groups=2 does nothing with moe.num_groups=1.*it needs moe.num_groups above 1",
  ),
  (GROUPS | {"moe.num_experts": 6}, "moe.num_groups=4 does not divide moe.num_experts=6"),
  (GROUPS | {"moe.spare_experts": 2}, "moe.num_groups=4 does not divide moe.spare_experts=2"),
  (GROUPS | {"moe.top_groups": 5}, "moe.top_groups=5 exceeds moe.num_groups=4.*Lower top_groups"),
  (
    GROUPS | {"moe.top_k": 5},
    "moe.top_k=5 exceeds the 4 experts of moe.top_groups=2 groups.*Raise top_groups or lower top_k",
  ),
  (
    GROUPS | {"moe.null_experts": 4},
    "moe.null_experts=4 belong to no group.*use them with moe.num_groups=1",
  ),
  (
    MOE | {"moe.exchange.hosts": 2, "mesh.expert": 4},
    "moe.exchange.hosts is a setting of moe.exchange.name=hierarchical",
  ),
  (
    TWO_STEPS | {"mesh.expert": 4, "moe.exchange.hosts": 3},
    "moe.exchange.hosts=3 does not divide mesh.expert=4.*Use a divisor, or 0 for one host",
  ),
  (
    MOD | {"mod.start_layer": 4},
    "mod.start_layer=4 and mod.end_layer=4 are no range within model.num_layers=4.*"
    "0 <= start < end <= 4",
  ),
  (MOD | {"mod.end_layer": 5}, r"mod.end_layer=5 are no range.*\(end_layer=0 means 4\)"),
  (MOD | {"mod.start_layer": 2, "mod.end_layer": 2}, "mod.end_layer=2 are no range"),
  (
    MOD | {"mod.start_layer": 1, "mod.end_layer": 3, "mod.every": 3},
    "mod.every=3 finds no layer between mod.start_layer=1 and mod.end_layer=3.*"
    "Lower it, widen the range, or set mod.routing=none",
  ),
  (
    MOD | {"mod.anneal_fraction": 0.5, "mod.start_capacity": 0.2, "mod.capacity": 0.3},
    "mod.start_capacity=0.2 is below mod.capacity=0.3.*Swap them, or set mod.anneal_fraction=0",
  ),
  (
    {"mod.routing": "static", "mod.decision": "predictor"},
    "mod.decision=predictor does nothing with mod.routing=static.*it needs mod.routing=learned",
  ),
]


def test_what_cannot_be():
  assert not wrongly_refused(build, REFUSED, lambda words: f"(?s){words}")


LEGAL = [
  MOE | {"moe.top_k": 8},
  {"moe.num_experts": 1, "moe.top_k": 1},
  MOE | {"moe.dense_first": 2, "moe.dense_last": 1},
  MOE | {"moe.every": 4},
  MOE | {"mesh.expert": 8},
  MOE | {"moe.num_experts": 6, "moe.spare_experts": 2, "mesh.expert": 4},
  MOE | {"moe.null_experts": 3},
  MOE | {"moe.dispatch": "capacity", "moe.capacity_factor": 0.1, "moe.num_shared": 2},
  GROUPS | {"moe.spare_experts": 4, "moe.top_k": 4},
  GROUPS | {"moe.top_groups": 4, "moe.top_k": 8},
  TWO_STEPS | {"mesh.expert": 8},
  TWO_STEPS | {"mesh.expert": 1},  # nothing is exchanged
  MOD | {"mod.start_layer": 3, "mod.every": 1},
  MOD | {"mod.start_layer": 1, "mod.end_layer": 3, "mod.every": 2},
  MOD | {"mod.anneal_fraction": 0.5, "mod.start_capacity": 0.3, "mod.capacity": 0.3},
  MOD | {"mod.decision": "predictor"},
  {"moe.num_experts": 0, "mesh.expert": 3},  # which splits the batch too
]


def test_what_is_just_legal():
  for changes in LEGAL:
    assert build(changes)
