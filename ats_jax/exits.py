"""Exit codes: the same for all verbs. docs/reference/cli.md has this table too."""

DONE, FAULT, REFUSED = 0, 1, 2
LEFT, STOPPED = 69, 75  # EX_UNAVAILABLE and EX_TEMPFAIL (try again) of sysexits.h

MEANINGS = {
  "0": "done",
  "1": "a fault of the program or the machine, or a check that failed (`check_env`, `data audit`, "
  "`data validate`)",
  "2": "refused: the message says what is wrong; the same command would end the same way",
  "69": "left alone: another process of the job is gone, or fails and says why",
  "75": "stopped by a signal after saving: the same command goes on from there",
  "128 + n": "ended at once by signal n: 130 Ctrl-C, 137 kill -9, 141 output closed, 143 SIGTERM",
}


class FaultError(RuntimeError):
  """A fault of the machine or the network that its message explains; it may pass: exit code 1."""
