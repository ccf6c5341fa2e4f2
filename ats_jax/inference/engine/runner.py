"""The device's side of the engine: what its programs are given, and what they keep.

Letters: B rows of a call, R rows of the engine, T tokens, W pages of a row, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.inference.engine import ahead
from ats_jax.inference.engine.caches import NARROW, SlotArray, slot_arrays, slots_of
from ats_jax.inference.engine.compiled import compiled
from ats_jax.inference.engine.layout import Served
from ats_jax.inference.engine.programs import Programs, State
from ats_jax.inference.engine.request import Request
from ats_jax.inference.engine.sampling import Draw, Drawn, Settings, penalises
from ats_jax.inference.engine.schedule import Chunk, Row, Step, Tokens
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.ops.attention.paged import slot_of
from ats_jax.ops.registry import choose_generation
from ats_jax.sharding.rules import for_serving, spec
from ats_jax.step.program import Program

if TYPE_CHECKING:  # few engines score
  from ats_jax.inference.engine.score import Part

# Sizes for which programs are compiled; fewer rows, and shorter chunks, are filled up.
NUMBERS_OF_ROWS = (1, 4, 16, 64, 256)
LEAST_TOKENS = 32
STACKED = 1 << 16  # numbers of a weight at most that is one argument with others of its kind
SHARE_OF_MEMORY = 0.85  # of what weights leave free that pages may take, beside activations


class _Part(NamedTuple):
  """What one program of a step has drawn.

  Attributes:
    rows: which rows these are; the program may have had more.
    drawn: of each row a token, or where guesses were read several, in a dimension behind that of
      rows, and -1 behind the last.
  """

  rows: list[int]
  drawn: Drawn


class _Decoded(NamedTuple):
  """The last call of `decode`.

  Attributes:
    rows: which it had.
    of_rows: what the next call takes if it goes on with them.
    settings: likewise.
    which: likewise.
    drawn: what it drew.
  """

  rows: tuple[Row, ...]
  of_rows: jax.Array
  settings: Settings
  which: Draw
  drawn: Drawn

  def goes_on(self, rows: Sequence[Row]) -> bool:
    """Whether rows are the same, each behind the token that it fed."""
    return len(rows) == len(self.rows) and all(
      new.position == old.position + 1
      and new.row == old.row
      and new.request is old.request
      and (new.pages is old.pages or new.pages == old.pages)
      for old, new in zip(self.rows, rows, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Size:
  """How much the engine holds.

  Attributes:
    context: tokens of a prompt and its answer.
    rows: requests at once.
    page: tokens of a page.
    chunk: tokens of prompts that are read in a step.
    pages: pages in all; 0 = what there is memory for.
    narrow: in what pages are stored (`options.Options.pages`).
    guess: guessed tokens of a row that are read in a step (`schedule.Draft.most`); 0 = there are
      none.
  """

  context: int
  rows: int = 64
  page: int = 64
  chunk: int = 1024
  pages: int = 0
  narrow: str = ""
  guess: int = 0


def _serving[**P, R](f: Callable[P, R]) -> Callable[P, R]:
  """Call `f` under the engine's sharding plan, whatever the caller's is."""

  @functools.wraps(f)
  def inner(*args: P.args, **kwargs: P.kwargs) -> R:
    with for_serving():
      return f(*args, **kwargs)

  return inner


@_serving
def served(decoder: Decoder, program: Program, *, keep: bool = False) -> Served:
  """Pack the weights of a decoder, whose arrays are gone afterwards, but with `keep`."""
  if program.cfg.finetune.is_on:
    from ats_jax.model.adapters import merged

    decoder = ahead.eager(merged, decoder)
  return Served(decoder, keep=keep)


class ModelRunner:
  """Runs the steps of a scheduler with a model (`schedule.Runner`). Call it under the mesh.

  Attributes:
    skips: whether layers skip tokens, so that what one text keeps is of no use to another.
    window: as of `schedule.Runner`.
  """

  @_serving
  def __init__(
    self,
    model: Served,
    program: Program,
    tokenizer: Tokenizer,
    rules: Pass,
    size: Size,
  ):
    """Make empty pages."""
    cfg = program.cfg
    kernels = choose_generation(cfg, program.device, program.num.kernels)
    self._layers, self._kernels = model.layers, kernels
    self.skips = any(layer.depth is not None for layer in model.layers)
    windows = [getattr(layer.attn, "window", None) or 0 for layer in model.layers]
    self.window = max(windows) if all(windows) and not self.skips else 0
    if size.guess and self.skips:
      raise ValueError(
        "speculate: layers of this model skip tokens (mod.routing), and a place that a wrong guess "
        "took of a text's there is not given back. Use speculate=0."
      )
    self.page_size, self.max_rows, self.chunk = size.page, size.rows, size.chunk
    self.max_pages_per_row = -(-size.context // size.page)
    self._slots = tuple(
      slots_of(layer, self.max_pages_per_row * size.page, rules) for layer in self._layers
    )
    dtype = NARROW[size.narrow] if size.narrow else program.num.compute_dtype
    self._arrays = slot_arrays(cfg.model, dtype)
    self._reads = kernels.of("paged_attention", slot_of(dtype))
    if size.narrow:
      logging.info("engine: pages in %s, which are read by %s", size.narrow, self._reads)
    each = size.page * sum(array.num_bytes for array in self._arrays)
    enough, layers = size.rows * self.max_pages_per_row, len(self._layers)
    self.num_pages = size.pages or min(enough, _pages_that_fit(each * layers))
    # A layer that tokens skip has the same few pages for each row, where these are fewer in all.
    rows, own = size.rows + 1, [-(-slots // size.page) for slots in self._slots]
    self._own = tuple(
      number if layer.depth is not None and number * rows < self.num_pages else 0
      for layer, number in zip(self._layers, own, strict=True)
    )
    if any(self._own):
      shared, beside = self._own.count(0), each * rows * sum(self._own)
      self.num_pages = size.pages or min(enough, _pages_that_fit(each * shared, beside))
      logging.info(
        "engine: %d bytes a token in %d layers; %d that tokens skip have places for %d of %d of a "
        "row's, which saves %.3g MB", each // size.page * shared, shared, layers - shared,
        max(self._slots[n] for n in range(layers) if self._own[n]),
        self.max_pages_per_row * size.page,
        (each * (layers - shared) * self.num_pages - beside) / 1e6,
      )  # fmt: skip
    self._size, self._vocab = size, cfg.model.vocab_size
    self._state = self._empty()
    allowed = np.arange(cfg.model.vocab_size) < tokenizer.vocab_size
    allowed[list(tokenizer.special_ids)] = False
    allowed[list(tokenizer.end_ids)] = True
    self._allowed_V = jnp.asarray(allowed)
    self._settings: tuple[Any, Settings, Draw] | None = None
    self._last: _Decoded | None = None
    # As a plain list: a module is taken apart in Python at each call, which takes milliseconds.
    leaves, structure = jax.tree.flatten(model)
    self._weights, stacked = _stacked(leaves)
    of_model = Programs(structure, stacked, kernels, self._slots, self._own, rules)
    self._programs = compiled(of_model, size.guess)

  def _empty(self) -> State:
    rows = self.max_rows + 1
    pages = tuple(own * rows or self.num_pages for own in self._own)
    skips = tuple(layer.depth is not None for layer in self._layers)
    return _empty(tuple(self._arrays), pages, skips, rows=rows, page=self.page_size)

  def holds(self, size: Size) -> bool:
    """Whether there is room for as many texts as long as these, in such pages."""
    context = self.max_pages_per_row * self.page_size
    enough = self.max_rows >= size.rows and context >= size.context
    return enough and self._size.narrow == size.narrow and self._size.guess == size.guess

  @_serving
  def run(self, step: Step) -> list[_Part]:
    """Start a step; its handle has what each program that ran has drawn."""
    if self._state.token_R.is_deleted():  # a Ctrl-C came between a program and its result
      self._state = self._empty()
    requests = [of.request for of in (*step.chunks, *step.decode)]
    if self._state.counts_RV is None and any(penalises(r.sampling) for r in requests):
      counts = jnp.zeros((self.max_rows + 1, self._vocab), jnp.int32)
      self._state = self._state._replace(counts_RV=counts)
    results = [_Part([c.row] if c.last else [], self._read_chunk(c)) for c in step.chunks]
    if step.decode:
      rows = [row.row for row in step.decode]
      if any(row.guess for row in step.decode):
        results.append(_Part(rows, self._verify(step.decode)))
      else:
        results.append(_Part(rows, self._decode(step.decode)))
    for array in jax.tree.leaves([drawn for _, drawn in results]):
      array.copy_to_host_async()
    return results

  def read(self, handle: list[_Part]) -> Tokens:
    """Wait for a step."""
    asked = [d.likeliest_BN.shape[-1] for _, d in handle if d.likeliest_BN is not None]
    wide, shape = max(asked, default=0), (self.max_rows, 1 + self._size.guess)
    tokens = Tokens(
      np.ones(self.max_rows, np.int32),
      np.zeros(shape, np.int32),
      np.zeros(shape, np.float32),
      np.zeros((*shape, wide), np.int32),
      np.zeros((*shape, wide), np.float32),
    )
    for rows, drawn in handle:
      several = drawn.id_B.ndim > 1
      for into, array in zip(tokens[1:], drawn, strict=True):
        if array is not None:
          into[rows if several else (rows, 0)] = np.asarray(array)[: len(rows)]
      if several:
        tokens.counts[rows] = np.sum(tokens.ids[rows] >= 0, axis=1)
    return tokens

  def _read_chunk(self, chunk: Chunk) -> Drawn:
    """Read tokens of one row, and draw what follows them."""
    length, step = max(LEAST_TOKENS, 1 << (len(chunk.ids) - 1).bit_length()), self.chunk // 4
    if length > max(LEAST_TOKENS, step):  # finer, as padding takes as long as tokens
      length = -(-len(chunk.ids) // step) * step
    ids, index = np.zeros((1, length), np.int32), np.full((1, length), -1, np.int32)
    ids[0, : len(chunk.ids)] = chunk.ids
    index[0, : len(chunk.ids)] = chunk.start + np.arange(len(chunk.ids))
    counts = None
    if self._state.counts_RV is not None:
      counts = self._counted(chunk)
    # Tokens of a layer that skips some are at other slots than their positions.
    whole = chunk.first and chunk.start == 0 and not self.skips
    settings, which = self._of([chunk.request])
    table = self._table([chunk.pages], len(chunk.pages), wide=self._reads != "xla")
    self._state, drawn = self._programs.chunk(
      self._weights, self._state, ids, index, table,
      np.array([chunk.row, len(chunk.ids) - 1, chunk.first, chunk.last], np.int32), settings,
      self._allowed_V, counts, which=which, whole=whole,
    )  # fmt: skip
    return drawn

  def _counted(self, chunk: Chunk) -> np.ndarray:
    """What a chunk adds to the counts of its row."""
    counts, prompt = np.zeros(self._vocab, np.int32), len(chunk.request.prompt)
    ids = np.array((*chunk.shared, *chunk.ids))
    at = np.arange(len(ids)) + chunk.start - len(chunk.shared)
    np.add.at(counts, ids[at >= prompt], 2)
    counts[ids[at < prompt]] |= 1
    return counts

  def _decode(self, rows: Sequence[Row]) -> Drawn:
    """Draw another token of each of some rows."""
    of_rows, settings, which = self._on_device(rows)
    before = self._before(len(of_rows), which)
    self._state, of_rows, drawn = self._programs.decode(
      self._weights, self._state, of_rows, before, settings, self._allowed_V, which=which
    )
    self._last = _Decoded(tuple(rows), of_rows, settings, which, drawn)
    return _copy(drawn)  # for the host, which reads it while the next call draws

  def _verify(self, rows: Sequence[Row]) -> Drawn:
    """Draw more tokens of each of some rows."""
    of_rows, settings, which = self._of_rows(rows, wide=False)
    guess = np.full((len(of_rows), self._size.guess), -1, np.int32)
    for number, row in enumerate(rows):
      guess[number, : len(row.guess)] = row.guess
    assert self._programs.verify is not None
    # In one array, as each takes the host its time, for which the device waits here.
    self._state, drawn = self._programs.verify(
      self._weights, self._state, np.concatenate([guess, of_rows], axis=1), settings,
      self._allowed_V, which=which,
    )  # fmt: skip
    return drawn

  def _of_rows(self, rows: Sequence[Row], *, wide: bool) -> tuple[np.ndarray, Settings, Draw]:
    """What programs for several rows take, filled up to a number for which one is compiled."""
    size = next((n for n in NUMBERS_OF_ROWS if n >= len(rows)), 1 << (len(rows) - 1).bit_length())
    spare = size - len(rows)
    most = max(len(row.pages) for row in rows)
    table = self._table([*(row.pages for row in rows), *[()] * spare], most, wide=wide)
    of_rows = np.full((size, 2 + table.shape[1]), -1, np.int32)
    of_rows[:, 0], of_rows[:, 2:] = self.max_rows, table
    of_rows[: len(rows), :2] = [row[:2] for row in rows]
    requests = [row.request for row in rows]
    return of_rows, *self._of([*requests, *requests[:1] * spare])

  def _on_device(self, rows: Sequence[Row]) -> tuple[jax.Array, Settings, Draw]:
    """What `decode` takes of rows, where its last call had it.

    Most steps go on with the same rows and pages. Then nothing is sent.
    """
    last = self._last
    if last is not None and last.of_rows.is_deleted():  # a Ctrl-C came before its result
      last = None
    if last is not None and last.goes_on(rows):
      return last.of_rows, last.settings, last.which
    of_rows, settings, which = self._of_rows(rows, wide=self._reads != "xla")
    if last is not None and of_rows.shape == last.of_rows.shape:
      return _put(last.of_rows, of_rows), settings, which
    return jnp.asarray(of_rows), settings, which

  def _before(self, rows: int, which: Draw) -> Drawn:
    """What `decode` may write its draws to."""
    if (last := self._last) is not None:
      fits = last.which == which and len(last.drawn.id_B) == rows
      if fits and not last.drawn.id_B.is_deleted():
        return last.drawn
    return Drawn.zeros(rows, self._vocab, which)

  def _table(self, of_rows: Sequence[tuple[int, ...]], most: int, *, wide: bool) -> np.ndarray:
    """Pages of rows, as wide as a power of two, so that few programs are compiled.

    Or with `wide` as wide as can be: for kernels, which read what is filled alone.
    """
    width = self.max_pages_per_row
    if not wide:  # all of it is read
      width = min(width, 1 << (most - 1).bit_length())
    table = np.full((len(of_rows), width), self.num_pages, np.int32)
    for row, pages in enumerate(of_rows):
      table[row, : len(pages)] = pages
    return table

  def _of(self, requests: Sequence[Request]) -> tuple[Settings, Draw]:
    """The settings of rows, on the device; those of the last call are kept."""
    asked = tuple(request.sampling for request in requests)
    if self._settings is None or self._settings[0] != asked:
      settings = jax.tree.map(jnp.asarray, Settings.of(asked))
      self._settings = asked, settings, Draw.of(asked)
    return self._settings[1:]

  @_serving
  def score(self, parts: "Sequence[Part]", shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Start a step of parts of known texts (`score.Runner`)."""
    if self._state.token_R.is_deleted():  # as in `run`
      self._state = self._empty()
    ids, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    index = np.full(shape, -1, np.int32)
    of_rows = np.zeros((shape[0], 2), np.int32)
    of_rows[:, 0] = self.max_rows
    of_parts = [part.pages for part in parts] + [()] * (shape[0] - len(parts))
    table = self._table(of_parts, max(map(len, of_parts)), wide=False)
    for row, part in enumerate(parts):
      length = len(part.ids)
      ids[row, :length], targets[row, :length] = part.ids, part.targets
      index[row, :length] = part.start + np.arange(length)
      of_rows[row] = part.row, part.first
    whole = all(part.start == 0 for part in parts) and not self.skips
    self._state, scores = self._programs.score(
      self._weights, self._state, ids, index, targets, table, of_rows, whole=whole
    )
    for array in scores:
      array.copy_to_host_async()
    return scores

  def scores(self, handle: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Wait for such a step."""
    logprob_BT, likeliest_BT = handle
    return np.asarray(logprob_BT), np.asarray(likeliest_BT)


def _pages_that_fit(each: int, beside: int = 0) -> int:
  """How many pages of so many bytes the device has room for, beside other bytes."""
  stats = jax.devices()[0].memory_stats() or {}
  if "bytes_limit" not in stats or not each:
    return 2**31
  free = stats["bytes_limit"] - stats["bytes_in_use"]
  return max(1, int(SHARE_OF_MEMORY * free - beside) // each)


def _stacked(leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
  """Small arrays of one kind as one array, as each argument of a program takes the host its time.

  Returns:
    The arrays, and which of the leaves are in each.
  """
  groups: dict[Any, list[int]] = {}
  for number, leaf in enumerate(leaves):
    kind = jax.typeof(leaf) if leaf.size <= STACKED else number
    groups.setdefault(kind, []).append(number)
  stack = lambda of: _stack([leaves[n] for n in of]) if len(of) > 1 else leaves[of[0]]
  return [stack(of) for of in groups.values()], tuple(map(tuple, groups.values()))


_stack = ahead.Jitted(jnp.stack)


@functools.partial(ahead.Jitted, static_argnums=(0, 1, 2), static_argnames=("rows", "page"))
def _empty(
  arrays: tuple[SlotArray, ...],
  pages: tuple[int, ...],
  skips: tuple[bool, ...],
  *,
  rows: int,
  page: int,
) -> State:
  """A state of no text; `pages` and whether tokens skip it of each layer."""
  zeros = lambda number: tuple(
    jnp.zeros((number, page, *of.shape), of.dtype, out_sharding=spec(*of.axes)) for of in arrays
  )
  return State(
    layers=tuple(map(zeros, pages)),
    taken=tuple(jnp.zeros(rows, jnp.int32) if skip else None for skip in skips),
    token_R=jnp.zeros(rows, jnp.int32),
    counts_RV=None,
  )


@ahead.Jitted
def _copy(drawn: Drawn) -> Drawn:
  return jax.tree.map(jnp.copy, drawn)


@functools.partial(ahead.Jitted, donate_argnums=0, keep_unused=True)
def _put(into: jax.Array, x: np.ndarray) -> jax.Array:
  del into
  return jnp.copy(x)
