"""The section `optimizer`."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any, ClassVar

from ats_jax.config.schema import rules
from ats_jax.config.schema.schedule import SCHEDULES, Schedule
from ats_jax.config.schema.setting import (
  Condition,
  Kinds,
  Table,
  elements,
  of_flags,
  section,
  setting,
  when,
)
from ats_jax.extensions import optimizers

OPTIMIZERS = Kinds("optimizer", "what makes directions of gradients", registry=optimizers)
_ONE_SCHEDULE = Condition(
  "data.phases",
  "phases without a learning rate of their own",
  lambda phases: not any(phase["learning_rate"] for phase in phases),
)


# Of `model.param.Role`, which stands above this package.
ROLES = (
  "matrix", "expert", "router", "embedding", "head", "norm", "bias", "sink", "scalar", "adapter",
  "adapter_out",
)  # fmt: skip


def check_roles(name: str, roles: Iterable[str]) -> None:
  """Refuse roles of parameters that there are not, in the setting `name`."""
  for role in roles:
    if role not in ROLES:
      near = difflib.get_close_matches(role, ROLES, n=1)
      hint = f" Did you mean {near[0]!r}?" if near else ""
      raise ValueError(
        f"{name}: there is no role {role!r}. Roles of parameters are {', '.join(ROLES)}.{hint}"
      )


def check_averages(optimizer: "OptimizerConfig", *names: str) -> None:
  """Refuse a decay of 1 of an average of gradients: a rule for `check` of any optimizer."""
  for name in names:
    if 1.0 in elements(getattr(optimizer, name)):
      raise ValueError(
        f"optimizer.{name}: a decay of 1 never takes a gradient in. Use less than 1."
      )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """What every optimizer has: a schedule of its rate, weight decay, a limit of gradients."""

  # Whether all that is kept of a parameter are averages of gradients or of their squares.
  edits_experts: ClassVar[bool] = True

  name: str = OPTIMIZERS.tag("adamw")
  learning_rate: float = setting(3e-4, "peak learning rate", low=0.0, needs=of_flags(_ONE_SCHEDULE))
  schedule: Schedule = section(SCHEDULES, "cosine")
  warmup_steps: int = setting(
    0,
    "linear warm-up; the first step uses lr/warmup_steps",
    low=0,
    needs=of_flags(_ONE_SCHEDULE),
  )
  warmup_fraction: float = setting(
    0.0,
    "warm-up as a share of num_steps; warmup_steps, if set, goes before it",
    low=0.0,
    high=1.0,
    needs=[of_flags(when("optimizer.warmup_steps", 0)), of_flags(_ONE_SCHEDULE)],
  )
  phase_moments: str = setting(
    "keep",
    "the optimizer's moments and count of updates where one of data.phases begins: 'keep' "
    "them, or 'reset' them to those of a new run",
    choices=("keep", "reset"),
    resume="free",
    needs=when("data.phases"),
  )
  weight_decay: float = setting(
    0.1, "decoupled decay of matrices; norms, biases and scalars are never decayed", low=0.0
  )
  decay_embeddings: bool = setting(
    False, "decay the embedding table too", needs=of_flags(when("optimizer.weight_decay"))
  )
  rate_by_role: Table[float] = setting(
    Table(),
    "what the learning rate of parameters of a role is multiplied with, e.g. embedding=0.3,norm=2; "
    f"roles are {', '.join(ROLES)}",
    low=0.0,
  )
  decay_by_role: Table[float] = setting(
    Table(), "decay of parameters of a role, in place of weight_decay", low=0.0
  )
  grad_clip: float = setting(1.0, "global-norm clip; 0 = off", low=0.0)
  ema_decay: float = setting(
    0.0,
    "decay of an average of the weights, used by evaluation and generation; 0 = none",
    low=0.0,
    high=1.0,
  )

  @property
  def has_average(self) -> bool:
    """Whether evaluation, generation and exports use other weights than those that are trained."""
    return self.ema_decay > 0

  def check(self, cfg: Any) -> None:
    """Refuse roles that there are not, and surgery on experts that would spoil the state."""
    if cfg.moe.spare_experts and not self.edits_experts:
      raise ValueError(
        f"moe.spare_experts={cfg.moe.spare_experts} with optimizer.name={self.name}: its state "
        "does not follow experts that are split or merged. Set moe.spare_experts=0, or use adamw."
      )
    for field in dataclasses.fields(self):
      if field.name.endswith("_by_role"):
        check_roles(f"optimizer.{field.name}", getattr(self, field.name))

  def check_length(self, cfg: Any) -> None:
    """Refuse a warm-up that does not end, and an average of weights that stays at the first."""
    if self.ema_decay == 1.0:
      raise ValueError("optimizer.ema_decay=1 keeps the first weights for ever. Use less than 1.")
    advice = (
      ". Shorten the warm-up, train longer, or use optimizer.warmup_fraction, a share of the run, "
      "with warmup_steps=0."
    )
    rules.at_most(cfg, "optimizer.warmup_steps", "num_steps", advice)

  def formats(self) -> dict[str, str]:
    """The dtype of each array that is kept beside a parameter, by its name in the state."""
    return {}

  def for_larger_batches(self, by: int) -> dict[str, Any] | None:
    """Settings that train on batches `by` times as large as these do; None = no rule is known."""
    del by
    return None


@dataclasses.dataclass(frozen=True)
class WithAdam(OptimizerConfig):
  """An optimizer by which all or some parameters go by Adam."""

  b1: float = setting(0.9, "decay of Adam's first moment", low=0.0, high=1.0)
  b2: float = setting(0.95, "decay of Adam's second moment, above b1^2", low=0.0, high=1.0)
  eps: float = setting(1e-8, "added to the root of the second moment", low=0.0)
  b1_by_role: Table[float] = setting(
    Table(), "b1 of parameters of a role, e.g. embedding=0.8", low=0.0, high=1.0
  )
  b2_by_role: Table[float] = setting(Table(), "b2 of parameters of a role", low=0.0, high=1.0)

  def check(self, cfg: Any) -> None:
    """Refuse what never takes a gradient in, has no bound, or divides 0 by 0."""
    super().check(cfg)
    check_averages(self, "b1", "b2", "b1_by_role", "b2_by_role")
    for role in ("", *self.b1_by_role, *self.b2_by_role):
      b1, b2 = self.b1_by_role.get(role, self.b1), self.b2_by_role.get(role, self.b2)
      if not (b1 * b1 < b2 or b1 == 0.0):  # step.optimizers.adamw.most_ratio has the bound
        of = f" of parameters of role {role}" if role else ""
        raise ValueError(
          f"optimizer.b1={b1} with optimizer.b2={b2}{of}: the second moment fades sooner than the "
          "square of the first one, so updates have no bound where gradients vanish. Use a b2 "
          f"above b1^2 = {b1 * b1:.4g}, or a smaller b1."
        )
    if self.eps == 0.0:
      raise ValueError(
        "optimizer.eps=0 divides 0 by 0 where a gradient is 0, as for tokens not seen yet. "
        "Use a small positive number, e.g. 1e-8."
      )


@dataclasses.dataclass(frozen=True)
class AllByAdam(WithAdam):
  """An optimizer by which all parameters go by Adam."""

  def for_larger_batches(self, by: int) -> dict[str, Any]:
    """The rate times sqrt(by) (Malladi et al. 2022, arXiv:2205.10287); times in tokens stay.

    Those are the half-life of the second moment (Marek et al. 2025, arXiv:2507.07101), unless b2
    would fall below b1, and the time scale of the decay, batch / (rate * decay) (Wang & Aitchison
    2024, arXiv:2405.13698).
    """
    return {
      "learning_rate": math.sqrt(by) * self.learning_rate,
      "b2": max(self.b2**by, min(self.b1, self.b2)),
      "weight_decay": math.sqrt(by) * self.weight_decay,
    }


@OPTIMIZERS.of_part("ats_jax.step.optimizers.adamw:adamw")
@dataclasses.dataclass(frozen=True)
class AdamW(AllByAdam):
  """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

  mu_dtype: str = setting("float32", "format of the first moment", choices=("float32", "bfloat16"))
  nu_dtype: str = setting("float32", "format of the second moment", choices=("float32", "bfloat16"))

  def formats(self) -> dict[str, str]:
    """The dtypes of the two moments."""
    return {"mu": self.mu_dtype, "nu": self.nu_dtype}


