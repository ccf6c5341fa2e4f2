"""Versions, variables, memory and limits."""

import resource

import jax
import pytest

from ats_jax.cluster.preflight import host
from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, render_table

UNLIMITED = resource.RLIM_INFINITY
GOOD = {
  "files": (65536, 65536),
  "file size": (UNLIMITED, UNLIMITED),
  "locked memory": (UNLIMITED, UNLIMITED),
  "processes": (UNLIMITED, UNLIMITED),
}


def test_packages(monkeypatch):
  rows = host.version_rows()
  assert [row.verdict for row in rows] == [CheckVerdict.OK] * 2
  assert f"jax {jax.__version__}, jaxlib" in rows[1].found
  monkeypatch.setattr(host, "_PACKAGES", (*host._PACKAGES, "ats-jax-no-such-package"))
  assert host.version_rows()[1].verdict is CheckVerdict.BAD


@pytest.mark.parametrize(
  ("driver", "plugins", "backend", "said"),
  [
    (None, [], "cpu", None),
    ("580.159.04", ["jax-cuda13-plugin"], "gpu", None),
    ("580.159.04", [], "cpu", "pip install 'ats_jax[cuda]'"),
    ("550.54.15", [], "cpu", "pip install 'ats_jax[cuda12]'"),
    ("550.54.15", ["jax-cuda13-plugin"], "cpu", "too old for jax-cuda13-plugin: it needs 580"),
    ("580.159.04", ["jax-cuda13-plugin"], "cpu", "unset JAX_PLATFORMS"),
  ],
)
def test_gpus_that_jax_does_not_use(driver, plugins, backend, said):
  problems = host.cuda_problems(driver, int(driver is not None), plugins, backend)
  assert (said in problems[0]) if said else not problems


def test_variables_in_force():
  environ = {"NCCL_P2P_DISABLE": "1", "JAX_PLATFORMS": "cpu", "HOME": "/", "JAX_TOKEN": "secret"}
  _, row = host.nccl_rows(environ, 0)
  assert row.found == "JAX_PLATFORMS=cpu NCCL_P2P_DISABLE=1"
  assert row.advice == "NCCL_P2P_DISABLE=1 makes collectives slow: unset it."
  assert host.nccl_rows({}, 0)[1] == CheckResult("variables", "none is set")


def test_several_gpus_need_nccl(monkeypatch):
  monkeypatch.setattr(host, "_NCCL", ("ats-jax-no-such-package",))
  assert host.nccl_rows({}, 2)[0].verdict is CheckVerdict.BAD
  assert host.nccl_rows({}, 1)[0].verdict is CheckVerdict.NONE


VERSION_1 = "12:cpu,cpuacct:/a\n5:memory:/a/b\n0::/\n"
GIB = 2**30


@pytest.mark.parametrize(
  ("groups", "limits", "expected"),
  [
    ("0::/\n", {"memory.max": GIB}, GIB),
    ("0::/a/b\n", {"a/b/memory.max": GIB, "memory.max": 2 * GIB}, GIB),
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 3 * GIB}, 3 * GIB),
    ("0::/not/mounted\n", {"memory.max": GIB}, GIB),
    ("0::/\n", {"memory.max": "max"}, None),
    ("0::/\n", {}, None),
    ("", {"memory.max": GIB}, None),
    (VERSION_1, {"memory/a/b/memory.limit_in_bytes": GIB}, GIB),
    (VERSION_1, {"memory/memory.limit_in_bytes": 2 * GIB}, 2 * GIB),
    (VERSION_1, {"memory/a/memory.limit_in_bytes": GIB, "cpu/a/memory.limit_in_bytes": 1}, GIB),
  ],
)
def test_the_limit_of_a_control_group(tmp_path, groups, limits, expected):
  files = {"proc/self/cgroup": groups}
  files |= {f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()}
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert host.container_limit(tmp_path) == expected


def test_the_limit_of_a_container_is_shown(monkeypatch):
  for limit, shown in ((GIB, True), (2**63 - 4096, False), (None, False)):
    monkeypatch.setattr(host, "container_limit", lambda root, limit=limit: limit)
    row = host.memory_row()
    assert ("1.0 GiB for this container" in row.found) == shown
    assert "Less than 2 GiB" in row.advice or not shown


@pytest.mark.parametrize(
  ("limit", "value", "gpus", "said"),
  [
    ("files", (1024, 524288), 0, "`ulimit -n 65536`"),
    ("files", (1024, 2048), 0, "`ulimit -n 2048`"),
    ("file size", (10**9, UNLIMITED), 0, "checkpoints neither"),
    ("locked memory", (2**23, 2**23), 1, "`ulimit -l unlimited`"),
    ("locked memory", (2**23, 2**23), 0, ""),
  ],
)
def test_limits(limit, value, gpus, said):
  row = host.limit_row(GOOD | {limit: value}, gpus)
  assert said in row.advice and bool(row.advice) == bool(said)


def test_the_limits_of_this_process():
  assert host.current_limits().keys() == GOOD.keys()
  assert host.limit_row(GOOD, 8).verdict is CheckVerdict.OK


def test_shared_memory(tmp_path, monkeypatch):
  assert host.shared_memory_row(0, tmp_path).verdict is CheckVerdict.OK
  monkeypatch.setattr(host, "MIN_SHM_GIB", 2**40)
  assert "--shm-size" in host.shared_memory_row(2, tmp_path).advice
  assert host.shared_memory_row(2, tmp_path / "none").verdict is CheckVerdict.NONE


def test_the_table_wraps_under_its_column(monkeypatch):
  monkeypatch.setenv("COLUMNS", "60")
  text = render_table([CheckResult("name", "found " * 12, CheckVerdict.BAD, "advice " * 12)])
  first, *rest = text.splitlines()
  assert first.startswith("name            bad     found") and len(rest) > 2
  assert all(line.startswith(" " * 24) and len(line) <= 60 for line in rest)
