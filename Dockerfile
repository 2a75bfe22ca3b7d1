# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build -t clickfleet-serve .                    serves the model mounted at /model; no torch, no compiler
#   docker build -t clickfleet-train --target train .     everything: training, the cluster, online learning;
#       with --build-arg TORCH_INDEX=URL of PyTorch's CPU builds it is gigabytes smaller
#   docker run -p 8080:8080 -v "$PWD/artifact:/model:ro" clickfleet-serve

FROM python:3.12-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/build.lock ./
RUN pip install --no-cache-dir --require-hashes -r build.lock
COPY pyproject.toml CMakeLists.txt README.md LICENSE constraints.txt ./
COPY native native
COPY src src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A new volume at /shared belongs to the user of the image, who may then write to it.
RUN useradd --system --uid 10001 --create-home clickfleet \
    && install --directory --owner 10001 /shared
COPY constraints.txt deploy/serve.lock deploy/train.lock /etc/clickfleet/
STOPSIGNAL SIGTERM
ENTRYPOINT ["clickfleet"]

FROM base AS train
ARG TORCH_INDEX=
COPY --from=wheel /wheels /wheels
# Only torch has no hash: TORCH_INDEX selects one of several builds, and each build is a different file.
RUN pip install --require-hashes -r /etc/clickfleet/train.lock \
    && pip install -c /etc/clickfleet/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && pip install --no-deps /wheels/clickfleet-*.whl \
    && rm -rf /wheels
USER 10001
WORKDIR /home/clickfleet
CMD ["--help"]

FROM base AS serve
COPY --from=wheel /wheels /wheels
RUN pip install --require-hashes -r /etc/clickfleet/serve.lock \
    && pip install --no-deps /wheels/clickfleet-*.whl \
    && rm -rf /wheels
USER 10001
WORKDIR /home/clickfleet
EXPOSE 8080 8081
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/ready', timeout=2)"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8080", "--grpc-port", "8081"]
