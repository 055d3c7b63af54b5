"""The check of a GPU: its report, its sections as processes, and all of it on a CPU."""

import json
import sys
from importlib.util import find_spec

import pytest

from experiments.speed.__main__ import main
from experiments.speed.gpu import SECTIONS, gpu_report, in_process, status

EXACT = {"fast, cnn_small, batches 9": 2e-6, "products": "highest", "cudnn_tf32": False, "noise_scale": "1.0001"}
MEASURED = {
    "model": "cnn_small",
    "input_shape": [1, 28, 28],
    "words": 0,
    "parameters": 28938,
    "clients": 20,
    "records": 2400,
    "batch_size": "16 to 128",
    "records_per_second": {"ours": 100.0, "nonprivate": 50.0},
    "seconds_per_round": {"ours": [1.0], "nonprivate": [2.0]},
    "ratio_vs_nonprivate": 2.0,
    "range_vs_nonprivate": [1.5, 2.5],
    "gpu": {"ours": {"peak_memory_mib": 1234, "utilisation_percent": 56}},
}


def test_the_report_shows_every_section_and_only_wrong_results_count():
    company = {"models": 264, "last_bits": 3, "differing": {}, "alone": ["gru (fast)"], "not_searched": ["elu"]}
    taps, whole = {"an LSTM (vmap)": 3e-7}, {"main job": "90 s, accuracy 79.5 %"}
    known = {"correct": EXACT, "company": company, "taps": taps, "whole": whole}
    results = {name: known.get(name, MEASURED) for name in SECTIONS}
    results |= {"machine": {"device": "a GPU", "torch": "2.13"}, "tiny": False, "seconds": 400.0}
    results["common"] = {"failed": "not done after 80 s"}
    text = gpu_report(results)
    for words in (
        "- correct: passed, 1 distances of at most 2e-06; products highest, TF32 of cuDNN off",
        "- company: passed, 264 models, 3 with other last bits of sums in float64; one record at a time: gru (fast); 1",
        "- taps: passed, 1 distances of at most 3e-07",
        "- whole runs: main job: 90 s, accuracy 79.5 %",
        "- common: FAILED, not done after 80 s",
        "| **2.00 x** | 1.50 to 2.50 | mixed         | plain SGD without privacy | 100 records/s | 50.0 records/s |",
    ):
        assert words in text, (words, text)
    assert status(results) == 0
    for name in ("correct", "company", "taps"):
        assert status({**results, name: {"failed": "ArithmeticError: 0.1"}}) == 1
        assert f"- {name}: FAILED, ArithmeticError: 0.1" in gpu_report(
            {**results, name: {"failed": "ArithmeticError: 0.1"}}
        )


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("", None),
        ("time.sleep(60)", "not done after 1 s"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_a_section_keeps_what_it_found_before_it_failed(code, failed):
    code = f"import os, signal, sys, time; print('{{\"a\": 1}}'); print('{{\"a\": 2}}', flush=True); {code}"
    found = in_process([sys.executable, "-c", code], seconds=1.0 if failed and "1 s" in failed else 30.0)
    assert found == {"a": 2, **({"failed": failed} if failed else {})}


@pytest.mark.e2e
def test_all_of_it_runs_on_a_cpu(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("experiments.speed.gpu.PAGE", tmp_path / "gpu.md")
    assert main(["gpu", "--device", "cpu", "--tiny", "--save", str(tmp_path / "gpu.json")]) == 0
    out, err = capfd.readouterr()
    results = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "gpu.json").read_text()) == results
    assert "- whole runs: main job: " in (tmp_path / "gpu.md").read_text()
    failed = {name for name in SECTIONS if "failed" in results[name]}
    assert set(SECTIONS) < set(results) and failed == (set() if find_spec("peft") else {"lora"}), results
    assert "section mixed, at most" in err and "Tiny rounds test the check" in out
