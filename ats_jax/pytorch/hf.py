"""The decoder as a model of `transformers`: what `trust_remote_code` loads from an export."""

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ats_jax.pytorch.decoder import Cache, Decoder
from ats_jax.pytorch.settings import settings_of


class AtsJaxConfig(PretrainedConfig):
  """The settings of the model, in sections, beside what every config.json has."""

  model_type = "ats_jax"

  def __init__(self, settings: dict[str, Any] | None = None, **kwargs: Any):
    self.settings = settings or {}
    super().__init__(**kwargs)


class AtsJaxForCausalLM(PreTrainedModel, GenerationMixin):
  """Next-token scores; `generate` samples, greedily or not, without beams."""

  config_class = AtsJaxConfig
  base_model_prefix = "model"
  # Routers decide in float32, whatever the matrices are in.
  _keep_in_fp32_modules_strict = ("router", "depth")

  def __init__(self, config: AtsJaxConfig):
    super().__init__(config)
    self.model = Decoder(settings_of(config.settings))
    self.post_init()

  def _init_weights(self, module: nn.Module) -> None:
    """Draw what a file does not hold."""
    if isinstance(module, nn.Linear | nn.Embedding):
      module.weight.data.normal_(0.0, self.model.cfg.model.init_std)

  def get_input_embeddings(self) -> nn.Module:
    """The table."""
    return self.model.embed

  def get_output_embeddings(self) -> nn.Module | None:
    """The head; None where the table is it."""
    return self.model.head

  def forward(
    self,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Cache | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **others: Any,
  ) -> CausalLMOutputWithPast:
    """Score the tokens that follow `input_ids [batch, seq]`.

    Args:
      input_ids: padding comes first, not last, where a cache is used.
      attention_mask: 0 for padding, else 1; of the tokens of the cache too.
      position_ids: by default each token's place behind the padding.
      past_key_values: the cache that an earlier call returned.
      labels: like `input_ids`; -100 is not counted. They are shifted here.
      use_cache: give `past_key_values`.
      logits_to_keep: only the last so many positions, 0 = all; or their indices.
      others: further arguments of `transformers`; nothing reads them.
    """
    del others
    cache = past_key_values
    if cache is None and use_cache:
      cache = self.model.empty_cache()
    segment_ids = None
    if attention_mask is not None and not bool(attention_mask.all()):
      segment_ids = attention_mask[:, -input_ids.shape[1] :].long()
      if cache is None and position_ids is None:
        position_ids = (segment_ids.cumsum(dim=1) - 1).clamp(min=0)
    x_BTD, _, _ = self.model(
      input_ids, positions_BT=position_ids, segment_ids_BT=segment_ids, cache=cache
    )
    kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
    logits = self.model.logits(x_BTD[:, kept])
    loss = None
    if labels is not None:
      loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

  def prepare_inputs_for_generation(
    self,
    input_ids: Tensor,
    past_key_values: Cache | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    **others: Any,
  ) -> dict[str, Any]:
    """The tokens that the cache has not seen."""
    del others
    if past_key_values is not None:
      input_ids = input_ids[:, past_key_values.length :]
    return {
      "input_ids": input_ids,
      "past_key_values": past_key_values,
      "attention_mask": attention_mask,
      "use_cache": use_cache,
      "logits_to_keep": 1,
    }

  @classmethod
  def _supports_default_dynamic_cache(cls) -> bool:
    return False  # a layer that skips tokens keeps another number of keys than the others
