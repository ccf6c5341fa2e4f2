"""Low-rank adapters by peft (Hu et al. 2021, arXiv:2106.09685): the model itself stays as it is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from ats_jax.bridge.families import own
from ats_jax.checkpoint import CheckpointManager
from ats_jax.config import Config
from ats_jax.config.schema.optimizer import AdamW
from ats_jax.data.tokens.export import files_of
from ats_jax.data.tokens.tokenizer import Tokenizer
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.pytorch.training.state import MOMENTS

ADAPTER, MERGED = "adapter", "merged"  # folders in a workdir


@dataclasses.dataclass(frozen=True)
class Lora:
  """What adapters there are.

  Attributes:
    rank: rank of the adapters.
    alpha: the adapters are multiplied with alpha / rank.
    targets: linear layers that have one, e.g. "q".
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]


class Outer(nn.Module):
  """Holds the decoder where `transformers` has it, so that an adapter's names fit both."""

  def __init__(self, model: Decoder):
    super().__init__()
    self.model = model


class Adapters:
  """The adapters of a model, and the optimizer that moves them."""

  def __init__(self, cfg: Config, model: Decoder, lora: Lora):
    """Put adapters into a model; all else in it is frozen.

    Raises:
      ValueError: if peft is not installed, or no layer is called so.
    """
    try:
      import peft
    except ModuleNotFoundError as e:
      raise ValueError(f"--lora_rank needs {e.name}: pip install 'ats_jax[lora]'.") from e
    known = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if unknown := sorted(set(lora.targets) - known):
      raise ValueError(f"--lora_targets: no {unknown}. The linear layers are {sorted(known)}.")
    torch.manual_seed(cfg.seed)
    lora_config = peft.LoraConfig(
      r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0
    )
    self.model, self.peft = model, peft.get_peft_model(Outer(model), lora_config)
    self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    o = cfg.optimizer
    assert isinstance(o, AdamW)  # `check`
    self.optimizer = torch.optim.AdamW(
      self.trained.values(), betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay
    )
    for parameter in self.trained.values():
      moments = self.optimizer.state[parameter]
      moments["step"] = torch.tensor(0.0)
      for field in MOMENTS.values():
        moments[field] = torch.zeros_like(parameter, requires_grad=False)

  def state(self) -> dict[str, Any]:
    """What a checkpoint keeps, copied."""
    array = lambda x: jnp.asarray(x.detach().cpu().numpy().copy())
    moments = self.optimizer.state
    return {
      name: {
        "value": array(parameter),
        **{ours: array(moments[parameter][theirs]) for ours, theirs in MOMENTS.items()},
        "updates": array(moments[parameter]["step"]),
      }
      for name, parameter in self.trained.items()
    }

  def restore(self, checkpoints: CheckpointManager, step: int) -> None:
    """Go on from a checkpoint."""
    saved = checkpoints.read(step, self.state())
    for name, parameter in self.trained.items():
      put = lambda tensor, ours, arrays=saved[name]: tensor.copy_(_tensor(arrays[ours]))
      moments = self.optimizer.state[parameter]
      with torch.no_grad():
        put(parameter, "value")
      for ours, theirs in MOMENTS.items():
        put(moments[theirs], ours)
      put(moments["step"], "updates")

  def write(self, cfg: Config, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the adapters as peft does, and the merged model in our own format; it ends training."""
    self.peft.save_pretrained(str(folder / ADAPTER))
    merged = self.peft.merge_and_unload().model
    target = folder / MERGED
    target.mkdir(exist_ok=True)
    weights.save(merged, target / "model.safetensors")
    for name, text in own.FAMILY.files().items():
      (target / name).write_text(text, encoding="utf-8")
    for name, content in files_of(tokenizer).items():
      (target / name).write_bytes(content)
    (target / "config.json").write_text(json.dumps(own.FAMILY.write(cfg), indent=2))


def _tensor(array: Any) -> Tensor:
  return torch.from_numpy(np.array(array, copy=True))
