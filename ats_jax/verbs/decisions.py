"""What the orchestrator saw in a run, what it did, and what that changed.

ats-jax decisions runs/debug
ats-jax decisions runs/debug --replay
"""

from absl import flags

from ats_jax.checkpoint import workdir
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.store import paths
from ats_jax.verbs import cli

FLAGS = flags.FlagValues()
_REPLAY = flags.DEFINE_bool(
  "replay",
  False,
  "Also decide again from what was seen, and compare with what was decided.",
  flag_values=FLAGS,
)


def main(argv: list[str]) -> None:
  """Print the story."""
  path = paths.parse(argv[0]) / workdir.DECISIONS
  if not path.is_file():
    raise ValueError(
      f"{argv[0]} holds no {workdir.DECISIONS}. A run writes it with --config.orchestrator.mode="
      "observe or act."
    )
  print("\n".join(tell(path)))
  if _REPLAY.value:
    if ledger.replay(path) != ledger.decisions(path):
      raise ValueError(
        f"{path} decides otherwise when it is replayed: this is another version of the policy, or "
        "the file was edited."
      )
    print("replayed: the same decisions")


COMMANDS = {"": cli.Command(main, FLAGS, __doc__, operand="workdir")}
