# syntax=docker/dockerfile:1
# One image for CPU and NVIDIA GPUs: torch's wheels bring their own CUDA libraries.
#
#   docker build -t minisgl .
#   docker run --rm --gpus all --ipc host -p 8000:8000 -v minisgl-cache:/cache minisgl
#   docker run --rm -p 8000:8000 -v minisgl-cache:/cache minisgl --model smollm2-135m   (CPU)

ARG PYTHON_VERSION=3.12
# The image has what the wheel has, and nothing else of the sources.
FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY minisgl minisgl
COPY triton_kernels triton_kernels
COPY compile_cache compile_cache
RUN pip wheel --no-deps --wheel-dir /dist .

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH=torch==2.13.0
ARG TRITON=triton==3.6.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/minisgl
ENV PATH=/opt/minisgl/bin:$PATH
# The large layer first: it changes only with the pins. Triton only where torch brings none (CPU builds).
RUN pip install "${TORCH}" \
 && if ! pip show -q triton; then pip install "${TRITON}"; fi
COPY --from=wheel /dist /dist
RUN pip install /dist/minisgl-*.whl

FROM python:${PYTHON_VERSION}-slim-bookworm
# Triton and inductor compile small C and C++ files at run time.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/minisgl /opt/minisgl
RUN useradd --create-home --uid 1000 minisgl \
 && install -d -o minisgl -g minisgl -m 0700 /cache
USER minisgl
WORKDIR /home/minisgl
ENV PATH=/opt/minisgl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MINISGL_CACHE=/cache \
    MINISGL_HOST=0.0.0.0 \
    MINISGL_PORT=8000
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first start downloads a model and compiles; afterwards /health says whether the engine steps.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-I", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['MINISGL_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["minisgl", "serve"]
