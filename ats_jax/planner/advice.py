"""Advice on a plan: what would make it fit, and why `fit` picked a mesh."""

from typing import Any, NamedTuple

from ats_jax.config.schema import Config
from ats_jax.config.validate import validate
from ats_jax.metrics.memory import GIB
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.fit import AXES, REMATS, Candidate, FitResult, with_settings

SHOWN_CANDIDATES = 8  # rows of the table of candidates


class MemorySaving(NamedTuple):
  """A setting that would make a plan smaller.

  Attributes:
    settings: the changed settings, by dotted name.
    bytes: the bytes that a device needs with them.
  """

  settings: dict[str, Any]
  bytes: int


def memory_savings(cfg: Config, devices: int, plan: dict[str, Any]) -> list[MemorySaving]:
  """List single changes that make a plan smaller, the smallest resulting plan first.

  Args:
    cfg: the config, resolved or not.
    devices: the number of devices, as in `describe`.
    plan: the result of `describe` for both.
  """
  cfg = resolve_without_data(cfg)
  mesh, used = plan["run"]["mesh"], planned_bytes(plan)
  tries: list[dict[str, Any]] = []
  plainly = {"mesh.compress_gradients": "none"} if cfg.mesh.compress_gradients != "none" else {}
  if mesh["data"] > 1:
    tries.append({"mesh.data": 1, "mesh.fsdp": mesh["fsdp"] * mesh["data"], **plainly})
  if plainly:
    tries.append(plainly)
  if cfg.mesh.zero < 3:
    tries.append({"mesh.zero": 3})
  if cfg.mesh.keep_gathered:
    tries.append({"mesh.keep_gathered": False})
  tries += [{"step.remat": r} for r in REMATS[REMATS.index(cfg.step.remat) + 1 :]]
  tries += [{"step.accum_steps": n * cfg.step.accum_steps} for n in (2, 4, 8)]
  if cfg.precision.param_dtype == "float32":
    tries.append({"precision.param_dtype": "bfloat16"})
  named = [f"{name}_dtype" for name in cfg.optimizer.formats()]
  dtypes = {name: getattr(cfg.optimizer, name) for name in named if hasattr(cfg.optimizer, name)}
  if "float32" in dtypes.values():
    tries.append({f"optimizer.{name}": "bfloat16" for name in dtypes})
  savings = []
  for settings in tries:
    try:
      smaller = describe(validate(with_settings(cfg, settings)), devices)
    except ValueError:  # the mesh or the batch does not divide
      continue
    if planned_bytes(smaller) < used:
      savings.append(MemorySaving(settings, planned_bytes(smaller)))
  return sorted(savings, key=lambda relief: relief.bytes)


def memory_lines(cfg: Config, devices: int, plan: dict[str, Any], limit: int) -> list[str]:
  """Say whether a plan fits; if not, list its largest parts and single changes that would help."""
  used = planned_bytes(plan)
  if used <= limit:
    return [f"fits: {_gib(used)} of {_gib(limit)} GiB"]
  parts = plan["device_bytes_exact"] | plan["device_bytes_estimated"]
  largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
  lines = [
    f"does not fit: {_gib(used)} of {_gib(limit)} GiB, {_gib(used - limit)} too many",
    "  the largest parts: " + ", ".join(f"{name} {_gib(size)}" for name, size in largest),
  ]
  helps = memory_savings(cfg, devices, plan)
  if helps:
    lines.append("  what would help, one at a time:")
  width = max((len(_settings_text(relief.settings)) for relief in helps), default=0)
  for relief in helps:
    verdict = "fits" if relief.bytes <= limit else "still too large"
    lines.append(
      f"    {_settings_text(relief.settings):<{width}}  {_gib(relief.bytes):>9} GiB  {verdict}"
    )
  if not any(relief.bytes <= limit for relief in helps):
    lines.append("  none of it alone: try them together (`ats-jax plan --fit`), or more devices")
  return lines


