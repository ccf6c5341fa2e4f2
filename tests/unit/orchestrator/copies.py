"""How many states a run has in host memory."""

import weakref

from ats_jax.orchestrator.trials.snapshots import Snapshot


def most_copies(monkeypatch):
  """From here on; a function that gives the most that there were at once."""
  real, taken, most = Snapshot.take.__func__, [], [0]

  def take(cls, *given):
    snapshot = real(cls, *given)
    taken.append(weakref.ref(snapshot))
    most.append(sum(ref() is not None for ref in taken))
    return snapshot

  monkeypatch.setattr(Snapshot, "take", classmethod(take))
  return lambda: max(most)
