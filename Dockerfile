# The package, Fashion-MNIST and PyTorch. docs/howto/operate.md says how to use the image.
#
#   docker build --tag dpfl .                  GPU image (the last stage); it also runs on a CPU
#   docker build --target cpu --tag dpfl:cpu --build-arg PIP_EXTRA_INDEX_URL=... .    small CPU image
#
# slim-bookworm has the Python of the tested set (constraints.txt), and its Debian packages the data set. No CUDA base
# image is needed: the wheel of PyTorch on PyPI brings its CUDA libraries, and `--gpus all` lends the host's driver.
FROM python:3.11-slim-bookworm AS base

# Found where Debian puts it: /usr/share/datasets. Not pinned, since a stable Debian has one version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends dataset-fashion-mnist \
    && rm -rf /var/lib/apt/lists/*

# Runs, MLflow's store, the account of all runs and downloaded data sets are kept in /results. `runs` is the link and not a folder in it, so
# that it also works where an empty folder of the host is mounted there.
WORKDIR /app
RUN useradd --uid 1000 dpfl \
    && install --directory --owner dpfl --group dpfl /results \
    && ln -s /results runs
VOLUME /results
# a home that every user can write to, since `docker run --user` may name any
ENV HOME=/tmp \
    MLFLOW_TRACKING_URI=sqlite:////results/mlflow.db \
    MLFLOW_DISABLE_TELEMETRY=true \
    DPFL_DATA=/results/data \
    DPFL_ACCOUNT=/results/account/account.jsonl \
    XDG_STATE_HOME=/results/account \
    PYTHONUNBUFFERED=1

# All dependencies, with those of the build, are one layer of each image, which a change of code leaves as it is. Which
# torch pip finds depends on its index: constraints.txt fixes the version, and pip prefers its CPU build where an index
# offers one.
COPY constraints.txt pyproject.toml /src/
RUN python -c "import tomllib; read = tomllib.load(open('/src/pyproject.toml', 'rb')); project = read['project']; \
    extras = project['optional-dependencies']; \
    parts = [one for name in ('tracking', 'search', 'all', 'postgresql') for one in extras[name]]; \
    print(*read['build-system']['requires'], *project['dependencies'], \
    *(one for one in parts if not one.startswith('dpfl_lightning')), sep='\n')" > /src/requirements.txt
ENTRYPOINT ["dpfl"]
CMD ["fit", "--config", "conf/fmnist.yaml"]


# The small image: torch without CUDA, from an index of CPU wheels that pytorch.org names.
FROM base AS cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint /src/constraints.txt --requirement /src/requirements.txt \
    && pip inspect --local > /src/packages.json \
    && dpkg-query --show > /src/debian-packages.txt
# hadolint ignore=DL3059
RUN python -c "import sys, torch; torch.version.cuda and sys.exit( \
    f'torch {torch.__version__} has CUDA: pass --build-arg PIP_EXTRA_INDEX_URL=... with an index of CPU wheels')"
COPY LICENSE README.md /src/
COPY conf /src/conf
COPY conf conf
COPY sweeps sweeps
COPY dpfl_lightning /src/dpfl_lightning
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src
USER 1000
# The image is complete: it reads its data set and its options as this user.
RUN python -c "from dpfl_lightning.data.datasets import load; load('fashion_mnist', download=False)" \
    && dpfl fit --config conf/fmnist.yaml --print_config


# The default image, which must not end with a torch that cannot use the GPU.
FROM base AS gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint /src/constraints.txt --requirement /src/requirements.txt \
    && pip inspect --local > /src/packages.json \
    && dpkg-query --show > /src/debian-packages.txt
# hadolint ignore=DL3059
RUN python -c "import sys, torch; torch.version.cuda or sys.exit( \
    f'torch {torch.__version__} has no CUDA: change the index where pip finds it, or build --target cpu')"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY LICENSE README.md /src/
COPY conf /src/conf
COPY conf conf
COPY sweeps sweeps
COPY dpfl_lightning /src/dpfl_lightning
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src
USER 1000
RUN python -c "from dpfl_lightning.data.datasets import load; load('fashion_mnist', download=False)" \
    && dpfl fit --config conf/fmnist.yaml --print_config
