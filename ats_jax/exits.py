"""Exit codes: the same for all verbs. docs/reference/cli.md has this table too."""

DONE, FAULT, REFUSED, STOPPED = 0, 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: try again

MEANINGS = {
  "0": "done",
  "1": "a fault of the program or the machine, or a check that failed (`check_env`, `data audit`, "
  "`data validate`)",
  "2": "refused: the message says what is wrong; the same command would end the same way",
  "75": "stopped by a signal after saving: the same command goes on from there",
  "128 + n": "ended at once by signal n: 130 Ctrl-C, 137 kill -9, 141 output closed, 143 SIGTERM",
}


class FaultError(RuntimeError):
  """A fault of the machine or the network that its message explains; it may pass: exit code 1."""