@OPTIMIZERS.of_part("ats_jax.step.optimizers.adamw8bit:adamw8bit")
@dataclasses.dataclass(frozen=True)
class AdamW8bit(AllByAdam):
  """AdamW whose moments of matrices are in 8 bits (Dettmers et al. 2022, arXiv:2110.02861)."""

  name: str = OPTIMIZERS.tag("adamw8bit")
  block_size: int = setting(
    256, "numbers along the last dimension of a matrix that have one scale", low=8
  )
  min_size: int = setting(
    4096, "matrices of fewer numbers keep their moments in float32, as all vectors do", low=0
  )

  def formats(self) -> dict[str, str]:
    """Of the codes of matrices and their scales; other moments are float32."""
    return {"mu": "uint8", "nu": "uint8", "mu_scale": "float32", "nu_scale": "float32"}


@dataclasses.dataclass(frozen=True)
class ForMatrices(WithAdam):
  """An optimizer of matrices; b1, b2 and eps are of all other parameters, which go by Adam."""

  matrix_roles: tuple[str, ...] = setting(
    ("matrix", "expert", "adapter"), "roles of parameters that are treated as matrices"
  )

  def check(self, cfg: Any) -> None:
    """Refuse roles that there are not, among matrices too."""
    super().check(cfg)
    check_roles("optimizer.matrix_roles", self.matrix_roles)