def fit_lines(found: FitResult) -> list[str]:
  """Render the result of a search: the candidates considered, the pick, and the reasons."""
  looked_at = _shortened(found.considered)
  width = max(len(candidate.mesh) for candidate in [*looked_at, *found.slower]) + 2
  lines = [f"{'mesh':<{width}}{'remat':<15}{'accum':>6}{'GiB':>9}{'ms':>12}"]
  for candidate in looked_at:
    size = f"{_gib(candidate.bytes or 0)}"
    lines.append(_row(candidate, width, size, "picked" if candidate.fits else "too large"))
  hidden = len(found.considered) - len(looked_at)
  if hidden:
    lines.append(f"  and {hidden} more that are too large")
  lines += [_row(candidate, width, "", "slower") for candidate in found.slower]
  if found.unseen:
    lines.append(f"  and {found.unseen} more meshes that are slower")
  for reason, names in _refusals(found.refused).items():
    lines.append(f"not possible: {'; '.join(names)}: {reason}")
  lines.append("ms: by the rates")
  pick = found.pick
  if pick is None:
    return [*lines, "", "nothing fits. The smallest plan:", *_smallest(found)]
  flags = lambda section: " ".join(
    f"--config.{name}={value}" for name, value in pick.settings.items() if name.startswith(section)
  )
  lines += ["", f"picked: {pick.mesh}", *_reasons(found, pick)]
  return [*lines, f"  {flags('mesh.')} \\", f"  {flags('step.')}"]


def _reasons(found: FitResult, pick: Candidate) -> list[str]:
  cfg, settings = found.cfg, pick.settings
  lines = [f"  {_gib(pick.bytes or 0)} of {_gib(found.limit)} GiB; the fastest that fits"]
  axes = [axis.name for axis in AXES if settings[f"mesh.{axis.name}"] > 1]
  if not axes:
    lines.append("  whole copies of the weights on each device fit, and exchange least")
  if cfg.moe.num_experts and settings["mesh.expert"] == 1 and "fsdp" in axes:
    lines.append("  no expert axis: experts fit under fsdp")
  faster = [c for c in found.considered if not c.fits]
  if faster:
    nearest = min(faster, key=lambda c: c.bytes or 0)
    remat, accum = _remat(nearest.settings), nearest.settings["step.accum_steps"]
    lines.append(
      f"  {len(faster)} faster ones are too large; the smallest needs "
      f"{_gib(nearest.bytes or 0)} GiB ({nearest.mesh}, remat={remat}, accum={accum})"
    )
  return lines


def _smallest(found: FitResult) -> list[str]:
  exact, every = found.plan["device_bytes_exact"], planned_bytes(found.plan)
  mesh = ", ".join(f"{axis}={n}" for axis, n in found.plan["run"]["mesh"].items() if n > 1)
  state, step = sum(exact.values()), found.cfg.step
  ways = found.plan["run"]["devices"]
  lines = [
    f"  {mesh or 'one device'}, step.remat={step.remat}, step.accum_steps={step.accum_steps} needs "
    f"{_gib(every)} of {_gib(found.limit)} GiB: {_gib(state)} of it state and gradients",
  ]
  room = found.limit - (every - state)
  if room > 0:
    lines.append(
      f"  with all else as it is the state needs about {-(-state * ways // room):,} devices, or "
      "smaller formats (precision.param_dtype, mu_dtype, nu_dtype), or a smaller model"
    )
  else:
    lines.append(
      "  one row does not fit beside any state: lower data.seq_len or step.loss_chunk_tokens"
    )
  return lines


def _shortened(considered: list[Candidate]) -> list[Candidate]:
  """The last candidate of each mesh, which is the smallest; at most SHOWN_CANDIDATES."""
  last = {candidate.mesh: candidate for candidate in considered}
  chosen = sorted(last.values(), key=lambda c: (c.fits, c.seconds))
  return chosen[-SHOWN_CANDIDATES:]


def _refusals(refused: dict[str, str]) -> dict[str, list[str]]:
  """Group impossible meshes by reason."""
  groups: dict[str, list[str]] = {}
  for name, reason in refused.items():
    groups.setdefault(reason, []).append(name)
  return groups


def _remat(settings: dict[str, Any]) -> str:
  """The remat policies of layers and of the stages of a pipeline, as text."""
  of_stage = settings["step.remat_stages"]
  return settings["step.remat"] + (f"/{of_stage}" if of_stage != "full" else "")


def _row(candidate: Candidate, width: int, size: str, verdict: str) -> str:
  remat, accum = _remat(candidate.settings), candidate.settings["step.accum_steps"]
  time = f"{candidate.seconds * 1e3:,.1f}"
  return f"{candidate.mesh:<{width}}{remat:<15}{accum:>6}{size:>9}{time:>12}  {verdict}"


def _settings_text(settings: dict[str, Any]) -> str:
  return " ".join(f"{name}={value}" for name, value in settings.items())


def _gib(size: int) -> str:
  return f"{size / GIB:,.1f}"
