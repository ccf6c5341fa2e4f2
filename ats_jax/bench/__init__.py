"""Speed: of a training step (`python -m ats_jax.bench`) and of the ops (`... bench ops`)."""
