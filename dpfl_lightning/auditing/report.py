"""An audit in words: what was measured beside what is claimed, and what that can and cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfl_lightning.auditing.findings import at_most
from dpfl_lightning.runtime.text import markdown

HEAD = ("check", "what", "measured", "claimed", "confidence", "verdict")

BATCHES = {"poisson": "Poisson", "shuffle": "shuffled"}

#: check -> what it can show
MEANING = {
    "sensitivity": "one planted record, with the same noise on both sides: exact, for every engine on this net",
    "isolation": "the same in a crowd of huge, tiny, constant and broken records: a model that mixes records shows",
    "tiny norms": "the same for gradients so small, from inputs so large, that float32 cannot hold their squares",
    "grid": "noisy sums are multiples of a public power of two, so that their precision tells nothing; exact",
    "fresh noise": "two starts, repeated releases and other seeds have independent noise of the planned size",
    "answers": "every planned answer has a mechanism or makes epsilon infinite; equal questions are paid for twice",
    "sampling": "the draws themselves: no record twice in a step, none drawn more often than the accountant was told",
    "noise": "its size is what was planned, and does not show how many records were drawn",
    "canary": "one full step: how far the worst of some records moves what is released, over the noise",
    "round": "one round as the server sees it; its bound is far below the truth, so it finds gross mistakes only",
    "one run": "the whole schedule in one training; far below the truth, too, for all canaries share one noise",
    "one run's curve": "the same guesses held to the whole claimed curve; its epsilon is what is claimed of less noise",
}


def text(found: Mapping[str, Any]) -> str:
    """The findings of every client as a table, the verdict, and how to read it."""
    parts = [
        f"{claim_words(one)}\n{markdown(HEAD, [row(finding) for finding in one['findings']])}"
        for one in found["clients"]
    ]
    checks = dict.fromkeys(finding["check"] for one in found["clients"] for finding in one["findings"])
    if found["refuted"]:
        parts.append(f"REFUTED: {'; '.join(found['refuted'])}. This build does not do what its epsilon says.")
    elif found["clients"]:
        parts.append(
            f"Nothing is refuted. A sound build is told so with probability {found['confidence']:g}. A lower bound at "
            "or below its claim proves nothing; one above it would have disproved the build."
        )
    parts += [f"Not audited: {words}." for words in found["not_audited"]]
    parts += ["\n".join(f"{check}: {MEANING[check]}." for check in checks)] if checks else []
    return "\n\n".join(parts)


def claim_words(one: Mapping[str, Any]) -> str:
    """What the plan says of a client, in one line."""
    claim, drawn = one["claim"], BATCHES[one["claim"]["sampling"]]
    return (
        f"Client {one['client']} claims epsilon {at_most(claim['epsilon'])} at delta {claim['delta']:g} "
        f"({claim['adjacency']}, {claim['accountant']}): {claim['steps']} steps, {drawn} batches of "
        f"{claim['expected_batch_size']:g} at rate {claim['sample_rate']:.4g}, clip norm {claim['clip_norm']:g}, "
        f"{'Laplace ' if claim.get('mechanism') == 'laplace' else ''}noise multiplier {claim['noise_multiplier']:.4g}."
    )


def row(finding: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    sure = "certain" if finding["confidence"] is None else f"{100 * finding['confidence']:.5g} %"
    verdict = "REFUTED" if finding["refuted"] else "not refuted"
    return (finding["check"], finding["what"], finding["measured"], finding["claimed"], sure, verdict)
