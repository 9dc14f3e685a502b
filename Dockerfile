# syntax=docker/dockerfile:1
# One file, one target for each process; each holds only what its process imports:
#
#   docker build --target text      text tokenizer                       no torch
#   docker build --target gateway   gateway, ingest                      no torch
#   docker build --target audio     audio tokenizer
#   docker build --target vision    vision tokenizer                     GPU when torch finds one
#   docker build --target trainer   trainer
#   docker build --target inference inference worker
#
# Versions come from constraints.txt. pip takes torch as its index serves it, which outside of CPU-only indexes is
# a CUDA build; pass --build-arg PIP_INDEX_URL=… or PIP_EXTRA_INDEX_URL=… for another. Keys and passwords are
# given when a container runs, never when an image is built.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- the project as a wheel -------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# The running images have no compiler, so the C++ kernels are compiled into the wheel.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && pip install build==1.6.1
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protocol protocol
COPY kernels kernels
COPY corpora corpora
COPY tokenizers tokenizers
COPY backbone backbone
COPY services services
COPY ernie_multi ernie_multi
RUN ERNIE_MULTI_PREBUILD=1 python -m build --wheel --outdir /wheels .

# --- third-party packages of each extra, in layers that a change of our code leaves alone ------------------------
FROM ${PYTHON_IMAGE} AS resolver
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# A shell of the project with the same metadata and no code: enough for pip to know each extra's packages.
RUN mkdir -p protocol kernels corpora tokenizers backbone services
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY ernie_multi/__init__.py ernie_multi/__init__.py

FROM resolver AS packages-text
RUN pip install --prefix=/install -c constraints.txt '.[text]'

FROM resolver AS packages-gateway
RUN pip install --prefix=/install -c constraints.txt '.[serve]'

FROM resolver AS packages-audio
RUN pip install --prefix=/install -c constraints.txt '.[audio]'

FROM resolver AS packages-vision
RUN pip install --prefix=/install -c constraints.txt '.[vision]'

FROM resolver AS packages-model
RUN pip install --prefix=/install -c constraints.txt '.[train,serve]'

# --- what all running containers share ---------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
# wget: health checks, here and those that KubeRay adds to Ray's pods.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 ernie \
    && useradd --uid 10001 --gid ernie --create-home --home-dir /home/ernie ernie \
    && install -d -o ernie -g ernie /runs /data
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    ERNIE_MULTI_DATA=/data
WORKDIR /home/ernie
VOLUME ["/runs"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["ernie-multi"]

FROM base AS text
COPY --from=packages-text /install /usr/local
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=6 CMD ["wget", "-qO-", "http://127.0.0.1:8000/text/health"]
CMD ["service", "text"]

FROM base AS audio
COPY --from=packages-audio /install /usr/local
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=6 CMD ["wget", "-qO-", "http://127.0.0.1:8000/audio/health"]
CMD ["service", "audio"]

FROM base AS vision
COPY --from=packages-vision /install /usr/local
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=6 CMD ["wget", "-qO-", "http://127.0.0.1:8000/vision/health"]
CMD ["service", "vision"]

FROM base AS gateway
COPY --from=packages-gateway /install /usr/local
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=6 CMD ["wget", "-qO-", "http://127.0.0.1:8080/health"]
CMD ["service", "gateway"]

FROM base AS model
COPY --from=packages-model /install /usr/local
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl
USER 10001:10001

FROM model AS trainer
CMD ["service", "trainer"]

FROM model AS inference
CMD ["service", "inference"]