@dataclasses.dataclass(frozen=True)
class Orthogonalised(ForMatrices):
  """What Muon and its relatives have: momentum, and how it is orthogonalised."""

  momentum: float = setting(
    0.95, "decay of the average of gradients of matrices", low=0.0, high=1.0
  )
  momentum_by_role: Table[float] = setting(
    Table(), "momentum of matrices of a role", low=0.0, high=1.0
  )
  nesterov: bool = setting(True, "look one step ahead of the average")
  iterations: int = setting(5, "polynomials that orthogonalise a matrix", low=1, high=20)
  iteration_dtype: str = setting(
    "bfloat16",
    "format in which a matrix is orthogonalised",
    choices=("bfloat16", "float16", "float32"),
  )
  norm_eps: float = setting(
    1e-7, "added to the norm of a matrix before it is orthogonalised", low=0.0
  )

  def check(self, cfg: Any) -> None:
    """Refuse an average that never takes a gradient in."""
    super().check(cfg)
    check_averages(self, "momentum", "momentum_by_role")

  def formats(self) -> dict[str, str]:
    """The dtypes of the average of matrices, and of the moments of other parameters."""
    return dict.fromkeys(("momentum", "mu", "nu"), "float32")


@OPTIMIZERS.of_part("ats_jax.step.optimizers.muon:muon")
@dataclasses.dataclass(frozen=True)
class Muon(Orthogonalised):
  """Muon (Jordan 2024), whose updates are as large as AdamW's (Liu et al. 2025)."""

  name: str = OPTIMIZERS.tag("muon")
  update_size: str = setting(
    "rms",
    "the size of an update of a matrix: 'rms' = its root mean square is update_rms; 'spectral' = "
    "its largest singular value is sqrt(outputs / inputs)",
    choices=("rms", "spectral"),
  )
  update_rms: float = setting(
    0.2,
    "root mean square of an update of unit learning rate; that of AdamW is about 0.2",
    low=0.0,
    needs=when("optimizer.update_size", "rms"),
  )


@OPTIMIZERS.of_part("ats_jax.step.optimizers.muon:muonh")
@dataclasses.dataclass(frozen=True)
class MuonH(Orthogonalised):
  """Muon by which matrices keep their norm; the learning rate of theirs is relative to it."""

  name: str = OPTIMIZERS.tag("muonh")


@dataclasses.dataclass(frozen=True)
class InEigenbasis(ForMatrices):
  """What SOAP and its relative have: bases of Shampoo's preconditioners, one for each side."""

  edits_experts: ClassVar[bool] = False

  refresh_every: int = setting(10, "updates from one refresh of the bases to the next", low=1)
  max_side: int = setting(8192, "a side of a matrix that is longer has no basis", low=0)

  def formats(self) -> dict[str, str]:
    """The dtypes of the moments, the preconditioners and their bases."""
    names = ("mu", "nu", "left", "right", "left_basis", "right_basis")
    return dict.fromkeys(names, "float32")


@OPTIMIZERS.of_part("ats_jax.step.optimizers.soap:soap")
@dataclasses.dataclass(frozen=True)
class Soap(InEigenbasis):
  """SOAP (Vyas et al. 2024, arXiv:2409.11321); b1, b2 and eps are of matrices too."""

  name: str = OPTIMIZERS.tag("soap")
  b1: float = setting(0.95, "decay of the first moment", low=0.0, high=1.0)
  b2: float = setting(
    0.95, "decay of the second moment, and of the preconditioners of matrices", low=0.0, high=1.0
  )


@OPTIMIZERS.of_part("ats_jax.step.optimizers.soap:soap_muon")
@dataclasses.dataclass(frozen=True)
class SoapMuon(InEigenbasis, Muon):
  """Muon of a momentum that SOAP has preconditioned; eps is of matrices too."""

  name: str = OPTIMIZERS.tag("soap_muon")
  basis_decay: float = setting(
    0.9, "decay of the preconditioners and of squares in their eigenbases", low=0.0, high=1.0
  )

  def check(self, cfg: Any) -> None:
    """Refuse an average that never takes a gradient in."""
    super().check(cfg)
    check_averages(self, "basis_decay")


