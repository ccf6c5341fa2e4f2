"""What a run took: numbers for `performance.json`, and as text."""

from collections.abc import Mapping
from typing import Any

import jax

from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.memory import GIB, memory_metrics
from ats_jax.metrics.throughput import Throughput


def performance_stats(
  goodput: Goodput, meter: Throughput, predicted_bytes: int | None, program: Mapping[str, Any]
) -> dict[str, Any]:
  """What this process's part of a run took, as JSON-ready numbers.

  Args:
    goodput: where the wall time went.
    meter: that measured its speed.
    predicted_bytes: of a device, that the newest step needs; None if none was compiled.
    program: what ran: the last three entries of the result.

  Returns:
    `device`, `Throughput.summary` (step times are means of `log.every_steps` steps),
    `Goodput.summary`, `memory_metrics`, `memory/predicted_gib`; `kernels` (op -> implementation),
    `compiler_options`, `compilation_cache`.
  """
  predicted = {} if predicted_bytes is None else {"memory/predicted_gib": predicted_bytes / GIB}
  return {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    **meter.summary(),
    **goodput.summary(),
    **memory_metrics(),
    **predicted,
    **program,
  }


def performance(stats: dict[str, Any]) -> str:
  """The numbers of `performance_stats` as text; what is not known here is left out."""

  def say(*parts: tuple[str, str, float]) -> str:
    known = [form.format(scale * stats[name]) for form, name, scale in parts if name in stats]
    return ", ".join(known)

  lines = {
    f"speed on {stats['device']}": say(
      ("{:,.0f} tokens/s", "train/tokens_per_sec", 1),
      ("MFU {:.1%}", "train/mfu", 1),
      ("{:.1%} by 6N + 12LdS", "train/mfu_6n", 1),
    )
    or "too few steps to time",
    "a step": say(
      ("median {:,.1f} ms", "train/step_secs_p50", 1e3),
      ("90th percentile {:,.1f}", "train/step_secs_p90", 1e3),
      ("slowest {:,.1f} (means of intervals)", "train/step_secs_max", 1e3),
    ),
    "memory of a device": say(
      ("{:.2f} GiB used at most", "memory/device_peak_gib", 1),
      ("{:.2f} GiB predicted for the step", "memory/predicted_gib", 1),
      ("{:.2f} GiB there", "memory/device_limit_gib", 1),
    ),
    "kernels": ", ".join(f"{op} {name}" for op, name in stats["kernels"].items()),
    "compilation": f"{stats['goodput/compile_secs']:.1f} s",
    "compilation cache": stats["compilation_cache"],
  }
  return "\n".join(f"{title}: {text}" for title, text in lines.items() if text)
