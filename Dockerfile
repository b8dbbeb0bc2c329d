# An OpenAI-compatible server that keeps downloaded models in the volume /cache. Options of `draftwing serve` come last:
#
#   docker build --tag draftwing .
#   docker run --rm --publish 8000:8000 --volume draftwing:/cache draftwing --quantize int8
#
#   docker build --target cuda --tag draftwing:cuda .
#   docker run --rm --gpus all --publish 8000:8000 --volume draftwing:/cache draftwing:cuda --dtype bfloat16

FROM python:3.13-slim AS wheel
WORKDIR /source
COPY . .
RUN DRAFTWING_WHEEL="manylinux_2_28_$(uname -m)" pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.13-slim AS base
COPY --from=wheel /dist /dist
RUN useradd --create-home --uid 10001 draftwing && install --directory --owner draftwing --mode 700 /cache
ENV DRAFTWING_CACHE=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
# The first start downloads the model. A server that drains after SIGTERM is unhealthy, too.
HEALTHCHECK --start-period=30m --start-interval=2s --interval=15s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["draftwing", "serve", "--host", "0.0.0.0"]

# PyTorch with CUDA is the package index's build; Triton compiles the kernels' launchers with gcc.
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "$(echo /dist/*.whl)[serve]"
USER 10001

FROM base AS cpu
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(echo /dist/*.whl)[serve]"
USER 10001