@OPTIMIZERS.of_part("ats_jax.step.optimizers.lion:lion")
@dataclasses.dataclass(frozen=True)
class Lion(OptimizerConfig):
  """Lion (Chen et al. 2023, arXiv:2302.06675); rates are 3 to 10 times smaller than AdamW's."""

  name: str = OPTIMIZERS.tag("lion")
  b1: float = setting(
    0.9, "share of the average in the sum whose sign is the direction", low=0.0, high=1.0
  )
  b2: float = setting(0.99, "decay of the average of gradients", low=0.0, high=1.0)
  b1_by_role: Table[float] = setting(Table(), "b1 of parameters of a role", low=0.0, high=1.0)
  b2_by_role: Table[float] = setting(Table(), "b2 of parameters of a role", low=0.0, high=1.0)
  mu_dtype: str = setting("float32", "format of the average", choices=("float32", "bfloat16"))

  def check(self, cfg: Any) -> None:
    """Refuse an average that never takes a gradient in."""
    super().check(cfg)
    check_averages(self, "b2", "b2_by_role")

  def formats(self) -> dict[str, str]:
    """The dtype of the average."""
    return {"mu": self.mu_dtype}


@OPTIMIZERS.of_part("ats_jax.step.optimizers.schedule_free:schedule_free")
@dataclasses.dataclass(frozen=True)
class ScheduleFree(OptimizerConfig):
  """Schedule-Free AdamW (Defazio et al. 2024, arXiv:2405.15682), with a constant rate."""

  edits_experts: ClassVar[bool] = False

  name: str = OPTIMIZERS.tag("schedule_free")
  b1: float = setting(
    0.9,
    "share of the averaged weights in those that gradients are taken at",
    low=0.01,
    high=1.0,
  )
  b2: float = setting(0.95, "decay of the second moment", low=0.0, high=1.0)
  b2_by_role: Table[float] = setting(Table(), "b2 of parameters of a role", low=0.0, high=1.0)
  eps: float = setting(1e-8, "added to the root of the second moment", low=0.0)
  weight_power: float = setting(
    2.0, "weights of a step count in the average as their rate to this power", low=0.0
  )

  @property
  def has_average(self) -> bool:
    """The averaged weights are those to use."""
    return True

  def formats(self) -> dict[str, str]:
    """The dtypes of the second moment, and of the paper's z."""
    return {"nu": "float32", "z": "float32"}

  def check(self, cfg: Any) -> None:
    """Refuse a schedule, a second average, and weights that are too coarse for an average."""
    super().check(cfg)
    check_averages(self, "b1", "b2", "b2_by_role")
    rule = "optimizer.name=schedule_free averages weights in place of a schedule"
    if self.schedule.name != "constant":
      raise ValueError(
        f"{rule}, and optimizer.schedule={self.schedule.name}. Set optimizer.schedule=constant."
      )
    if self.ema_decay:
      raise ValueError(f"{rule}: optimizer.ema_decay={self.ema_decay} would be a second average.")
    if cfg.precision.param_dtype != "float32":
      raise ValueError(
        f"{rule}, which precision.param_dtype={cfg.precision.param_dtype} would round away. "
        "Set precision.param_dtype=float32."
      )


@OPTIMIZERS.of_part("ats_jax.step.optimizers.adafactor:adafactor")
@dataclasses.dataclass(frozen=True)
class Adafactor(OptimizerConfig):
  """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): sums of rows and columns of squares."""

  name: str = OPTIMIZERS.tag("adafactor")
  decay_power: float = setting(
    0.8, "the second moment's decay at step t is 1 - t^-decay_power", low=0.0, high=1.0
  )
  eps: float = setting(1e-30, "added to squares of gradients", low=0.0)
  clip_rms: float = setting(
    1.0, "an update of a tensor is scaled to this root mean square if above; 0 = off", low=0.0
  )
  scale_by_size: bool = setting(
    False, "multiply updates of a tensor with its root mean square, but at least 1e-3"
  )
  momentum: float = setting(0.0, "decay of an average of updates; 0 = none", low=0.0, high=1.0)
  least_factored: int = setting(
    128, "tensors whose second longest side is shorter keep all squares", low=1
  )

  def check(self, cfg: Any) -> None:
    """Refuse an average that never takes an update in."""
    super().check(cfg)
    check_averages(self, "momentum")

  def formats(self) -> dict[str, str]:
    """The dtype of the sums of squares."""
    return {"v": "float32"}


@OPTIMIZERS.of_part("ats_jax.step.optimizers.from_optax:from_optax")
@dataclasses.dataclass(frozen=True)
class FromOptax(OptimizerConfig):
  """An optimizer or transformation of optax, or one of yours in a module."""

  name: str = OPTIMIZERS.tag("optax")
  factory: str = setting(
    "optax.adam", "what makes it, e.g. optax.contrib.ademamix or my_module.my_chain"
  )
  arguments: Table[float] = setting(Table(), "its arguments, e.g. b1=0.8,b2=0.99")
