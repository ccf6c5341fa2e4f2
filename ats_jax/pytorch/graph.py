"""The forward pass as a graph: `torch.export`, and ONNX of that."""

import os

import torch
from torch import Tensor, nn

from ats_jax.pytorch.decoder import Decoder

EXAMPLE = (2, 16)  # rows and tokens that are traced; the graph takes any


class Scores(nn.Module):
  """Tokens [batch, seq], one document a row, to logits [batch, seq, vocab] in float32."""

  def __init__(self, model: Decoder):
    super().__init__()
    self.model = model

  def forward(self, tokens: Tensor) -> Tensor:
    """Score what follows each token."""
    x_BTD, _, _ = self.model(tokens)
    return self.model.logits(x_BTD)


def traced(model: Decoder) -> torch.export.ExportedProgram:
  """The graph of a model, for rows of any number and length.

  Every expert computes every token in it.

  Raises:
    ValueError: for a model with layers that skip tokens: how many go through follows from a row's
      length by a rule that a graph does not hold.
  """
  if model.cfg.mod.routing != "none":
    raise ValueError(
      f"mod.routing={model.cfg.mod.routing}: a graph of PyTorch or ONNX has no layers that skip "
      "tokens. --format=stablehlo has, and --family=ats_jax for transformers."
    )
  scores = Scores(model.eval()).requires_grad_(False)
  tokens = torch.zeros(EXAMPLE, dtype=torch.long)
  sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", min=2)}
  return torch.export.export(scores, (tokens,), dynamic_shapes=(sizes,))


def write_program(model: Decoder, path: os.PathLike[str]) -> None:
  """Write a `.pt2`: `torch.export.load(path).module()(tokens)`.

  Raises:
    ValueError: as `traced`.
  """
  torch.export.save(traced(model), path)


def write_onnx(model: Decoder, path: os.PathLike[str], opset: int) -> None:
  """Write an `.onnx`: int64 `tokens` to float32 `logits`.

  Raises:
    ValueError: as `traced`.
  """
  tokens = torch.zeros(EXAMPLE, dtype=torch.long)
  program = torch.onnx.export(
    traced(model),
    (tokens,),
    dynamo=True,
    opset_version=opset,
    output_names=["logits"],
    verbose=False,
  )
  assert program is not None
  program.save(path)
