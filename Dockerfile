# Two images of the server: `gpu` for NVIDIA GPUs and `cpu` to try it out. docs/deploy.md says how to build and run them,
# and what of this has run where. Needs BuildKit, the default builder since Docker 23.

# What is installed, once for both images. No other file of the checkout reaches an image (.dockerignore).
FROM scratch AS source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE /
COPY docker/install.py docker/healthcheck.py /docker/
COPY kvseek /kvseek
COPY core /core
COPY engine /engine
COPY kernels /kernels
COPY plugins /plugins
COPY builder /builder
COPY server /server
COPY client /client
COPY cli /cli
COPY bench /bench
COPY model_repository /model_repository


# 26.07 is the newest image with TensorRT-LLM in NVIDIA's compatibility matrix as we read it: Triton 2.71, Python 3.12.3,
# CUDA 13.1, driver 590.44.01, PyTorch 2.10.0a0 (NVIDIA's build of December 2025). Python and CUDA are within the ranges of
# pyproject.toml, torch is the oldest that it allows; the images before 26.03 have 2.9.
# This target has never been built or run: docs/deploy.md, "What has run where".
FROM nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 AS gpu
ENV PATH=/opt/kvseek/bin:$PATH
# Dependencies first: they change less often than sources. Mounts leave no file behind in the image.
RUN --mount=type=bind,source=pyproject.toml,target=/source/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    --mount=type=bind,source=docker/install.py,target=/source/docker/install.py \
    python3 /source/docker/install.py gpu dependencies /opt/kvseek
RUN --mount=type=bind,from=source,target=/source,rw \
    python3 /source/docker/install.py gpu project /opt/kvseek
# A number, so that Kubernetes can tell that it is not root.
RUN useradd --uid 10001 --no-log-init --create-home --shell /usr/sbin/nologin kvseek
USER 10001:10001
WORKDIR /home/kvseek
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=25m --retries=3 \
    CMD ["python3", "/opt/kvseek/healthcheck.py"]
# kvseek fills in the model repository, starts the image's tritonserver, and starts again what dies.
ENTRYPOINT ["kvseek"]
CMD ["serve", "--engine_dir", "/engine", "--host", "0.0.0.0", "--log", "-", "--ready_seconds", "1080"]


FROM python:3.11.14-slim-bookworm AS cpu
# PyPI's torch brings CUDA's libraries along; a package index with CPU wheels, given here, avoids that.
ARG PIP_EXTRA_INDEX_URL=""
ENV PATH=/opt/kvseek/bin:$PATH
RUN --mount=type=bind,source=pyproject.toml,target=/source/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    --mount=type=bind,source=docker/install.py,target=/source/docker/install.py \
    python3 /source/docker/install.py cpu dependencies /opt/kvseek
RUN --mount=type=bind,from=source,target=/source,rw \
    python3 /source/docker/install.py cpu project /opt/kvseek
RUN useradd --uid 10001 --no-log-init --create-home --shell /usr/sbin/nologin kvseek
USER 10001:10001
WORKDIR /home/kvseek
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=3m --retries=3 \
    CMD ["python3", "/opt/kvseek/healthcheck.py"]
ENTRYPOINT ["kvseek"]
CMD ["serve", "--engine_dir", "/engine", "--host", "0.0.0.0", "--log", "-"]
