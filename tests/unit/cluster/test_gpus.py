"""What is read out of `nvidia-smi`: its output on machines that others have described in public."""

import pytest

from ats_jax.cluster.preflight import gpus
from ats_jax.cluster.preflight.gpus import (
  gpu_rows,
  islands,
  parse_gpus,
  parse_topology,
  topology_row,
)
from ats_jax.cluster.preflight.results import CheckVerdict

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
# Four H100s, all linked (NVIDIA/nccl issue 1617).
ALL_LINKED = (
  """
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    NIC2    NIC3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV6     NV6     NV6     PIX     SYS     SYS     SYS     6,14,22,30      3               N/A
GPU1    NV6      X      NV6     NV6     SYS     PIX     SYS     SYS     4,12,20,28      1               N/A
GPU2    NV6     NV6      X      NV6     SYS     SYS     PIX     SYS     7,15,23,31      7               N/A
GPU3    NV6     NV6     NV6      X      SYS     SYS     SYS     PIX     5,13,21,29      5               N/A
NIC0    PIX     SYS     SYS     SYS      X      SYS     SYS     SYS
NIC1    SYS     PIX     SYS     SYS     SYS      X      SYS     SYS
NIC2    SYS     SYS     PIX     SYS     SYS     SYS      X      SYS
NIC3    SYS     SYS     SYS     PIX     SYS     SYS     SYS      X
"""  # noqa: E501
  + LEGEND
)
# Four RTX 3090s, two bridges (aikitoria/open-gpu-kernel-modules pull request 18).
PAIRS = (
  """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PHB     NV4     NODE    0-23    0               N/A
GPU1    PHB      X      NODE    NV4     0-23    0               N/A
GPU2    NV4     NODE     X      PHB     0-23    0               N/A
GPU3    NODE    NV4     PHB      X      0-23    0               N/A
"""
  + LEGEND
)
# RTX 4090s with tabs, and the escapes that underline the header (NVIDIA/go-gpuallocator issue 17).
NO_LINKS = (
  "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
  "GPU0\t X \tSYS\tSYS\t0-55,112-167\t0\t\tN/A\n"
  "GPU1\tSYS\t X \tPHB\t56-111,168-223\t1\t\tN/A\n"
  "NIC0\tSYS\tPHB\t X \n" + LEGEND
)
# The fields of two cards as published, in the order that is asked for.
HEALTHY = (
  "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 345, 1980, 0x0000000000000001, 0, 28, 700.00, "
  "700.00, Default, Disabled\n"
)
CONSUMER = (
  "1, NVIDIA GeForce RTX 3090, 595.58.03, 24576, 1, 210, 2100, 0x0000000000000001, [N/A], 31, "
  "300.00, 420.00, Default, [N/A]\n"
)


def test_links():
  links = parse_topology(ALL_LINKED)
  assert len(links) == 4 * 3 and set(links.values()) == {"NV6"}
  assert parse_topology(PAIRS)[0, 2] == parse_topology(PAIRS)[2, 0] == "NV4"
  assert parse_topology(NO_LINKS) == {(0, 1): "SYS", (1, 0): "SYS"}
  assert parse_topology("") == {}


def test_the_mesh_that_suits():
  row = topology_row(parse_topology(ALL_LINKED))
  assert row.verdict is CheckVerdict.OK and "mesh.fsdp=4" in row.advice
  row = topology_row(parse_topology(NO_LINKS))
  assert (
    row.verdict is CheckVerdict.ADVICE and "keep mesh.tensor and mesh.expert at 1" in row.advice
  )
  assert islands(parse_topology(PAIRS)) == [[0, 2], [1, 3]]
  row = topology_row(parse_topology(PAIRS))
  assert "mesh.data=2 between groups, at most 2 of fsdp" in row.advice
  assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in row.advice
  # Three of four linked: the fourth is on PCIe.
  links = {pair: ("SYS" if 3 in pair else "NV4") for pair in parse_topology(PAIRS)}
  assert islands(links) == [[0, 1, 2], [3]]
  assert "train on the 3 of the largest" in topology_row(links).advice


def test_a_healthy_card_and_one_without_some_fields():
  card, other = parse_gpus(HEALTHY + CONSUMER)
  assert (card.name, card.memory_mib, card.throttles) == ("NVIDIA H100 80GB HBM3", 81559, ())
  (row,) = gpu_rows([card])
  assert row.verdict is CheckVerdict.OK and not row.advice
  assert row.found.endswith("clock 345 of 1,980 MHz, 28 C, power limit 700 W, ECC errors 0")
  assert other.ecc_errors is None and not other.mig
  (row,) = gpu_rows([other])
  assert "no ECC" in row.found and row.verdict is CheckVerdict.ADVICE
  assert row.advice == "Its power limit is below the usual 420 W."
  with pytest.raises(ValueError, match="expected 14 fields"):
    parse_gpus("0, NVIDIA H100 80GB HBM3, 81559\n")


@pytest.mark.parametrize(
  ("was", "now", "verdict", "said"),
  [
    ("01, 0,", "01, 3,", CheckVerdict.BAD, "Its memory has lost bits"),
    ("0x0000000000000001", "0x0000000000000024", CheckVerdict.ADVICE, "(power cap, too hot)"),
    ("81559, 4,", "81559, 40004,", CheckVerdict.ADVICE, "Another process holds memory"),
    ("Disabled", "Enabled", CheckVerdict.ADVICE, "MIG is on"),
    ("Default", "Exclusive_Process", CheckVerdict.ADVICE, "One process at a time"),
  ],
)
def test_a_card_with_a_problem(was, now, verdict, said):
  assert was in HEALTHY
  (row,) = gpu_rows(parse_gpus(HEALTHY.replace(was, now)))
  assert row.verdict is verdict and said in row.advice


def test_commands_that_are_not_there_fail_or_print():
  assert gpus.output_of(["ats-jax-no-such-command"]) is None
  assert gpus.output_of(["false"]) is None
  assert gpus.output_of(["echo", "text"]) == "text\n"
  assert gpus.no_gpu_row(["ats-jax-no-such-command"]).verdict is CheckVerdict.NONE
  row = gpus.no_gpu_row(["false"])
  assert row.verdict is CheckVerdict.ADVICE and row.advice.startswith("Run it to see why: false;")
