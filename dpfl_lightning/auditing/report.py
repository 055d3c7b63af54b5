"""Findings of an audit, and their text report: measured and claimed values, and their interpretation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfl_lightning.runtime.text import at_most, columns

#: check -> what it shows
MEANING = {
    "sensitivity": "one added record, with the same noise on both sides: exact, for every engine on this model",
    "isolation": "the same among huge, tiny, constant and broken records: detects a model that mixes records",
    "tiny norms": "the same for gradients so small, from inputs so large, that float32 cannot hold their squares",
    "company": "bits of a record's clipped gradient beside other records, under weights that make the last bits large",
    "grid": "noisy sums are multiples of a public power of two, so that their precision reveals nothing; exact",
    "fresh noise": "two starts, repeated releases and other seeds have independent noise of the planned size",
    "answers": "every planned answer has a mechanism or makes epsilon infinite; equal questions are paid for twice",
    "sampling": "the draws: no record twice in a step, and none drawn more often than the accountant assumes",
    "noise": "its size is as planned, and does not depend on how many records were drawn",
    "canary": "one full step: how far the worst of some records moves the release, relative to the noise",
    "round": "one round as the server sees it; its bound is far below the true value, so it finds gross mistakes only",
    "one run": "the whole schedule in one training; also far below the true value, as all canaries share one noise",
    "one run's curve": "the same guesses against the whole claimed curve; its epsilon is the claim for less noise",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was measured, the measured bounds and the claim as text, and whether it is refuted.

    `confidence` is the probability with which a sound build is not refuted (None: always), `figures` are for JSON.
    """

    check: str
    what: str
    measured: str
    claimed: str
    refuted: bool
    confidence: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def text(found: Mapping[str, Any]) -> str:
    """Return the findings of every client as a table of at most 80 columns, the verdict, and how to read it.

    Equal results of a check, as of several engines, are one row. What is refuted is described in a sentence.
    """
    parts = []
    for client in found["clients"]:
        passed = [one for one in client["findings"] if not one["refuted"]]
        rows = dict.fromkeys((one["check"], one["measured"], one["claimed"]) for one in passed)
        table = columns([("check", "measured", "claimed"), *rows])
        parts.append("\n".join([claim_words(client), table, *_refuted(client["findings"])]))
    checks = dict.fromkeys(finding["check"] for client in found["clients"] for finding in client["findings"])
    if found["refuted"]:
        parts.append(f"REFUTED: {'; '.join(found['refuted'])}. This build does not keep its claimed epsilon.")
    elif found["clients"]:
        parts.append(
            f"Nothing is refuted. A sound build gets this result with probability {found['confidence']:g}. A lower "
            "bound at or below its claim proves nothing; one above it would have refuted the build."
        )
    parts += [f"Not audited: {words}." for words in found["not_audited"]]
    meaning = "\n".join(f"{check}: {MEANING[check]}." for check in checks)
    units = [client["claim"]["unit"] for client in found["clients"]]
    parts.append(meaning.replace("record", units[0]) if units else meaning)
    return "\n\n".join(filter(None, parts))


def _refuted(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{verdict}: {check}, {what}: {measured}. Claimed: {claimed}. Confidence: {confidence}."
        for check, what, measured, claimed, confidence, verdict in map(row, findings)
        if verdict == "REFUTED"
    ]


def claim_words(client: Mapping[str, Any]) -> str:
    claim = client["claim"]
    sampling = {"poisson": "Poisson", "shuffle": "shuffled"}[claim["sampling"]]
    return (
        f"Client {client['name']} claims epsilon {at_most(claim['epsilon'])} at delta {at_most(claim['delta'])} "
        f"({claim['adjacency']}, {claim['accountant']}): {claim['steps']} steps, {sampling} batches of "
        f"{claim['expected_batch_size']:g} at rate {claim['sample_rate']:.4g}, clip norm {claim['clip_norm']:g}, "
        f"{claim['mechanism']} noise, multiplier {claim['noise_multiplier']:.4g}."
    )


def row(finding: Mapping[str, Any]) -> tuple[str, ...]:
    confidence = "certain" if finding["confidence"] is None else f"{100 * finding['confidence']:.5g} %"
    verdict = "REFUTED" if finding["refuted"] else "not refuted"
    return (finding["check"], finding["what"], finding["measured"], finding["claimed"], confidence, verdict)
