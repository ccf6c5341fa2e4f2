"""Triton's kernels as operators of PyTorch, in Triton's interpreter, against PyTorch's own.

Triton decides when it is imported whether kernels are interpreted. So a process of its own runs
these comparisons on the CPU. All else is what runs on a GPU: the decoder that selects the kernels,
the operators with their gradients, and the launches.
"""

import multiprocessing
import os
from concurrent import futures
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bridge import torch_cases  # noqa: E402
from helpers import tiny_config  # noqa: E402

from ats_jax.pytorch import attention, decoder, kernels, moe  # noqa: E402
from ats_jax.pytorch.settings import RoutingRules, layer_kinds  # noqa: E402
from kernels_triton import plan  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]

SEQ = 77  # of no block a multiple
TILES = {  # small, so that rows have several blocks
  ("block_m", "block_n"): plan.Tile({"block_m": 32, "block_n": 16}, 4, 1),
  ("block_m", "block_n", "block_k"): plan.Tile(dict(block_m=16, block_n=16, block_k=16), 4, 1),
}


@pytest.fixture(scope="module")
def interpreter():
  with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
      pool.submit(as_on_a_gpu).result()
    yield lambda function, *args: pool.submit(function, *args).result()


def as_on_a_gpu():
  """Let this process take its CPU for a GPU with Triton, float32 among the formats, in all ops."""
  torch.set_num_threads(1)
  kernels.has_triton = decoder.has_triton = lambda device: True
  kernels._obstacle, kernels.DEFAULTS = lambda device, dtype, widths: "", kernels.TRITON_OPS
  for name in ("FORWARD", "FORWARD_PARTS", "KEY_GRADIENT", "QUERY_GRADIENT", "GROUPED"):
    tile = TILES[tuple(getattr(plan, name)[0].blocks)]
    setattr(plan, name, (tile,))
  plan.QUERY_GRADIENT_PARTS, plan.GROUPED_WEIGHTS = plan.QUERY_GRADIENT, plan.GROUPED


def ids_of(cuts):
  ids = torch.ones((2, SEQ), dtype=torch.long)
  for cut in cuts:
    ids[1, cut:] += 1  # the first row stays whole
  return ids


def both_attentions(heads, widths, cuts, window, soft_cap, has_sinks, dtype):
  """Values and gradients: by Triton in `dtype`, by the decoder's own attention in float32."""
  kernels.kernel_for("attention", "triton", torch.zeros(1))  # registers the operators
  rng = torch.Generator().manual_seed(0)
  shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
  drawn = [torch.randn((2, SEQ, *s), generator=rng).to(dtype) for s in shapes]
  dy = torch.randn((2, SEQ, heads[0], widths[1]), generator=rng).to(dtype)
  ids, order = ids_of(cuts), torch.arange(SEQ).expand(2, SEQ)
  unread = (ids, ids)
  runs = attention.runs_of(ids)
  tokens = attention.Tokens(ids, ids, order, unread, unread, alone=not cuts, runs=runs)

  def in_triton(q, k, v, sinks):
    how = {"window": window, "soft_cap": soft_cap, "sinks_N": sinks}
    return attention.attend_in_triton(q, k, v, tokens, **how)

  def plain(q, k, v, sinks):
    visible, scale = attention.visibility(tokens, None, window), widths[0] ** -0.5
    return attention.attend(q, k, v, visible, scale=scale, soft_cap=soft_cap, sinks_N=sinks)

  found = []
  for function, kind in ((in_triton, dtype), (plain, torch.float32)):
    leaves = [a.to(kind).requires_grad_() for a in drawn]
    sinks = torch.linspace(-1, 2, heads[0], requires_grad=True) if has_sinks else None
    y = function(*leaves, sinks)
    arrays = [*leaves, sinks] if has_sinks else leaves
    found.append([y.detach(), *torch.autograd.grad(y, arrays, dy.to(kind))])
  return found


@pytest.mark.parametrize(
  ("heads", "widths", "cuts", "window", "soft_cap", "has_sinks"),
  [
    ((4, 2), (64, 64), [1, 5, 33, 34, 70], None, 0.0, False),
    ((4, 1), (16, 16), [], None, 0.0, False),
    ((2, 2), (96, 96), [40], None, 0.7, False),
    ((2, 1), (80, 80), [1, 5, 33], 7, 0.0, True),
    ((2, 2), (192, 128), [40], None, 0.0, False),
    ((2, 1), (32, 32), [], 20, 2.0, True),
  ],
  ids=str,
)
def test_attention(interpreter, heads, widths, cuts, window, soft_cap, has_sinks):
  args = (heads, widths, cuts, window, soft_cap, has_sinks)
  found, want = interpreter(both_attentions, *args, torch.float32)
  for a, b in zip(found, want, strict=True):
    torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)


