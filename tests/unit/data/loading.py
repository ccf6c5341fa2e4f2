"""Read rows as a run does, and compare them."""

import json

import numpy as np

from ats_jax.data.look.audit import ReadingPhase, audit
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.tokens.tokenizer import ByteTokenizer

ONE_HOST = (ReadingPhase(1, 1, 1.0),)
SEVERAL_HOSTS = (ReadingPhase(1, 1, 0.3), ReadingPhase(3, 1, 0.6), ReadingPhase(2, 2, 1.0))


class WideTokenizer(ByteTokenizer):
  """Enough ids to give every token of a small corpus one of its own."""

  vocab_size, bos_id, eos_id, pad_id = 200_000, 199_997, 199_998, 199_999
  fingerprint = "wide"


def batches_of(
  ds, *, position=None, batch=12, accum=1, local=None, workers=0, prefetch=2, tells=False
):
  local = np.arange(batch // accum) if local is None else np.asarray(local)
  return TrainBatches(
    ds, position=position, accum_steps=accum, batch_size=batch, local_rows=local,
    num_workers=workers, prefetch=prefetch, tells=tells,
  )  # fmt: skip


def read(ds, count, *, hosts=1, **how):
  """`count` batches, of all hosts together, and the position behind them as a run keeps it."""
  shares, position = [], None
  slots = np.arange(how.get("batch", 12) // how.get("accum", 1))
  for local in np.array_split(slots, hosts):
    with batches_of(ds, **{"local": local} | how) as batches:
      shares.append([next(batches) for _ in range(count)])
      position = json.loads(json.dumps(batches.position()))
  join = lambda parts: {name: np.concatenate([p[name] for p in parts], 1) for name in parts[0]}
  return [join(parts) for parts in zip(*shares, strict=True)], position


def assert_same(some, others):
  """Two batches, or two lists of them, are equal in names, types and values."""
  pairs = [(some, others)] if isinstance(some, dict) else zip(some, others, strict=True)
  for one, other in pairs:
    assert one.keys() == other.keys()
    for name in one:
      assert one[name].dtype == other[name].dtype
      np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def find_fault(ds, phases=ONE_HOST, **how):
  """What the audit says of one epoch."""
  (result,) = audit(ds, scenarios={"some hosts": phases}, **how)
  return result


def assert_each_token_once(ds, phases=SEVERAL_HOSTS):
  result = find_fault(ds, phases)
  assert (result.difference, result.lost, result.repeated) == ("", 0, 0)
  assert result.targets == ds.info.num_tokens


def all_rows(ds):
  """Each row of a split once, in order."""
  return ds.read_once(range(ds.info.num_rows))


def documents(ds):
  """Name -> text of each document of a split."""
  corpus, decode = ds.packed.corpus, ds.info.tokenizer.decode
  return {corpus.name(int(d)): decode(corpus.tokens(int(d), 0, 10**9)) for d in ds.packed.documents}
