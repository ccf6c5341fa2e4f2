"""What to run: typed settings, config files, overrides."""

from ats_jax.config.build import from_config_dict as from_config_dict
from ats_jax.config.schema import Config as Config
from ats_jax.config.tree import base_config as base_config