def test_attention_in_float16(interpreter):
  args = ((4, 2), (64, 64), [33], None, 0.0, False)
  for a, b in zip(*interpreter(both_attentions, *args, torch.float16), strict=True):
    assert a.dtype == torch.float16
    assert (a.float() - b).norm() < 2e-3 * b.norm()


def both_products(sizes):
  rng = torch.Generator().manual_seed(0)
  rows = sum(sizes)
  drawn = [torch.randn(s, generator=rng) for s in ((rows, 40), (len(sizes), 40, 24))]
  dy = torch.randn((rows, 24), generator=rng)
  found = []
  for asked in ("triton", "xla"):
    x, w = (a.clone().requires_grad_() for a in drawn)
    y = moe.grouped_matmul(x, w, torch.tensor(sizes), asked)
    found.append([y.detach(), *torch.autograd.grad(y, (x, w), dy)])
  return found


@pytest.mark.parametrize("sizes", [[17, 0, 32, 1, 30], [90], [16] * 5], ids=str)
def test_grouped_matmul(interpreter, sizes):
  for a, b in zip(*interpreter(both_products, sizes), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def registration_is_right():
  """PyTorch's own check of an operator: schema, shapes without data, gradients under tracing."""
  kernels.kernel_for("attention", "triton", torch.zeros(1))
  rng = torch.Generator().manual_seed(0)
  draw = lambda *shape: torch.randn(shape, generator=rng).requires_grad_()
  q, k, v = draw(2, 40, 4, 32), draw(2, 40, 2, 32), draw(2, 40, 2, 16)
  runs = attention.runs_of(torch.ones((2, 40), dtype=torch.long))
  sinks = torch.zeros(4, requires_grad=True)
  ops = torch.ops.ats_jax
  ways = (
    "test_schema",
    "test_faketensor",
    "test_autograd_registration",
    "test_aot_dispatch_static",
  )
  check = lambda op, args: torch.library.opcheck(op, args, test_utils=ways)
  starts = torch.tensor([0, 3, 9, 9], dtype=torch.int32)
  return check(ops.attention.default, (q, k, v, *runs, sinks, 3.0, True)) | {
    f"grouped {name}": said
    for name, said in check(
      ops.grouped_matmul.default, (draw(9, 24), draw(2, 24, 16), starts, False)
    ).items()
  }


def test_they_are_registered_as_pytorch_asks(interpreter):
  said = interpreter(registration_is_right)
  assert len(said) == 8 and set(said.values()) == {"SUCCESS"}


def small(name):
  """A config with heads that the kernels take, weights that are no zeros, and a batch."""
  case = torch_cases.CASES[name]
  widths = {n: 16 for n in ("model.head_dim", "model.v_head_dim") if n in torch_cases.SIZES | case}
  cfg = tiny_config(torch_cases.SIZES | case | widths)
  rng = torch.Generator().manual_seed(0)
  state = {
    n: a + 0.2 * torch.randn(a.shape, generator=rng) if a.is_floating_point() else a
    for n, a in decoder.Decoder(cfg).state_dict().items()
  }
  return cfg, state, torch_cases.batch(cfg)[1]


def logits_and_gradients(cfg, state, batch, backend=None):
  model = decoder.Decoder(cfg)
  model.load_state_dict(state)
  if backend is not None:
    model.compile(backend=backend, fullgraph=True)
  x_BTD, _, _ = model(
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids_BT=batch["segment_ids"],
    rules=RoutingRules(training=True, capacity=0.5),
  )
  logits = model.logits(x_BTD)
  logits.square().mean().backward()
  grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
  return logits.detach(), grads


def launched_kernels(*args):
  """What ran, and `logits_and_gradients`."""
  from kernels_triton import torch_ops  # Triton is imported in this process alone

  names, run = [], torch_ops._run

  def noted(launch, inputs, outputs):
    names.append(launch.kernel)
    run(launch, inputs, outputs)

  with mock.patch.object(torch_ops, "_run", noted):
    return names, logits_and_gradients(*args)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
  "name", ["dense-all-options", "windows", "moe-null", "mod-static", "hybrid"]
)
def test_a_model_computes_the_same(interpreter, name):
  cfg, state, batch = small(name)
  want, wanted = logits_and_gradients(cfg, state, batch)
  launched, (got, grads) = interpreter(launched_kernels, cfg, state, batch)
  layers = cfg.model.num_layers
  assert launched.count("attention_forward") == launched.count("attention_key_gradient") == layers
  of_experts = [kind for kind in layer_kinds(cfg) if kind.moe]
  assert launched.count("weight_gradient") == 3 * len(of_experts)
  torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
  assert grads.keys() == wanted.keys() and grads
  for parameter, grad in grads.items():
    error = (grad - wanted[parameter]).norm() / (wanted[parameter].norm() + 1e-9)
    assert error < 1e-4, parameter


