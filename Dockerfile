# The package, Fashion-MNIST and a PyTorch that finds the GPU; how to use the image is in README.md.
#
# slim-bookworm has the Python of the tested set (constraints.txt), and its Debian packages the data set. No CUDA base
# image is needed: the wheel of PyTorch on PyPI brings its CUDA libraries, and `--gpus all` lends the host's driver.
FROM python:3.11-slim-bookworm

# Found where Debian puts it: /usr/share/datasets. Not pinned, since a stable Debian has one version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends dataset-fashion-mnist \
    && rm -rf /var/lib/apt/lists/*

# All dependencies are one layer, which a change of code leaves as it is. pip chooses torch: on PyPI that for Linux is
# built for CUDA and runs on a CPU too. A small CPU image takes PyTorch's own CPU wheels, whose index pip reads from:
# --build-arg CUDA=0 --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

# A GPU image, the default, must not end with a torch that cannot use the GPU.
ARG CUDA=1
RUN [ "$CUDA" = 0 ] || python -c "import sys, torch; torch.version.cuda or sys.exit( \
    f'torch {torch.__version__} has no CUDA: mend where pip finds it, or pass --build-arg CUDA=0 for a CPU image')"

COPY LICENSE README.md ./
COPY dpfl_lightning dpfl_lightning
COPY conf conf
RUN pip install --no-cache-dir --no-deps .

# Runs, MLflow's store and downloaded data sets are kept in /results. `runs` is the link and not a folder in it, so
# that it also works where an empty folder of the host is mounted there.
WORKDIR /app
RUN useradd --uid 1000 dpfl \
    && install --directory --owner dpfl --group dpfl /results \
    && ln -s /results runs
COPY conf conf
COPY sweeps sweeps
VOLUME /results
USER 1000
# a home that every user can write to, since `docker run --user` may name any
ENV HOME=/tmp \
    MLFLOW_TRACKING_URI=sqlite:////results/mlflow.db \
    DPFL_DATA=/results/data \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The image is complete: it reads its data set and its options as this user.
RUN python -c "from dpfl_lightning.data.datasets import load; load('fashion_mnist', download=False)" \
    && python -m dpfl_lightning.fit --config conf/fmnist.yaml --print_config

ENTRYPOINT ["python", "-m", "dpfl_lightning.fit"]
CMD ["--config", "conf/fmnist.yaml"]
