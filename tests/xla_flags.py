"""How much XLA's compiler does for a test's programs; for the environment, before jax is used.

Seconds of one core on the two-layer model of `helpers`: three levels of LLVM's work.

| | init and first step | a later step | of a larger model of experts: first | later |
|---|---|---|---|---|
| `QUICK` | 4.8 | 0.006 | 8.9 | 0.094 |
| `FAST_STEPS` | 7.5 | 0.0035 | 12.3 | 0.033 |
| XLA's default | 12.5 | 0.0035 | 19.5 | 0.034 |
"""

QUICK = "--xla_backend_optimization_level=0"
FAST_STEPS = "--xla_backend_optimization_level=1"  # for a run of hundreds of steps


def devices(number: int) -> str:
  """So many devices of a CPU, in the order of `ats_jax.cluster.runtime`."""
  in_order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
  return f"--xla_force_host_platform_device_count={number} {in_order}"