@pytest.mark.usefixtures("mesh")
def test_a_compiled_model_runs_them_within_one_graph(interpreter):
  cfg, state, batch = small("windows")
  want, wanted = logits_and_gradients(cfg, state, batch)
  launched, (got, grads) = interpreter(launched_kernels, cfg, state, batch, "aot_eager")
  assert launched.count("attention_query_gradient") == cfg.model.num_layers
  torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
  torch.testing.assert_close(grads, wanted, rtol=1e-3, atol=1e-5)


BF16, F32 = torch.bfloat16, torch.float32
A100, T4 = (8, 0), (7, 5)


@pytest.fixture
def choose(monkeypatch):
  """`chosen_kernel` on a GPU of a compute capability."""

  def on(capability, op, asked, dtype, *widths):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return kernels.chosen_kernel.__wrapped__(op, asked, torch.device("cuda"), dtype, widths)

  monkeypatch.setattr(kernels.importlib, "import_module", lambda name: None)
  return on


@pytest.mark.parametrize(
  ("where", "asked", "dtype", "widths", "chosen", "why"),
  [
    (A100, "", BF16, (80, 80), "triton", "JAX's kernel; ops.kernels=attention=xla for PyTorch's"),
    (A100, "triton", BF16, (192, 128), "triton", "ops.kernels=attention=triton"),
    (A100, "xla", BF16, (64, 64), "torch", "ops.kernels=attention=xla: PyTorch's own"),
    (A100, "cudnn", BF16, (64, 64), "triton", "PyTorch has no cudnn, which ops.kernels=attention="),
    (A100, "", F32, (64, 64), "torch", "needs bfloat16 or float16, these are float32"),
    (A100, "", BF16, (64, 12), "torch", "such, these are 12 wide"),
    (A100, "", BF16, (72, 64), "torch", "such, these are 72 wide"),
    (T4, "", torch.float16, (64, 64), "torch", "compute capability 8.0, this GPU has 7.5"),
  ],
  ids=str,
)
def test_the_choice_and_its_reason_are_logged(
  choose, caplog, where, asked, dtype, widths, chosen, why
):
  with caplog.at_level("INFO"):
    assert choose(where, "attention", asked, dtype, *widths) == chosen
  (record,) = caplog.records
  assert record.message.startswith(f"attention: {chosen} (") and why in record.message


def test_the_environment_switches_them_off_unless_a_setting_names_them(choose, monkeypatch):
  monkeypatch.setenv("ATS_TRITON", "off")
  assert choose(A100, "attention", "", BF16, 64, 64) == "torch"
  assert choose(A100, "attention", "triton", BF16, 64, 64) == "triton"


def test_the_grouped_matmul_is_no_default(choose):
  assert choose(A100, "grouped_matmul", "", BF16) == "torch"
  assert choose(A100, "grouped_matmul", "triton", BF16) == "triton"


def test_what_was_asked_for_and_cannot_run_is_one_line(choose):
  with pytest.raises(ValueError, match=r"^ops.kernels=attention=triton: .* has 7\.5\. Use .*=xla"):
    choose(T4, "attention", "triton", BF16, 64, 64)
  with pytest.raises(
    ValueError, match=r"attention=triton: the kernel runs on NVIDIA GPUs, this is"
  ):
    kernels.kernel_for("attention", "triton", torch.zeros(1, dtype=BF16), 64, 64)
  assert kernels.kernel_for("attention", "", torch.zeros(1, dtype=BF16), 64, 64) == ""
