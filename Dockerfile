# Runs ats_jax on NVIDIA GPUs (driver 580 or newer), for `ats-jax launch jobset` and `trainjob`:
#   docker build -t registry.example/ats_jax:1 . && docker push registry.example/ats_jax:1
# Another extra of pyproject.toml for another device: --build-arg EXTRAS=cuda12,s3; cpu: EXTRAS=gs.
FROM python:3.12-slim
ARG EXTRAS=cuda,gs,s3
WORKDIR /app
COPY pyproject.toml README.md ./
COPY ats_jax ats_jax
COPY kernels_pallas kernels_pallas
COPY kernels_cuda kernels_cuda
COPY kernels_metal kernels_metal
COPY kernels_triton kernels_triton
COPY launch launch
COPY configs configs
RUN pip install --no-cache-dir ".[${EXTRAS}]"
# A pod's user has no home; caches of programs and of data go to the volume of the run if it says so.
ENV HOME=/tmp PYTHONUNBUFFERED=1
CMD ["ats-jax", "--help"]
