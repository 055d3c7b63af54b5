#!/usr/bin/env bash
# Builds the CPU image of the Dockerfile without a Docker engine, and runs it: the main job, a job that is stopped and
# resumed, and MLflow's page. As root, with Debian's buildah and debootstrap, from the root of a checkout:
#
#   pip download --dest WHEELS --constraint constraints.txt '.[postgresql]' setuptools
#   deploy/try_image.sh FOLDER WHEELS
#
# FOLDER keeps the images. WHEELS must have the CPU build of torch. The base image is Debian's own Python, since none is
# pulled.
set -euo pipefail
folder=$(realpath "${1:?name a folder for the images}") wheels=$(realpath "${2:?name the folder of the wheels}")
cd "$(dirname "$0")/.."
base=$(sed -n 's/^FROM \(.*\) AS base$/\1/p' Dockerfile)
mkdir -p "$folder"/{storage,run}
driver=$(grep -qw overlay /proc/filesystems && echo overlay || echo vfs)
export STORAGE_DRIVER=$driver BUILDAH_ISOLATION=chroot

images() { buildah --root "$folder/storage" --runroot "$folder/run" "$@"; }
size() { images images --format '{{.Name}}:{{.Tag}} {{.Size}}' --filter "reference=$1"; }
tell() { echo "[$SECONDS s] $*"; }

if ! images inspect --type image "$base" >/dev/null 2>&1; then
    made=$(images from scratch) root=$(images mount "$made")
    debootstrap --variant=minbase --include=python3-venv,ca-certificates "${base##*-}" "$root" >"$folder/debootstrap.log"
    chroot "$root" python3 -m venv /usr/local # Debian's own Python takes no packages from pip
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    images commit --quiet --rm "$made" "$base" >/dev/null
fi
tell "base, $driver: $(size "$base")"

printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$folder/pip.conf"
build() {
    images build --layers --pull-never --target cpu --tag dpfl:cpu --volume "$wheels:/wheels:ro" \
        --volume "$folder/pip.conf:/etc/pip.conf:ro" "$1" >"$folder/build.log" 2>&1 || { tail -20 "$folder/build.log"; exit 1; }
}
rm -rf "$folder/context" && mkdir "$folder/context"
cp -a Dockerfile .dockerignore LICENSE README.md constraints.txt pyproject.toml conf dpfl_lightning sweeps "$folder/context"
build "$folder/context"
tell "image: $(size dpfl:cpu)"
echo "# a changed line" >>"$folder/context/dpfl_lightning/fit.py"
begun=$SECONDS
build "$folder/context"
tell "built again after a changed line of code: $((SECONDS - begun)) s"

container=$(images from --pull-never dpfl:cpu)
trap 'images rm "$container" >/dev/null' EXIT
run() { images run "$container" -- "$@"; } # as the user of the image, in its folder, with its volume

words='{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}{{range .OCIv1.Config.Cmd}}{{.}} {{end}}'
read -r -a main < <(images inspect --format "$words" "$container"; echo)
run "${main[@]}" --rounds 2 --output_dir runs/main
run dpfl ledger runs/main
tell "main job of two rounds: ${main[*]}"

job=(dpfl fit --config conf/digits.yaml --rounds 40 --output_dir runs/job --resume auto)
# shellcheck disable=SC2016
run sh -c '"$@" & job=$!
    until [ "$(cat runs/job/metrics.jsonl 2>/dev/null | wc -l)" -ge 3 ]; do kill -0 $job && sleep 0.1; done
    kill -TERM $job; wait $job; test $? = 143' stop "${job[@]}"
run test ! -e /results/job/result.json
run "${job[@]}"
run grep --quiet '"rounds": 40' /results/job/result.json
run dpfl ledger runs/job
tell "a job was stopped, resumed, and finished"

images run --volume "$PWD/compose.yaml:/compose.yaml:ro" "$container" -- python - <<END
import os, subprocess, time, mlflow, yaml
health = yaml.safe_load(open("/compose.yaml"))["services"]["mlflow"]["healthcheck"]["test"][1:]
store = ["--backend-store-uri", os.environ["MLFLOW_TRACKING_URI"]]
page = subprocess.Popen(["mlflow", "ui", "--host", "127.0.0.1", "--workers", "1", *store], stderr=subprocess.DEVNULL)
try:
    while subprocess.run(health, stderr=subprocess.DEVNULL).returncode:
        assert page.poll() is None
        time.sleep(1)
    mlflow.set_tracking_uri("http://127.0.0.1:5000")
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    print(*(f"{run.info.run_name}: {run.info.status}" for run in runs), sep="\n")
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
finally:
    page.terminate()
    page.wait()
END
tell "the page of MLflow is healthy and shows both runs"
